"""The registered networks, as the tests of all of them see them."""

import pytest
import timm
import torch
from torch import nn

from nearsight.models.flops import count_parameters
from nearsight.models.listing import model_names

# Auto-encoders return images: tests/models/test_autoencoder.py holds them to what they promise.
AUTOENCODERS = timm.list_models(module="autoencoder")
NAMES = [name for name in model_names() if name not in AUTOENCODERS]
NANO = [name for name in NAMES if name.endswith("_nano")]


def meta(name, **options):
    """A network without weights."""
    with torch.device("meta"):
        return timm.create_model(name, **options)


SIZE_OF = {name: count_parameters(meta(name)) for name in NAMES}
# Tracing takes seconds per network, numbers even more: the larger ones wait for the slow run.
BIG_SLOW = [pytest.param(name, marks=pytest.mark.slow if SIZE_OF[name] > 30e6 else ()) for name in NAMES]
NUMBERS = [pytest.param(name, marks=pytest.mark.slow if SIZE_OF[name] > 18e6 else ()) for name in NAMES]
NANO_FAST = [pytest.param(name, marks=() if name in NANO else pytest.mark.slow) for name in NAMES]


def images(*size, batch=2, channels=3, device="cpu", seed=0):
    if device == "meta":
        return torch.empty(batch, channels, *size, device="meta")
    return torch.rand(batch, channels, *size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def awake(network):
    """Give every zero-started scale a value: a residual branch that adds nothing would hide what is wrong in it."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.0)
                module.bias.uniform_(-0.1, 0.1)
                module.running_mean.uniform_(-0.1, 0.1)
    return network
