"""A checked call of explicit attention: what every backend receives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.errors import ArgumentTypeError, ArgumentValueError
from nearsight.ops import checks
from nearsight.ops.dispatch import autocast_dtype

__all__ = ["FIXED_KINDS", "KINDS", "RADIUS_FLOOR", "SEPARABLE_KINDS", "ExplicitCall", "check_options", "prepare"]

OP = "explicit_attention"
LAYOUT = "[B, H, W, C]"

FIXED_KINDS = ("constant", "linear", "cosine")
SEPARABLE_KINDS = ("gaussian", "exp_manhattan")
KINDS = (*FIXED_KINDS, *SEPARABLE_KINDS, "exp_euclidean")

# A smaller radius counts as this one: every other pixel's G is 0 long before, and 1/σ² still fits float32.
RADIUS_FLOOR = 1e-6


class ExplicitCall(NamedTuple):
    """Arguments in one form. `radius` is [1] or [heads] in the dtype the map is computed in."""

    values: Tensor
    radius: Tensor | None
    key_mask: Tensor | None
    kind: str
    offset: float

    @property
    def heads(self) -> int:
        """Maps the channels are split over: channel c takes map c // (C / heads)."""
        return 1 if self.radius is None else self.radius.shape[0]

    @property
    def map_dtype(self) -> torch.dtype:
        """What the map is computed and summed in, whatever dtype the values have."""
        return torch.float64 if self.values.dtype == torch.float64 else torch.float32


def prepare(
    values: Tensor,
    *,
    kind: str,
    radius: float | Tensor | None = None,
    offset: float = 1.0,
    key_mask: Tensor | None = None,
) -> ExplicitCall:
    """Check the arguments of `explicit_attention` and bring them into one form (under autocast: autocast's dtype)."""
    checks.check_float_tensor(OP, "values", values, 4, LAYOUT)
    batch, height, width, channels = values.shape
    offset = check_options(OP, kind, radius, offset)
    checks.check_key_mask(OP, key_mask, batch, height, width)
    radius_tensor = radius if isinstance(radius, Tensor) else None
    checks.check_same_device(OP, values=values, radius=radius_tensor, key_mask=key_mask)
    if radius_tensor is not None and radius_tensor.dim() == 1 and channels % radius_tensor.shape[0]:
        raise ArgumentValueError(
            f"{OP}: got {radius_tensor.shape[0]} radii and {channels} channels, wanted channels that divide by the "
            f"heads; change one of them."
        )
    values = values.to(autocast_dtype(values) or values.dtype)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return ExplicitCall(values, radius_as_tensor(radius, dtype, values.device), key_mask, kind, offset)


def check_options(op: str, kind: Any, radius: Any, offset: Any) -> float:
    """Refuse a kind, radius or offset that does not fit; the offset as a float."""
    checks.check_choice(op, "kind", kind, KINDS)
    if kind in FIXED_KINDS and radius is not None:
        raise ArgumentValueError(
            f"{op}: got a radius with kind={kind!r}, wanted radius=None: the {kind} map has nothing to learn; leave it out."
        )
    if kind not in FIXED_KINDS:
        _check_radius(op, kind, radius)
    offset = checks.check_number(op, "offset", offset)
    if offset < 0:
        raise ArgumentValueError(
            f"{op}: got offset={offset!r}, wanted at least 0; a negative offset can make the normaliser vanish."
        )
    return offset


def _check_radius(op: str, kind: str, radius: Any) -> None:
    if radius is None:
        raise ArgumentValueError(
            f"{op}: got radius=None with kind={kind!r}, wanted a positive number, a 0-d tensor or a tensor [heads]; "
            f"the papers start at 0.75."
        )
    if not isinstance(radius, Tensor):
        checks.check_number(op, "radius", radius, positive=True)
        return
    if not radius.dtype.is_floating_point:
        raise ArgumentTypeError(
            f"{op}: got radius of dtype {radius.dtype}, wanted a floating-point dtype; convert it with .float()."
        )
    if radius.dim() > 1 or radius.numel() == 0:
        raise ArgumentValueError(
            f"{op}: got radius of shape {checks.shape_text(radius.shape)}, wanted a 0-d tensor or [heads]."
        )


def radius_as_tensor(radius: float | Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """A radius as [1] or [heads] in `dtype`."""
    if radius is None:
        return None
    if not isinstance(radius, Tensor):
        return torch.full((1,), float(radius), dtype=dtype, device=device)
    return radius.to(dtype).reshape(-1)
