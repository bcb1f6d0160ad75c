"""What a run sets for its whole process: devices and precision, exactness, random generators."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from nearsight.errors import UserError
from nearsight.train.compilation import dynamo_plugin
from nearsight.train.config import RunConfig

__all__ = ["exactness", "make_accelerator", "seed_everything"]


def make_accelerator(config: RunConfig) -> Accelerator:
    """An Accelerator for the config's precision, device and compilation, whatever an earlier run in this process used."""
    AcceleratorState._reset_state()
    if config.train.precision == "fp16" and (config.train.device == "cpu" or not torch.accelerator.is_available()):
        raise UserError("train.precision: got fp16 on a CPU, wanted bf16 or fp32; half precision needs a GPU.")
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        accelerator = Accelerator(
            mixed_precision="no" if config.train.precision == "fp32" else config.train.precision,
            cpu=config.train.device == "cpu",
            step_scheduler_with_optimizer=False,
            dynamo_plugin=dynamo_plugin(config.model),
        )
    except ValueError as error:
        raise UserError(f"train.precision: {config.train.precision!r} cannot run here ({error}).") from error
    finally:
        # Of a compiled network in fp32 Accelerate lets products be TF32, for all of the process and from then on.
        torch.backends.cuda.matmul.allow_tf32 = allowed
    if config.model.sync_bn and accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        raise UserError("model.sync_bn: got true on CPUs, where torch cannot join BatchNorms; wanted false, or GPUs.")
    return accelerator


@contextlib.contextmanager
def exactness(deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms, or the fastest ones; as before afterwards."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
