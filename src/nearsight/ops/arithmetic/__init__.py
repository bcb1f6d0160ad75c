"""Arithmetic that the ops' kernels share."""
