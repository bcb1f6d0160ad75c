"""Layers: nn.Modules around the ops."""

from nearsight.layers.attention_stem import AttentionStem2d
from nearsight.layers.augmented import AttentionAugmentedConv2d, ExplicitAugmentedConv2d
from nearsight.layers.explicit import ExplicitAttention2d
from nearsight.layers.local_attention import LocalAttention2d
from nearsight.layers.qna import QnA2d, QnAUpsample2d
from nearsight.layers.replace import Replacement, replace_conv
from nearsight.layers.window_attention import WindowAttention2d

__all__ = [
    "AttentionAugmentedConv2d",
    "AttentionStem2d",
    "ExplicitAttention2d",
    "ExplicitAugmentedConv2d",
    "LocalAttention2d",
    "QnA2d",
    "QnAUpsample2d",
    "Replacement",
    "WindowAttention2d",
    "replace_conv",
]
