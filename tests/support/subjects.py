"""Networks for the explorer's tests: small, untrained, on a rectangle, so that a swap of rows and columns shows."""

import numpy as np
import timm
import torch

import nearsight  # noqa: F401  (registers the networks)
from nearsight.viz.explore.subjects import Subject

SIZE = (24, 32)


def rectangle(name, size=SIZE):
    """A network that reads any image stretched to `size`."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger weights than a fresh network's: maps with a clear maximum, predictions that differ.
            parameter.mul_(1.5) if parameter.dim() > 1 else None

    def prepare(image):
        pixels = np.asarray(image.convert("RGB").resize((size[1], size[0])), dtype=np.float32) / 255
        return torch.from_numpy(pixels).permute(2, 0, 1)[None] * 2 - 1

    def shown(pixels):
        return ((pixels + 1) / 2).permute(1, 2, 0).numpy()

    return Subject(name, model, prepare, shown, [f"class {n}" for n in range(10)], "Random weights, for a test.")
