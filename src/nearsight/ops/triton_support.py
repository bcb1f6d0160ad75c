"""What the Triton backends share: whether Triton can run here, and the sentences they refuse with.

Nothing here imports Triton: an installation without it imports nearsight all the same. Only kernels and their helpers do
(`*kernels.py` of an op, `ring_parts.py` of local attention, `lanes.py`, `powers.py` and `shares.py` of QnA), and they are
imported inside the functions that launch.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from nearsight.ops.dispatch import exporting, transform_refusal

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "common_refusal",
    "dot_precision",
    "early_launch",
    "multiprocessors",
    "next_power_of_two",
    "planned_for_gpus",
    "register_cap",
    "shared_memory",
]

# Read once, as Triton does when it decorates a kernel, and constants to torch.compile.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT32_LIMIT = 2**31


def common_refusal(tensor: Tensor, *others: Tensor | None) -> str | None:
    """Why no Triton kernel can run on these tensors ("needs …, got …"), or None.

    `tensor` decides device and dtype; in each tensor one image must be reachable by 32-bit offsets (batches are not limited).
    """
    if exporting():
        return "needs a call that runs, got one that is being exported"
    device = tensor.device.type
    # Nothing that is traced is planned, and torch 2.11 cannot trace how that is asked.
    planned = device == "meta" and not torch.compiler.is_compiling() and _planning.get()
    if not (HAS_TRITON or planned):
        return "needs the triton package, got a Python without it; install triton"
    if not (device == "cuda" or planned or (INTERPRETED and device == "cpu")):
        return f"needs CUDA tensors, got {device}"
    if device == "cuda" and _capability(tensor.device.index or 0) < (8, 0):
        return f"needs a GPU of compute capability 8.0 or later, got {_capability(tensor.device.index or 0)}"
    if tensor.dtype not in DTYPES:
        return f"needs float32, bfloat16 or float16, got {str(tensor.dtype).removeprefix('torch.')}"
    for each in (tensor, *others):
        if each is not None and (_image_reach(each) >= INT32_LIMIT or _image_size(each) > INT32_LIMIT):
            return f"needs images of fewer than 2³¹ elements, got shape {list(each.shape)}"
    return transform_refusal()


# Whether tensors without memory stand for a GPU's.
_planning: contextvars.ContextVar[bool] = contextvars.ContextVar("nearsight_planning", default=False)


@contextlib.contextmanager
def planned_for_gpus() -> Iterator[None]:
    """Calls on the meta device take meanwhile the way that they would take on a GPU with Triton, were it here or not."""
    before = _planning.set(True)
    try:
        yield
    finally:
        _planning.reset(before)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _capability(index: int) -> tuple[int, int]:
    if torch.version.hip is not None:
        return (9, 0)
    return torch.cuda.get_device_capability(index)


def early_launch(device: torch.device) -> dict[str, bool]:
    """The constant EARLY of a kernel and, where the GPU can, the option that goes with it: it starts while the one before ends.

    Such a kernel waits itself for all that came before, in every program and before it reads or writes anything. Whatever
    follows it, written for this or not, then finds everything finished, as ever.
    """
    if INTERPRETED or torch.version.hip is not None or device.type == "cpu" or not torch.cuda.is_available():
        return {"EARLY": False}
    if _capability(torch.cuda.current_device() if device.index is None else device.index) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


def register_cap(registers: int | None) -> dict[str, int]:
    """The option of a launch that caps the registers of a thread, one of NVIDIA's compiler alone; None: none."""
    return {} if registers is None or torch.version.hip is not None else {"maxnreg": registers}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def shared_memory(index: int) -> int:
    """Bytes of it that a program can have on a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)


def multiprocessors(device: torch.device) -> int:
    """How many the GPU has, the current one for tensors without memory; 1 without a GPU."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return 1
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _image_reach(tensor: Tensor) -> int:
    """Elements from the first of an image (all axes but the batch) to its last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))


def _image_size(tensor: Tensor) -> int:
    """Elements of an image, which results like it have side by side, whatever the tensor's own strides."""
    size = 1
    for each in tensor.shape[1:]:
        size *= each
    return size


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of a kernel's products: float32 means float32, never TF32 behind the user's back.

    Three TF32 products give its accuracy (the error rule holds) on NVIDIA's tensor cores; exact ones compile for minutes.
    """
    if dtype != torch.float32:
        return "tf32"
    return "tf32x3" if torch.version.hip is None else "ieee"


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (1 for n ≤ 1): the length of a Triton range that holds n.

    >>> [next_power_of_two(n) for n in (1, 3, 8, 9)]
    [1, 4, 8, 16]
    """
    return 1 << max(n - 1, 0).bit_length()
