"""What local_attention refuses, and the sentence it says."""

from __future__ import annotations

import re

import pytest
import torch

from nearsight.errors import ArgumentTypeError, ArgumentValueError, BackendError
from nearsight.ops import backends, local_attention, local_attention_projected, local_attention_weights

Q = torch.zeros(1, 5, 7, 2, 4)
MASK = torch.ones(1, 5, 7, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (
            (Q[0], Q, Q),
            {},
            ArgumentValueError,
            "got q of shape [5, 7, 2, 4] (rank 4), wanted rank 5: [B, H, W, heads, D].",
        ),
        (([1.0], Q, Q), {}, ArgumentTypeError, "got q of type list, wanted a tensor [B, H, W, heads, D]."),
        ((Q, Q, Q.long()), {}, ArgumentTypeError, "got v of dtype torch.int64, wanted a floating-point dtype"),
        (
            (Q, Q[:, :4], Q),
            {},
            ArgumentValueError,
            "got k of shape [1, 4, 7, 2, 4], wanted [1, 5, 7, 2, 4]: the shape of q.",
        ),
        ((Q, Q, Q[..., :2]), {}, ArgumentValueError, "got v of shape [1, 5, 7, 2, 2], wanted [1, 5, 7, 2, 4]"),
        (
            (Q, Q.double(), Q),
            {},
            ArgumentTypeError,
            "got q of dtype torch.float32 and k of dtype torch.float64, wanted the same",
        ),
        (
            (Q, Q, Q.to("meta")),
            {},
            ArgumentTypeError,
            "got q of device cpu and v of device meta, wanted the same device",
        ),
        ((Q, Q, Q), {"window": 0}, ArgumentValueError, "got window=0, wanted at least 1 on each axis."),
        ((Q, Q, Q), {"window": (3, 0)}, ArgumentValueError, "got window=(3, 0), wanted at least 1 on each axis."),
        (
            (Q, Q, Q),
            {"window": (3, 3, 3)},
            ArgumentTypeError,
            "got window=(3, 3, 3), wanted an int or a (rows, columns) pair",
        ),
        (
            (Q, Q, Q),
            {"window": 3.0},
            ArgumentTypeError,
            "got window=3.0, wanted an int or a (rows, columns) pair of ints.",
        ),
        ((Q, Q, Q), {"dilation": 0}, ArgumentValueError, "got dilation=0, wanted at least 1 on each axis."),
        ((Q, Q, Q), {"border": "wrap"}, ArgumentValueError, "got border='wrap', wanted one of 'mask', 'zeros'."),
        ((Q, Q, Q), {"scale": float("nan")}, ArgumentValueError, "got scale=nan, wanted a finite number."),
        ((Q, Q, Q), {"scale": "1"}, ArgumentTypeError, "got scale of type str, wanted a number."),
        ((Q, None, Q), {}, ArgumentValueError, "got k=None without rel_row or rel_col, wanted something to attend by"),
        (
            (Q[..., :3],) * 3,
            {"rel_row": torch.zeros(3, 1)},
            ArgumentValueError,
            "got rel_row with head dim 3, wanted an even head dim: rows act on its first half, columns on its second",
        ),
        ((Q, Q, Q), {"rel_row": torch.zeros(5, 2)}, ArgumentValueError, "got rel_row of shape [5, 2], wanted [3, 2]"),
        (
            (Q, Q, Q),
            {"rel_col": torch.zeros(3, 3, 2)},
            ArgumentValueError,
            "got rel_col of shape [3, 3, 2], wanted [2, 3, 2]",
        ),
        (
            (Q, Q, Q),
            {"key_mask": MASK.float()},
            ArgumentTypeError,
            "got key_mask of dtype torch.float32, wanted a bool tensor",
        ),
        ((Q, Q, Q), {"key_mask": MASK[:, :3]}, ArgumentValueError, "got key_mask of shape [1, 3, 7], wanted [1, 5, 7]"),
        (
            (Q, Q, Q),
            {"backend": "cuda"},
            ArgumentValueError,
            "got backend='cuda', wanted one of 'triton', 'torch', 'reference'",
        ),
    ],
)
def test_refusals(arguments, options, error, text):
    with pytest.raises(error, match=f"^local_attention: {re.escape(text)}") as caught:
        local_attention(*arguments, **{"window": 3, **options})
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_named_backend_runs_or_says_why_not():
    reports = {r.name: r for r in backends("local_attention", Q, Q, Q, window=3)}
    if reports["triton"].usable:
        pytest.skip("this process can run the Triton backend on CPU tensors")
    reason = reports["triton"].reason
    sentence = f"local_attention: backend 'triton' cannot run this call: {reason}. Usable here: torch, reference."
    with pytest.raises(BackendError, match=f"^{re.escape(sentence)}$"):
        local_attention(Q, Q, Q, window=3, backend="triton")


def test_weights_check_their_arguments_too():
    with pytest.raises(ArgumentValueError, match="got window=0"):
        local_attention_weights(Q, Q, window=0)
    with pytest.raises(TypeError, match="windw"):
        local_attention_weights(Q, Q, windw=3)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_heads": 0}, ArgumentValueError, "got num_heads=0, wanted an int of at least 1."),
        ({"num_heads": "2"}, ArgumentTypeError, "got num_heads of type str, wanted an int."),
        ({"num_heads": 5}, ArgumentValueError, "got weight of shape [24, 6], wanted [3·5·D, 6]: a row per channel"),
        (
            {"bias": torch.zeros(23)},
            ArgumentValueError,
            "got bias of shape [23], wanted [24]: a number per row of weight.",
        ),
        ({"bias": [0.0] * 24}, ArgumentTypeError, "got bias of type list, wanted a tensor [3·heads·D]."),
        (
            {"bias": torch.zeros(24, dtype=torch.float64)},
            ArgumentTypeError,
            "got pixels of dtype torch.float32 and bias of dtype torch.float64, wanted the same dtype; convert them",
        ),
        (
            {"weight": torch.zeros(24, 6, dtype=torch.bfloat16)},
            ArgumentTypeError,
            "got pixels of dtype torch.float32 and weight of dtype torch.bfloat16, wanted the same dtype; convert them",
        ),
        (
            {"weight": torch.zeros(24, 6, device="meta")},
            ArgumentTypeError,
            "got pixels of device cpu and weight of device meta, wanted the same device; move them to one device.",
        ),
    ],
)
def test_the_projected_form_refuses_too(options, error, text):
    given = {"weight": torch.zeros(24, 6), "num_heads": 2, "window": 3, **options}
    with pytest.raises(error, match=f"^local_attention: {re.escape(text)}") as caught:
        local_attention_projected(torch.zeros(1, 5, 7, 6), **given)
    assert str(caught.value).endswith(".")
