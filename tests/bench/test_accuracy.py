"""The error rule must pass what is right and name what is not."""

import pytest
import torch

from nearsight import ops
from nearsight.bench.accuracy import compare, find_fault, find_gross_fault
from tests.support.accuracy import assert_by_error_rule

TABLES = ("rel_row", "rel_col")


def problem(batch=4, dtype=torch.float32):
    draw = torch.Generator().manual_seed(3)
    shape = (batch, 5, 7, 2, 4)
    inputs = {name: torch.randn(*shape, generator=draw).to(dtype) for name in "qkv"}
    return inputs | {name: torch.randn(3, 2, generator=draw).to(dtype) for name in TABLES}


def reference(q, k, v, rel_row, rel_col):
    return ops.local_attention(q, k, v, window=3, rel_row=rel_row, rel_col=rel_col, backend="reference")


class Scaled(torch.autograd.Function):
    """The identity, with its gradient scaled."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.parametrize("samples", [None, (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_right_passes(samples, dtype):
    assert find_fault(reference, reference, problem(dtype=dtype), samples=samples, shared=TABLES) is None


@pytest.mark.parametrize("samples", [None, (0, 3)])
@pytest.mark.parametrize("name", ["q", "k", "v", "rel_row", "rel_col"])
def test_a_gradient_scaled_by_three_percent_is_named(name, samples):
    def run(**tensors):
        return reference(**tensors | {name: Scaled.apply(tensors[name], 1.03)})

    fault = find_fault(run, reference, problem(), samples=samples, shared=TABLES)
    assert fault.startswith(f"gradient of {name}: error ")


def test_an_output_off_is_named_with_its_place():
    def run(**tensors):
        out = reference(**tensors)
        return out + torch.zeros_like(out).index_put_((torch.tensor(2), torch.tensor(4)), torch.tensor(0.01))

    fault = find_fault(run, reference, problem())
    assert fault.startswith("output: error 1.0")
    assert "at [2, 4," in fault


@pytest.mark.parametrize(
    ("dtype", "c"), [(torch.float32, 16), (torch.float64, 16), (torch.bfloat16, 4), (torch.float16, 4)]
)
def test_the_rule_is_as_strict_as_it_says(dtype, c):
    """Where the reference itself makes no error, c·eps·max|truth| is allowed and no more."""
    x = torch.tensor([-2.0, 0.0, 1.0], dtype=dtype)

    def off(times):
        added = times * c * torch.finfo(dtype).eps * 2.0 * torch.tensor([0.0, 1.0, 0.0], dtype=dtype)
        return lambda x: x + added

    def same(x):
        return x.clone()

    assert find_fault(off(0.99), same, {"x": x}) is None
    assert find_fault(off(1.01), same, {"x": x}).startswith("output: error")


def test_twice_the_plain_error_is_allowed_and_no_more():
    x = torch.tensor([1.0, -1.0])

    def rough(x):
        return x if x.dtype == torch.float64 else x + 0.25

    assert find_fault(lambda x: x + 0.499, rough, {"x": x}) is None
    assert find_fault(lambda x: x + 0.501, rough, {"x": x}).startswith("output: error 5.010e-01")


@pytest.mark.parametrize("samples", [None, (0, 3)])
@pytest.mark.parametrize("what", ["output", "gradient of v"])
def test_memory_that_nobody_wrote_is_no_number(what, samples):
    """Left alone it would often hold what the last call wrote there: the right answer."""

    class Unwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return Unwritten.partly(x) if what == "output" else x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad if what == "output" else Unwritten.partly(grad)

        @staticmethod
        def partly(x):
            out = torch.empty_like(x)
            out.flatten()[1:] = x.flatten()[1:]
            return out

    def run(q, k, v, rel_row, rel_col):
        if what == "output":
            return Unwritten.apply(reference(q, k, v, rel_row, rel_col))
        return reference(q, k, Unwritten.apply(v), rel_row, rel_col)

    before = torch.are_deterministic_algorithms_enabled()
    assert find_fault(run, reference, problem(), samples=samples, shared=TABLES) == f"{what}: not finite"
    assert torch.are_deterministic_algorithms_enabled() == before


def test_an_unwritten_element_shows_even_in_a_sample_that_is_not_compared():
    def run(**tensors):
        out = reference(**tensors).clone()
        out[1, 2, 3, 0, 0] = float("nan")
        return out

    assert find_fault(run, reference, problem(), samples=(0, 3), shared=TABLES) == "output: not finite"


def test_the_whole_batch_is_run_though_few_samples_are_compared():
    seen = []

    def run(**tensors):
        seen.append(len(tensors["q"]))
        return reference(**tensors)

    compare(run, reference, problem(batch=4), samples=(0, 3), shared=TABLES)
    assert seen == [4]


@pytest.mark.parametrize("find", [find_fault, find_gross_fault])
@pytest.mark.parametrize("samples", [None, (0, 3)])
def test_a_wrong_shape_is_a_fault(find, samples):
    fault = find(lambda **t: reference(**t).flatten(3), reference, problem(), samples=samples, shared=TABLES)
    batch = 4 if samples is None else 2
    assert fault == f"output: got shape [{batch}, 5, 7, 8], wanted [{batch}, 5, 7, 2, 4]"


def test_a_wrong_dtype_is_a_fault():
    fault = find_fault(lambda **t: reference(**t).double(), reference, problem())
    assert fault == "output: got dtype torch.float64, wanted torch.float32"


def test_the_gross_rule_forgives_rounding_and_not_another_function():
    def rounded(**tensors):
        return reference(**{n: t.bfloat16() for n, t in tensors.items()}).float()

    def other(**tensors):
        return reference(**tensors | {"rel_row": tensors["rel_col"], "rel_col": tensors["rel_row"]})

    half = problem(dtype=torch.bfloat16)
    assert find_gross_fault(reference, reference, half, samples=(0, 3), shared=TABLES) is None
    assert "relative error" in find_gross_fault(rounded, reference, problem())
    assert "relative error" in find_gross_fault(other, reference, half)
    assert "relative error nan" in find_gross_fault(lambda **t: reference(**t) * float("nan"), reference, problem())


def test_the_tests_rule_is_this_one():
    assert_by_error_rule(reference, reference, problem())
    with pytest.raises(AssertionError, match="output: error"):
        assert_by_error_rule(lambda **t: reference(**t) * 1.001, reference, problem())
