"""Functions on tensors, without parameters: each op in its own folder, each with its reference beside its fast forms."""

from nearsight.ops.block.functional import block_attention
from nearsight.ops.dispatch import BackendReport, backends
from nearsight.ops.explicit.functional import explicit_attention, explicit_weights
from nearsight.ops.local.functional import local_attention, local_attention_projected, local_attention_weights
from nearsight.ops.qna.functional import qna, qna_weights

__all__ = [
    "BackendReport",
    "backends",
    "block_attention",
    "explicit_attention",
    "explicit_weights",
    "local_attention",
    "local_attention_projected",
    "local_attention_weights",
    "qna",
    "qna_weights",
]
