"""Layers: nn.Modules around the ops."""
