"""`explicit_attention`: every pixel attends to all others by distance alone (ExpAtt)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nearsight.errors import ArgumentTypeError, ArgumentValueError
from nearsight.ops import checks, dispatch
from nearsight.ops.explicit import reference, torch_impl, triton_impl
from nearsight.ops.explicit.call import OP, check_options, prepare, radius_as_tensor

__all__ = ["explicit_attention", "explicit_weights"]

ENTRY = dispatch.register(OP, prepare, triton=triton_impl, torch=torch_impl, reference=reference)


def explicit_attention(
    values: Tensor,
    *,
    kind: str,
    radius: float | Tensor | None = None,
    offset: float = 1.0,
    key_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Average the whole map around every pixel, with weights that fall with the distance in a given form.

        y_i = Σ_j (G_ij + offset) v_j / Σ_j (G_ij + offset) ,   j over all pixels

    With dx, dy the distance in pixels on an H×W map and D = √(H² + W²), G_ij is

        constant        1
        linear          1 − √(dx² + dy²)/D
        cosine          ½ (1 + cos(π √(dx² + dy²)/D))
        gaussian        exp(−((dx/W)² + (dy/H)²) / 2σ²)
        exp_euclidean   exp(−√((dx/W)² + (dy/H)²) / σ)
        exp_manhattan   exp(−(|dx|/W + |dy|/H) / σ)

    The HW×HW map is never made: memory is that of the values; linear, cosine and exp_euclidean add H matrices of W×W.

    Args:
        values: [B, H, W, C].
        kind: one of the six names above.
        radius: σ of the last three, a positive number, a 0-d tensor, or a tensor [heads]: channel c then takes radius
            c // (C / heads). None for the first three. A tensor's value below 1e-6 counts as 1e-6.
        offset: what every weight gains before the division, at least 0 (the paper's "+1").
        key_mask: bool [B, H, W], True where a pixel may be attended. A query with nothing to attend to outputs 0; with
            `offset=0` so does one whose weights all vanish.
        backend: "triton", "torch", "reference", or None for the fastest that can run the call.

    Returns:
        [B, H, W, C], in the dtype of values (under autocast: autocast's). The map is computed and summed in float32 at least.

    >>> import torch
    >>> from nearsight.ops import explicit_attention
    >>> values = torch.randn(1, 5, 7, 8)
    >>> explicit_attention(values, kind="gaussian", radius=0.75).shape
    torch.Size([1, 5, 7, 8])
    >>> mean = explicit_attention(values, kind="constant")
    >>> torch.allclose(mean, values.mean((1, 2), keepdim=True).expand_as(mean), atol=1e-6)
    True
    """
    call = prepare(values, kind=kind, radius=radius, offset=offset, key_mask=key_mask)
    return dispatch.run(OP, ENTRY.backends, backend, call)


def explicit_weights(
    size: tuple[int, int],
    *,
    kind: str,
    radius: float | Tensor | None = None,
    offset: float = 1.0,
    key_mask: Tensor | None = None,
    queries: Tensor | Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """The weights of `explicit_attention` on a map of `size` (H, W), for pictures.

    `queries` are the N pixels (y, x) whose rows are wanted; None gives all H·W, row by row, which is the HW×HW matrix
    the op avoids.

    Returns:
        [B, N, heads, H, W]; B is 1 without a key mask, heads is 1 unless `radius` holds several. Each H×W map sums to 1.

    >>> from nearsight.ops import explicit_weights
    >>> weights = explicit_weights((5, 7), kind="gaussian", radius=0.5, queries=[(2, 3), (0, 0)])
    >>> weights.shape, bool(weights[0, 0, 0].argmax() == 2 * 7 + 3)
    (torch.Size([1, 2, 1, 5, 7]), True)
    """
    op = "explicit_weights"
    height, width = checks.check_pair(op, "size", size)
    offset = check_options(op, kind, radius, offset)
    if key_mask is not None:
        batch = key_mask.shape[0] if isinstance(key_mask, Tensor) and key_mask.dim() else 1
        checks.check_key_mask(op, key_mask, batch, height, width)
    given = [t for t in (radius, key_mask) if isinstance(t, Tensor)]
    if len(given) == 2:
        checks.check_same_device(op, radius=given[0], key_mask=given[1])
    device = given[0].device if given else torch.device("cpu")
    wide = isinstance(radius, Tensor) and radius.dtype == torch.float64
    dtype = torch.float64 if wide else torch.float32
    where = (
        reference.pixels((height, width), device) if queries is None else _queries(op, queries, height, width, device)
    )
    with dispatch.full_precision(where):
        rows = reference.weights(
            kind, (height, width), where, radius_as_tensor(radius, dtype, device), offset, key_mask, dtype
        )
    return rows.transpose(1, 2)


def _queries(op: str, queries: object, height: int, width: int, device: torch.device) -> Tensor:
    """The query pixels as [N, 2]; pairs given as Python numbers must lie on the map."""
    layout = "pixels (y, x): a list of pairs or an integer tensor [N, 2]"
    if isinstance(queries, Tensor):
        if (
            queries.dim() != 2
            or queries.shape[1] != 2
            or queries.dtype.is_floating_point
            or queries.dtype == torch.bool
        ):
            raise ArgumentTypeError(
                f"{op}: got queries of shape {checks.shape_text(queries.shape)} and dtype {queries.dtype}, wanted {layout}."
            )
        return queries.to(device)
    if not isinstance(queries, Sequence) or not queries or not all(isinstance(pair, Iterable) for pair in queries):
        raise ArgumentTypeError(f"{op}: got queries={queries!r}, wanted {layout}.")
    pairs = [checks.check_pair(op, "queries", tuple(pair), minimum=0) for pair in queries]
    for y, x in pairs:
        if y >= height or x >= width:
            raise ArgumentValueError(f"{op}: got the query pixel ({y}, {x}), wanted one on the {height}×{width} map.")
    return torch.tensor(pairs, device=device)
