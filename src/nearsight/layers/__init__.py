"""Layers: nn.Modules around the ops."""

from nearsight.layers.attention_stem import AttentionStem2d
from nearsight.layers.local_attention import LocalAttention2d
from nearsight.layers.qna import QnA2d, QnAUpsample2d
from nearsight.layers.window_attention import WindowAttention2d

__all__ = ["AttentionStem2d", "LocalAttention2d", "QnA2d", "QnAUpsample2d", "WindowAttention2d"]
