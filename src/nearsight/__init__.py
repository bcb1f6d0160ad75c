"""Local self-attention for vision: drop-in layers, kernels that train, the papers' networks.

Importing registers the networks in timm; nothing else happens.
"""

from nearsight import models, ops
from nearsight.layers import (
    AttentionAugmentedConv2d,
    AttentionStem2d,
    ExplicitAttention2d,
    ExplicitAugmentedConv2d,
    LocalAttention2d,
    QnA2d,
    QnAUpsample2d,
    WindowAttention2d,
    replace_conv,
)
from nearsight.viz.maps import attention_maps

__version__ = "0.1.0"
__all__ = [
    "AttentionAugmentedConv2d",
    "AttentionStem2d",
    "ExplicitAttention2d",
    "ExplicitAugmentedConv2d",
    "LocalAttention2d",
    "QnA2d",
    "QnAUpsample2d",
    "WindowAttention2d",
    "__version__",
    "attention_maps",
    "models",
    "ops",
    "replace_conv",
]
