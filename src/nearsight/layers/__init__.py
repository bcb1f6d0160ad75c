"""Layers: nn.Modules around the ops."""

from nearsight.layers.local_attention import LocalAttention2d

__all__ = ["LocalAttention2d"]
