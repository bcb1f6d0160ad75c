"""`qna`: learned queries, shared by all windows, gather each window's values (QnA)."""

from __future__ import annotations

from torch import Tensor

from nearsight.ops import dispatch
from nearsight.ops.qna import native_impl, reference, torch_impl, triton_impl
from nearsight.ops.qna.call import OP, prepare

__all__ = ["qna", "qna_weights"]

ENTRY = dispatch.register(OP, prepare, triton=triton_impl, native=native_impl, torch=torch_impl, reference=reference)


def qna(
    scores: Tensor,
    values: Tensor,
    *,
    window: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
    position_bias: Tensor | None = None,
    tap_scale: Tensor | None = None,
    key_mask: Tensor | None = None,
    combine: str = "sum",
    backend: str | None = None,
) -> Tensor:
    """Gather the values of each window by the softmax of its scores, once per learned query.

        z_ij = Σ_l Σ_n softmax_n( scores_{n,l} + position_bias_{n−ij,l} ) · tap_scale_{n−ij,l} · values_n

    over the pixels n of the kh×kw window centred on (i·stride, j·stride); tap t of k sits at t − (k−1)//2, and taps
    outside the image are left out. `tap_scale` acts after the softmax, not on its normaliser. The maximum of each window is
    subtracted, so no score overflows; scores are used in float32 whatever their dtype and autocast. Memory is O(H·W·L·C).

    Args:
        scores: [B, H, W, L, heads], each query's product with each pixel's key.
        values: [B, H, W, heads, D].
        window: taps per axis, an int or (rows, columns); odd or even, also larger than the map.
        stride: distance between windows, an int or (rows, columns).
        position_bias: [kh, kw, L, heads], added to the scores, or None.
        tap_scale: [kh, kw, L, heads], factor on the softmax weights, or None for 1.
        key_mask: bool [B, H, W], True where a pixel may be attended. A window with nothing to attend to outputs 0.
        combine: "sum" adds the queries' results, "stack" keeps them apart.
        backend: "triton", "native", "torch", "reference", or None for the fastest that can run the call.

    Returns:
        [B, ⌈H/stride⌉, ⌈W/stride⌉, heads, D], with combine="stack" [B, ⌈H/stride⌉, ⌈W/stride⌉, L, heads, D], in the dtype of
        values (under autocast: autocast's).

    >>> import torch
    >>> from nearsight.ops import qna
    >>> scores, values = torch.randn(1, 5, 7, 2, 4), torch.randn(1, 5, 7, 4, 8)
    >>> qna(scores, values, window=3, stride=2).shape
    torch.Size([1, 3, 4, 4, 8])
    """
    call = prepare(
        scores,
        values,
        window=window,
        stride=stride,
        position_bias=position_bias,
        tap_scale=tap_scale,
        key_mask=key_mask,
        combine=combine,
    )
    return dispatch.run(OP, ENTRY.backends, backend, call)


def qna_weights(
    scores: Tensor,
    *,
    window: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
    position_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The softmax weights of `qna`, [B, ⌈H/stride⌉, ⌈W/stride⌉, L, heads, kh·kw], for pictures: k² times the memory.

    Weight t belongs to the tap in row t // kw, column t % kw of the window; taps that may not be attended have 0. What acts
    on the values is this times `tap_scale`, and may be negative.

    >>> import torch
    >>> from nearsight.ops import qna_weights
    >>> weights = qna_weights(torch.randn(1, 5, 7, 2, 4), window=3)
    >>> weights.shape, bool((weights.sum(-1) - 1).abs().max() < 1e-6)
    (torch.Size([1, 5, 7, 2, 4, 9]), True)
    """
    call = prepare(
        scores,
        scores.transpose(3, 4) if getattr(scores, "ndim", 0) == 5 else scores,
        window=window,
        stride=stride,
        position_bias=position_bias,
        key_mask=key_mask,
    )
    return reference.weights(call)
