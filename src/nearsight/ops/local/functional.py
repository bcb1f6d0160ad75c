"""`local_attention`: every pixel attends to the window around it (SASA)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from nearsight.errors import ArgumentValueError
from nearsight.ops import checks, dispatch
from nearsight.ops.local import reference, torch_impl, triton_impl
from nearsight.ops.local.call import OP, prepare

__all__ = ["local_attention", "local_attention_projected", "local_attention_weights"]

ENTRY = dispatch.register(OP, prepare, triton=triton_impl, torch=torch_impl, reference=reference)


def local_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    *,
    window: int | tuple[int, int],
    rel_row: Tensor | None = None,
    rel_col: Tensor | None = None,
    key_mask: Tensor | None = None,
    dilation: int | tuple[int, int] = 1,
    border: str = "mask",
    scale: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """Attend from every pixel to the window centred on it.

        y_ij = Σ_ab softmax_ab( scale · (q_ij·k_ab + q_ij·r_{a−i,b−j}) ) v_ab ,   (a, b) in the kh×kw window of (i, j)

    r joins a row and a column embedding: `rel_row` meets the first half of D, `rel_col` the second. Tap t of k sits at
    (t − (k−1)//2)·dilation. Memory is that of the inputs; nothing of size kh·kw·H·W is kept.

    Args:
        q, k, v: [B, H, W, heads, D]. `k=None` leaves the content term out (then a relative table is needed).
        window: taps per axis, an int or (rows, columns); odd or even, also larger than the map.
        rel_row: [kh, D/2] shared by the heads, or [heads, kh, D/2].
        rel_col: [kw, D/2] or [heads, kw, D/2].
        key_mask: bool [B, H, W], True where a pixel may be attended. A query with nothing to attend to outputs 0.
        dilation: distance between taps, an int or (rows, columns).
        border: "mask" leaves taps outside the image out; "zeros" gives them k = v = 0, so they take softmax mass.
        scale: factor on the logits, positions included.
        backend: "triton", "torch", "reference", or None for the fastest that can run the call.

    Returns:
        [B, H, W, heads, D], in the dtype of q (under autocast: autocast's).

    >>> import torch
    >>> from nearsight.ops import local_attention
    >>> q, k, v = torch.randn(3, 1, 5, 7, 2, 8).unbind(0)
    >>> local_attention(q, k, v, window=3).shape
    torch.Size([1, 5, 7, 2, 8])
    """
    call = prepare(
        q,
        k,
        v,
        window=window,
        rel_row=rel_row,
        rel_col=rel_col,
        key_mask=key_mask,
        dilation=dilation,
        border=border,
        scale=scale,
    )
    return dispatch.run(OP, ENTRY.backends, backend, call)


def local_attention_projected(
    pixels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    window: int | tuple[int, int],
    content: bool = True,
    rel_row: Tensor | None = None,
    rel_col: Tensor | None = None,
    key_mask: Tensor | None = None,
    dilation: int | tuple[int, int] = 1,
    border: str = "mask",
    scale: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """`local_attention` of q, k, v = one linear projection of `pixels` (q and v alone without `content`).

    `pixels` is [B, H, W, Cin], `weight` [3·heads·D, Cin] (2·heads·D without content) with the rows of q first. The same result
    as projecting first; a backend with fused kernels keeps the pixels for the backward instead of q, k and v, which are
    three times as much, and projects again.

    >>> import torch
    >>> from nearsight.ops import local_attention_projected
    >>> local_attention_projected(torch.randn(1, 5, 7, 12), torch.randn(3 * 16, 12), num_heads=2, window=3).shape
    torch.Size([1, 5, 7, 2, 8])
    """
    checks.check_count(OP, "num_heads", num_heads)
    parts = 3 if content else 2
    checks.check_float_tensor(OP, "pixels", pixels, 4, "[B, H, W, channels]")
    checks.check_float_tensor(OP, "weight", weight, 2, f"[{parts}·heads·D, channels]")
    if weight.shape[1] != pixels.shape[3] or weight.shape[0] % (parts * num_heads):
        raise ArgumentValueError(
            f"{OP}: got weight of shape {checks.shape_text(weight.shape)}, wanted [{parts}·{num_heads}·D, "
            f"{pixels.shape[3]}]: a row per channel of {'q, k and v' if content else 'q and v'}, a column per channel of pixels."
        )
    if bias is not None:
        checks.check_float_tensor(OP, "bias", bias, 1, f"[{parts}·heads·D]")
        checks.check_shape(OP, "bias", bias, (weight.shape[0],), "a number per row of weight")
    checks.check_same_device(OP, pixels=pixels, weight=weight, bias=bias)
    cast = dispatch.autocast_dtype(pixels)
    if cast is not None:
        pixels, weight = pixels.to(cast), weight.to(cast)
        bias = None if bias is None else bias.to(cast)
    checks.check_same_dtype(OP, pixels=pixels, weight=weight, bias=bias)
    flat = pixels.flatten(1, 2)
    packed = F.linear(flat, weight, bias).unflatten(-1, (parts, num_heads, -1)).unflatten(1, pixels.shape[1:3])
    call = prepare(
        packed.select(3, 0),
        packed.select(3, 1) if content else None,
        packed.select(3, -1),
        window=window,
        rel_row=rel_row,
        rel_col=rel_col,
        key_mask=key_mask,
        dilation=dilation,
        border=border,
        scale=scale,
    )
    if backend in (None, "triton") and triton_impl.refusal(call) is None:
        return triton_impl.run_projected(packed.detach(), flat, weight, bias, call)
    return dispatch.run(OP, ENTRY.backends, backend, call)


def local_attention_weights(
    q: Tensor,
    k: Tensor | None,
    *,
    window: int | tuple[int, int],
    rel_row: Tensor | None = None,
    rel_col: Tensor | None = None,
    key_mask: Tensor | None = None,
    dilation: int | tuple[int, int] = 1,
    border: str = "mask",
    scale: float = 1.0,
) -> Tensor:
    """The softmax weights of `local_attention`, [B, H, W, heads, kh·kw], for pictures: k² times the memory of the op.

    Weight t belongs to the tap in row t // kw, column t % kw of the window; taps that may not be attended have 0.

    >>> import torch
    >>> from nearsight.ops import local_attention_weights
    >>> q, k = torch.randn(2, 1, 5, 7, 2, 8).unbind(0)
    >>> weights = local_attention_weights(q, k, window=3)
    >>> weights.shape, bool((weights.sum(-1) - 1).abs().max() < 1e-6)
    (torch.Size([1, 5, 7, 2, 9]), True)
    """
    call = prepare(
        q,
        k,
        q,
        window=window,
        rel_row=rel_row,
        rel_col=rel_col,
        key_mask=key_mask,
        dilation=dilation,
        border=border,
        scale=scale,
    )
    return reference.weights(call)
