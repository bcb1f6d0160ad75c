"""Compilers: traced whole, the same numbers, other sizes without end of recompiling."""

import pytest
import timm
import torch
from torch._dynamo.testing import CompileCounter

from tests.models.zoo import BIG_SLOW, NANO, NANO_FAST, awake, images, meta


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", BIG_SLOW)
def test_one_graph(name):
    """No graph break: on the meta device, where only the tracing takes time."""
    model = meta(name, num_classes=3).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert compiled(images(64, 96, device="meta")).shape == (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", NANO)
def test_sizes_do_not_recompile_without_end(name):
    model = timm.create_model(name, num_classes=3).eval()
    frames = CompileCounter()
    compiled = torch.compile(model, backend=frames, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for size in ((32, 40), (48, 56), (40, 64), (56, 48), (72, 88), (88, 40), (80, 80)):
            x = images(*size)
            torch.testing.assert_close(compiled(x), model(x))
    # Rows and columns that fill whole attention windows, or do not: four cases at most.
    assert frames.frame_count <= 4


@pytest.mark.parametrize("name", NANO_FAST)
def test_inductor_agrees(name):
    torch.manual_seed(0)
    model = awake(timm.create_model(name, num_classes=3)).eval()
    x = images(32, 40)
    with torch.no_grad():
        wanted = model(x)
        got = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", NANO_FAST)
def test_export_agrees_at_other_sizes(name):
    torch.manual_seed(0)
    model = awake(timm.create_model(name, num_classes=3)).eval()
    free = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    with torch.no_grad():
        program = torch.export.export(model, (images(64, 96),), dynamic_shapes={"x": free}).module()
        for size in ((64, 96), (96, 64)):
            x = images(*size)
            wanted = model(x)
            torch.testing.assert_close(program(x), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
