"""local_attention: the reference against the sentence, every backend against the reference, and faults that must be seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearsight.ops import local_attention, local_attention_weights
from nearsight.ops.local import export_form, tiles, torch_impl
from nearsight.ops.local.call import prepare
from nearsight.ops.windows import tap_offsets
from tests.support.accuracy import assert_by_error_rule

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def make_inputs(
    shape: tuple[int, int, int, int, int],
    window: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    *,
    content: bool = True,
    rows: bool = True,
    columns: bool = True,
    per_head: bool = False,
    masked: float | None = None,
    seed: int = 0,
) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    lead, half = (shape[3:4] if per_head else ()), shape[4] // 2
    inputs: dict[str, Tensor | None] = {"q": randn(*shape), "k": randn(*shape) if content else None, "v": randn(*shape)}
    inputs["rel_row"] = randn(*lead, window[0], half) if rows else None
    inputs["rel_col"] = randn(*lead, window[1], half) if columns else None
    mask = None if masked is None else torch.rand(shape[:3], generator=generator) >= masked
    return {**inputs, "key_mask": mask}


def backend(name: str, **options: Any) -> Callable[..., Tensor]:
    if name == "export form":
        return lambda **tensors: export_form.run(prepare(**tensors, **options))
    return lambda **tensors: local_attention(**tensors, **options, backend=name)


def check(name: str, inputs: dict[str, Tensor | None], **options: Any) -> None:
    assert_by_error_rule(backend(name, **options), backend("reference", **options), inputs)


def by_hand(
    inputs: dict[str, Any], window: tuple[int, int], dilation: tuple[int, int], border: str, scale: float
) -> Tensor:
    """Pixel by pixel, in Python."""
    q, k, v, mask = inputs["q"], inputs["k"], inputs["v"], inputs["key_mask"]
    batch, height, width, heads, dim = q.shape
    out = torch.zeros_like(q)
    for b in range(batch):
        for i in range(height):
            for j in range(width):
                for n in range(heads):
                    logits, values = [], []
                    for s, dy in enumerate(tap_offsets(window[0], dilation[0])):
                        for t, dx in enumerate(tap_offsets(window[1], dilation[1])):
                            a, c = i + dy, j + dx
                            inside = 0 <= a < height and 0 <= c < width
                            if (not inside and border == "mask") or (inside and mask is not None and not mask[b, a, c]):
                                continue
                            key = k[b, a, c, n] if inside else torch.zeros(dim, dtype=q.dtype)
                            row, col = (
                                table[n] if table.dim() == 3 else table
                                for table in (inputs["rel_row"], inputs["rel_col"])
                            )
                            logits.append(scale * (q[b, i, j, n] * (key + torch.cat([row[s], col[t]]))).sum())
                            values.append(v[b, a, c, n] if inside else torch.zeros(dim, dtype=q.dtype))
                    if logits:
                        out[b, i, j, n] = torch.stack(logits).softmax(0) @ torch.stack(values)
    return out


@pytest.mark.parametrize(
    ("size", "window", "dilation", "border", "masked", "per_head"),
    [
        ((3, 5), (3, 3), (1, 1), "mask", None, False),
        ((5, 3), (4, 2), (1, 2), "zeros", None, True),
        ((2, 6), (5, 3), (2, 1), "mask", 0.5, False),
        ((4, 3), (2, 5), (1, 1), "zeros", 0.9, True),
    ],
)
def test_every_backend_is_the_sentence(size, window, dilation, border, masked, per_head):
    inputs = make_inputs((2, *size, 2, 4), window, masked=masked, per_head=per_head)
    inputs = {n: t.double() if t is not None and t.dtype.is_floating_point else t for n, t in inputs.items()}
    want = by_hand(inputs, window, dilation, border, 0.7)
    for name in ("reference", "torch", "export form"):
        got = backend(name, window=window, dilation=dilation, border=border, scale=0.7)(**inputs)
        torch.testing.assert_close(got, want, msg=name)


# Rectangles, even windows, windows larger than the map, several column tiles, one pixel, nothing, every option once or more.
CASES: dict[str, tuple[tuple[int, int, int, int, int], tuple[int, int], dict[str, Any], dict[str, Any]]] = {
    "plain": ((2, 7, 11, 3, 8), (3, 5), {"rows": False, "columns": False}, {}),
    "odd head dim": ((2, 7, 11, 3, 5), (5, 3), {"rows": False, "columns": False}, {}),
    "head dim 1": ((2, 5, 9, 3, 1), (3, 5), {"rows": False, "columns": False}, {}),
    "relative": ((2, 9, 13, 2, 8), (7, 7), {}, {}),
    "per head": ((2, 13, 9, 4, 2), (5, 7), {"per_head": True}, {}),
    "rows only": ((1, 6, 9, 2, 4), (3, 5), {"columns": False}, {}),
    "columns only": ((1, 9, 6, 2, 4), (3, 5), {"rows": False}, {}),
    "no content": ((2, 6, 9, 2, 4), (5, 3), {"content": False}, {}),
    "even window": ((1, 7, 10, 2, 6), (4, 2), {}, {}),
    "dilation": ((1, 9, 14, 2, 4), (3, 5), {}, {"dilation": (3, 2)}),
    "dilation beyond the map": ((1, 4, 14, 2, 4), (3, 3), {"rows": False}, {"dilation": (5, 4)}),
    "zeros": ((2, 6, 9, 2, 4), (7, 5), {"per_head": True}, {"border": "zeros"}),
    "zeros, wide": ((1, 5, 40, 2, 4), (3, 7), {}, {"border": "zeros"}),
    "zeros, dilation, mask": ((1, 7, 12, 2, 4), (4, 3), {"masked": 0.4}, {"border": "zeros", "dilation": (2, 3)}),
    "wide": ((1, 5, 61, 2, 4), (3, 7), {}, {}),
    "wide, masked": ((2, 5, 61, 2, 4), (3, 7), {"masked": 0.5}, {}),
    "tall": ((1, 61, 5, 2, 4), (7, 3), {}, {}),
    "masked": ((2, 7, 11, 2, 4), (3, 3), {"masked": 0.3}, {}),
    "mostly masked": ((2, 7, 11, 2, 4), (3, 3), {"masked": 0.9}, {"scale": 0.5}),
    "larger than the map": ((2, 3, 5, 2, 4), (9, 11), {}, {"scale": 0.5}),
    "larger, zeros": ((2, 3, 5, 2, 4), (8, 11), {}, {"border": "zeros"}),
    "one pixel": ((2, 1, 1, 2, 4), (3, 5), {"rows": False, "columns": False}, {}),
    "one pixel, zeros": ((2, 1, 1, 2, 4), (3, 5), {}, {"border": "zeros"}),
    "nothing": ((0, 4, 5, 2, 4), (3, 3), {}, {}),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["torch", "export form"])
def test_error_rule(name, case, dtype):
    shape, window, kinds, options = CASES[case]
    check(name, make_inputs(shape, window, dtype, **kinds), window=window, **options)


def test_error_rule_at_the_size_of_a_network():
    check("torch", make_inputs((2, 28, 28, 8, 16), (7, 7)), window=7)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_error_rule_on_random_calls(data):
    def draw(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    window = (data.draw(st.integers(2, 8)), data.draw(st.integers(2, 8)))
    dilation = (draw(1, 1, 2, 3), draw(1, 1, 2, 3))
    # At least two live taps on each axis: the gradient of a table that cannot matter is rounding noise around 0.
    size = (data.draw(st.integers(dilation[0] + 1, 14)), data.draw(st.integers(dilation[1] + 1, 36)))
    content = draw(True, True, False)
    inputs = make_inputs(
        (draw(1, 2), *size, draw(1, 3), draw(2, 4, 6)),
        window,
        draw(*FLOATS),
        content=content,
        rows=not content or draw(True, False),
        columns=draw(True, False),
        per_head=draw(True, False),
        masked=draw(None, 0.2, 0.7),
        seed=data.draw(st.integers(0, 1000)),
    )
    check("torch", inputs, window=window, dilation=dilation, border=draw("mask", "zeros"), scale=draw(1.0, 0.3))


@pytest.mark.parametrize("border", ["mask", "zeros"])
@pytest.mark.parametrize("name", ["reference", "torch"])
def test_gradcheck(name, border):
    inputs = make_inputs((1, 3, 4, 2, 2), (3, 2), masked=0.5)
    mask = inputs.pop("key_mask")
    leaves = [t.double().requires_grad_() for t in inputs.values()]
    run = backend(name, window=(3, 2), border=border, scale=0.8)
    assert torch.autograd.gradcheck(lambda *t: run(**dict(zip(inputs, t, strict=True)), key_mask=mask), leaves)


@pytest.mark.parametrize("name", ["reference", "torch", "export form"])
def test_a_query_with_nothing_to_attend_to_gives_zero_and_zero_gradients(name):
    inputs = make_inputs((2, 6, 8, 2, 4), (3, 3))
    mask = torch.ones(2, 6, 8, dtype=torch.bool)
    mask[0, :4, :4] = False
    leaves = {n: t.requires_grad_() for n, t in inputs.items() if n != "key_mask"}
    out = backend(name, window=3)(**leaves, key_mask=mask)
    assert out[0, :3, :3].eq(0).all()
    assert out[0, 3, 4].ne(0).all()
    out[0, :3, :3].sum().backward()
    for name_of, leaf in leaves.items():
        assert leaf.grad.eq(0).all(), name_of
    zeros = backend(name, window=3, border="zeros")(**leaves, key_mask=torch.zeros_like(mask))
    assert zeros.eq(0).all()


def test_inputs_may_be_slices_of_one_product():
    parts = torch.randn(2, 5, 9, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    q, k, v = parts.unbind(3)
    assert not q.is_contiguous()
    torch.testing.assert_close(
        local_attention(q, k, v, window=3, backend="torch"),
        local_attention(q.contiguous(), k.contiguous(), v.contiguous(), window=3, backend="reference"),
    )
    assert local_attention(q, k, v, window=3, backend="torch").is_contiguous()


def test_large_logits_are_safe():
    inputs = make_inputs((1, 4, 5, 1, 2), (3, 3))
    inputs["q"] = inputs["q"] * 1e4
    check("torch", inputs, window=(3, 3))


def test_same_bits_twice():
    inputs = make_inputs((3, 9, 40, 2, 8), (7, 7), masked=0.2)

    def once() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for n, t in inputs.items() if n != "key_mask"]
        out = local_attention(*leaves[:3], window=7, rel_row=leaves[3], rel_col=leaves[4], backend="torch")
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for a, b in zip(once(), once(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("plan", [(1, 1, 1), (2, 3, 1), (3, 7, 2), (9, 13, 2), (32, 32, 4)])
@pytest.mark.parametrize("border", ["mask", "zeros"])
def test_the_cut_does_not_matter(plan, border, monkeypatch):
    inputs = make_inputs((3, 9, 13, 2, 4), (4, 5), masked=0.2)
    cut = tiles.Plan(min(plan[0], 9), min(plan[1], 13), plan[2])
    monkeypatch.setattr(torch_impl, "make_plan", lambda *_: cut)
    check("torch", inputs, window=(4, 5), border=border)


def test_plans_stay_within_their_budget():
    for batch, height, width, heads in (
        (1, 7, 7, 8),
        (128, 56, 56, 8),
        (2, 224, 225, 4),
        (64, 8, 8, 4),
        (1, 1, 999, 1),
    ):
        plan = tiles.make_plan(batch, height, width, heads, (7, 7), False, 1 << 18)
        assert 1 <= plan.rows <= height
        assert 1 <= plan.columns <= width
        assert 1 <= plan.images <= batch
        count = math.ceil(width / plan.columns)
        across = plan.columns + 6 if count > 1 else width
        down = min(plan.rows + 6, height)
        assert plan.images * heads * count * plan.columns * plan.rows * across * down <= 1 << 18 or plan.images == 1


# Faults that the rule must see: if one of these passes, the tests above prove nothing.


def faulty(damage: Callable[..., Tensor]) -> str:
    inputs = make_inputs((2, 6, 9, 2, 4), (3, 5))
    with pytest.raises(AssertionError) as caught:
        assert_by_error_rule(damage, backend("reference", window=(3, 5)), inputs)
    return str(caught.value)


def test_swapped_rows_and_columns_are_seen():
    def swapped_map(q, k, v, rel_row, rel_col, key_mask):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = local_attention(q, k, v, window=(3, 5), rel_row=rel_row, rel_col=rel_col, backend="torch")
        return out.transpose(1, 2)

    def swapped_tables(q, k, v, rel_row, rel_col, key_mask):
        return local_attention(
            q, k, v, window=(3, 5), rel_row=rel_col[1:4], rel_col=rel_row.repeat(2, 1)[:5], backend="torch"
        )

    assert faulty(swapped_map).startswith("output")
    assert faulty(swapped_tables).startswith("output")


@pytest.mark.parametrize("which", ["q", "k", "v", "rel_row", "rel_col"])
def test_a_gradient_off_by_three_percent_is_seen(which):
    def scaled(**tensors):
        damaged = {**tensors, which: tensors[which] * 1.0}
        damaged[which].register_hook(lambda grad: grad * 1.03)
        return backend("torch", window=(3, 5))(**damaged)

    assert faulty(scaled).startswith(f"gradient of {which}:")


@pytest.fixture
def nan_filled_memory():
    fill, deterministic = (
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.parametrize("case", ["relative", "dilation", "zeros, wide", "wide, masked", "tall", "no content"])
def test_no_element_is_left_unwritten(case, nan_filled_memory):
    assert torch.empty(3).isnan().all()
    shape, window, kinds, options = CASES[case]
    check("torch", make_inputs(shape, window, **kinds), window=window, **options)


def test_an_element_left_unwritten_is_seen(nan_filled_memory, monkeypatch):
    def all_but_one_image(*args):
        yield from list(torch_impl_pieces(*args))[:-1]

    torch_impl_pieces = torch_impl._pieces
    monkeypatch.setattr(torch_impl, "make_plan", lambda *_: tiles.Plan(6, 9, 1))
    monkeypatch.setattr(torch_impl, "_pieces", all_but_one_image)
    assert faulty(backend("torch", window=(3, 5))) == "output: not finite"


def test_a_dropped_mask_is_seen():
    inputs = make_inputs((2, 6, 9, 2, 4), (3, 5), masked=0.1)
    with pytest.raises(AssertionError, match="output"):
        assert_by_error_rule(
            lambda **t: backend("torch", window=(3, 5))(**{**t, "key_mask": None}),
            backend("reference", window=(3, 5)),
            inputs,
        )


# The weights, for pictures.


@pytest.mark.parametrize("border", ["mask", "zeros"])
def test_weights_are_those_the_output_was_made_with(border):
    inputs = make_inputs((2, 5, 7, 2, 4), (4, 3), masked=0.3)
    options = {"window": (4, 3), "dilation": (1, 2), "border": border, "scale": 0.7}
    positions = {n: inputs[n] for n in ("rel_row", "rel_col", "key_mask")}
    weights = local_attention_weights(inputs["q"], inputs["k"], **positions, **options)
    assert weights.shape == (2, 5, 7, 2, 12)
    q, k = inputs["q"], inputs["k"]
    for b, i, j in ((0, 0, 0), (1, 4, 6), (0, 2, 3)):
        taps = [(i + dy, j + dx) for dy in tap_offsets(4) for dx in tap_offsets(3, 2)]
        for t, (a, c) in enumerate(taps):
            inside = 0 <= a < 5 and 0 <= c < 7
            one = torch.zeros(2, 5, 7, 2, 4)
            if inside:
                one[b, a, c] = 1.0
            got = local_attention(q, k, one, **positions, **options, backend="torch")[b, i, j, :, 0]
            if inside:
                torch.testing.assert_close(weights[b, i, j, :, t], got)
            elif border == "mask":
                assert weights[b, i, j, :, t].eq(0).all()
    total = weights.sum(-1)
    assert ((total - 1).abs() < 1e-5).logical_or(total == 0).all()
    assert weights.ge(0).all()
