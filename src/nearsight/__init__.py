"""Local self-attention for vision: drop-in layers, kernels that train, the papers' networks.

Importing registers the networks in timm; nothing else happens.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
