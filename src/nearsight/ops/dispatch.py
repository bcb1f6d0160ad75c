"""One table of backends per op: who can run a call, why others cannot, and which one runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nearsight.errors import ArgumentValueError, BackendError

__all__ = [
    "Backend",
    "BackendReport",
    "OpEntry",
    "always",
    "autocast_dtype",
    "backends",
    "exporting",
    "full_precision",
    "refuse_second_derivatives",
    "register",
    "run",
    "transform_refusal",
]


class Backend(NamedTuple):
    """A way to run an op. `refusal` gets the checked call and says why it cannot run it ("needs …, got …"), or None."""

    name: str
    run: Callable[[Any], Tensor]
    refusal: Callable[[Any], str | None]


class OpEntry(NamedTuple):
    """An op as the dispatcher knows it: its argument check and its backends, fastest first."""

    prepare: Callable[..., Any]
    backends: Sequence[Backend]


class BackendReport(NamedTuple):
    """Whether one backend can run a call; `reason` is None when it can. The first usable one is what `backend=None` takes."""

    name: str
    usable: bool
    reason: str | None


_OPS: dict[str, OpEntry] = {}


def _always(call: Any) -> str | None:
    return None


def transform_refusal() -> str | None:
    """Why no registered operator can run now ("needs …, got …"), or None: their gradients are those of autograd's backward.

    In forward mode torch would take them for constants, without a word.
    """
    if torch.compiler.is_compiling():
        return None
    transforms = torch._C._functorch  # type: ignore[attr-defined, unused-ignore]
    gradients = (transforms.TransformType.Grad, transforms.TransformType.Jvp)
    within = any(layer.key() in gradients for layer in transforms.get_interpreter_stack() or ())
    if within or forward_ad._current_level >= 0:
        return "needs gradients by autograd's backward, got a call within torch.func's or in forward mode"
    return None


def refuse_second_derivatives(op: str, backward: Any, instead: str = "use backend='reference'") -> None:
    """Have a gradient of the registered operator `backward`, which makes gradients itself, end in a sentence."""

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise BackendError(
            f"{op}: got a gradient of a gradient, wanted first derivatives: the chosen backend has no others; {instead}."
        )

    backward.register_autograd(refuse)


def register(
    op: str, prepare: Callable[..., Any], *, triton: Any, native: Any = None, torch: Any, reference: Any
) -> OpEntry:
    """Enter an op with the modules of its backends, fastest first; all but the reference may refuse calls."""
    _OPS[op] = OpEntry(
        prepare,
        (
            Backend("triton", triton.run, triton.refusal),
            *(() if native is None else (Backend("native", native.run, native.refusal),)),
            Backend("torch", torch.run, getattr(torch, "refusal", _always)),
            Backend("reference", reference.run, _always),
        ),
    )
    return _OPS[op]


def run(op: str, table: Sequence[Backend], name: str | None, call: Any) -> Tensor:
    """Run `call` on the named backend, or on the first of `table` that does not refuse it."""
    if name is None:
        for backend in table:
            if backend.refusal(call) is None:
                return backend.run(call)
        raise BackendError(f"{op}: no backend can run this call: {_reasons(table, call)}.")
    for backend in table:
        if backend.name == name:
            reason = backend.refusal(call)
            if reason is not None:
                usable = ", ".join(b.name for b in table if b.refusal(call) is None) or "none"
                raise BackendError(f"{op}: backend '{name}' cannot run this call: {reason}. Usable here: {usable}.")
            return backend.run(call)
    known = ", ".join(repr(b.name) for b in table)
    raise ArgumentValueError(f"{op}: got backend={name!r}, wanted one of {known}, or None to let nearsight choose.")


def backends(op: str, *args: Any, **kwargs: Any) -> list[BackendReport]:
    """Say which backends can run a call of `op`, and why the others cannot.

    Takes the op's name and the arguments of the call, without `backend`.

    >>> import torch, nearsight
    >>> q = torch.randn(1, 6, 5, 2, 8)
    >>> [r.name for r in nearsight.ops.backends("local_attention", q, q, q, window=3) if r.usable]
    ['torch', 'reference']
    """
    entry = _OPS.get(op)
    if entry is None:
        raise ArgumentValueError(f"backends: got op {op!r}, wanted one of {', '.join(sorted(_OPS))}.")
    call = entry.prepare(*args, **kwargs)
    reports = []
    for backend in entry.backends:
        reason = backend.refusal(call)
        reports.append(BackendReport(backend.name, reason is None, reason))
    return reports


def _reasons(table: Sequence[Backend], call: Any) -> str:
    return "; ".join(f"{b.name}: {b.refusal(call)}" for b in table)


def exporting() -> bool:
    """Whether `torch.export` is tracing.

    The flag behind `torch.compiler.is_exporting()`: torch 2.11's `torch.compile` answers that question with True.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def always(true: bool | torch.SymBool) -> bool:
    """Whether something about sizes may be relied on: it is true, and in an exported graph true of every size it will meet."""
    if exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # half a second

        return statically_known_true(true)
    return bool(true)


# Asked once: torch.compile of torch 2.11 cannot trace the question.
AUTOCAST_DEVICES = tuple(d for d in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia") if torch.amp.is_autocast_available(d))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype autocast asks of a matrix product on this tensor's device, or None outside autocast (float64 never changes)."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or device not in AUTOCAST_DEVICES:
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Autocast off on the tensor's device, so that a matrix product of float32 stays in float32."""
    device = tensor.device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
