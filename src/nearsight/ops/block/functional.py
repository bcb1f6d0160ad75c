"""`block_attention`: every pixel attends to the block it lies in (SASA's attention stem)."""

from __future__ import annotations

from torch import Tensor

from nearsight.ops import dispatch
from nearsight.ops.block import reference, torch_impl, triton_impl
from nearsight.ops.block.call import OP, prepare

__all__ = ["block_attention"]

ENTRY = dispatch.register(OP, prepare, triton=triton_impl, torch=torch_impl, reference=reference)


def block_attention(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    heads: int,
    block: int = 4,
    rel_row: Tensor | None = None,
    rel_col: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Project an image and attend inside its non-overlapping blocks.

        y_ij = Σ_ab softmax_ab( q_ij·k_ab + q_ij·r_{a−i,b−j} ) v_ab ,   (a, b) in the block of (i, j)
        q = W_Q x ,  k = W_K x ,  v_ab = W_V(a, b) x_ab

    r joins a row and a column embedding: `rel_row` meets the first half of D, `rel_col` the second. Blocks start at the
    top left; where the image ends inside one, the rest of it is not there. Made for images of few channels, the input of a
    network: the projections are part of the op, and Triton keeps no more than x for the backward.

    Args:
        x: [B, H, W, Cin], any strides.
        w_q, w_k: [C, Cin]; the heads split C.
        w_v: [C, Cin], or one matrix for each place in a block, [block², C, Cin], rows first.
        heads: attention heads, D = C / heads.
        block: side of the blocks.
        rel_row, rel_col: [2·block − 1, D/2], the embedding of offset o at o + block − 1, shared by the heads.
        key_mask: bool [B, H, W], True where a pixel may be attended. A block with nothing to attend to outputs 0. Elsewhere x
            must be finite all the same.
        backend: "triton", "torch", "reference", or None for the fastest that can run the call.

    Returns:
        [B, H, W, C], in the dtype of x (under autocast: autocast's).

    >>> import torch
    >>> from nearsight.ops import block_attention
    >>> w_q, w_k, w_v = torch.randn(3, 16, 3).unbind(0)
    >>> block_attention(torch.randn(1, 6, 9, 3), w_q, w_k, w_v, heads=2).shape
    torch.Size([1, 6, 9, 16])
    """
    call = prepare(x, w_q, w_k, w_v, heads=heads, block=block, rel_row=rel_row, rel_col=rel_col, key_mask=key_mask)
    return dispatch.run(OP, ENTRY.backends, backend, call)
