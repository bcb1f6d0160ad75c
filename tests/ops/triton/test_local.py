"""Local attention's Triton kernels, interpreted on the CPU: output and every gradient by the error rule, on tiny shapes."""

import pytest
import torch

from nearsight.errors import BackendError
from nearsight.ops import backends, local_attention, local_attention_projected
from nearsight.ops.local import launches, sum_launches
from nearsight.ops.local.call import prepare
from nearsight.ops.local.geometry import TALLEST_WALK, plan
from nearsight.ops.local.launches import prepare_launch
from nearsight.ops.local.sum_launches import sum_relative
from tests.ops.triton.interpreter import interpreted
from tests.support.accuracy import assert_by_error_rule

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


def make(dtype=FLOAT, size=(5, 9), batch=1, heads=2, dim=8, window=(3, 3), tables="shared", mask=None, content=True):
    """Inputs of one call; `tables` is shared, heads, row, column or none; `mask` the share of pixels that may be attended."""
    generator = torch.Generator().manual_seed(sum(size) + heads + dim)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    lead = (heads,) if tables == "heads" else ()
    return {
        "q": draw(batch, *size, heads, dim),
        "k": draw(batch, *size, heads, dim) if content else None,
        "v": draw(batch, *size, heads, dim),
        "rel_row": draw(*lead, window[0], dim // 2) if tables in ("shared", "heads", "row") else None,
        "rel_col": draw(*lead, window[1], dim // 2) if tables in ("shared", "heads", "column") else None,
        "key_mask": torch.rand(batch, *size, generator=generator) < mask if mask is not None else None,
    }


def compare(inputs, window=(3, 3), **options):
    def run(backend):
        return lambda **tensors: local_attention(**tensors, window=window, **options, backend=backend)

    assert_by_error_rule(run("triton"), run("reference"), inputs)


def walk_of(inputs, window, dilation=(1, 1), border="mask"):
    """How the backward is launched."""
    return prepare_launch(prepare(**inputs, window=window, dilation=dilation, border=border), "walk")


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
def test_every_dtype(dtype):
    compare(make(dtype, window=(5, 3), mask=0.7), (5, 3))


@interpreted
@pytest.mark.parametrize("tables", ["heads", "row", "column", "none"])
def test_tables(tables):
    compare(make(tables=tables, heads=3))


@interpreted
def test_tables_per_head_with_strides_of_their_own():
    inputs = make(tables="heads", heads=3)
    inputs["rel_row"] = inputs["rel_row"].transpose(0, 1).contiguous().transpose(0, 1)
    inputs["rel_col"] = inputs["rel_col"].repeat_interleave(2, 0)[::2]
    compare(inputs)


@interpreted
@pytest.mark.parametrize(
    ("window", "size"), [((2, 3), (2, 3)), ((4, 2), (6, 11)), ((7, 7), (3, 4)), ((2, 11), (4, 17))]
)
def test_windows(window, size):
    """Even, larger than the map, wider than one chunk."""
    compare(make(window=window, size=size), window)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "window", "size", "heads", "dim", "change", "options"),
    [
        (BFLOAT, (11, 11), (9, 7), 1, 16, {"mask": 0.8}, {}),
        (BFLOAT, (8, 13), (23, 6), 3, 8, {"tables": "heads"}, {"border": "zeros"}),
        (HALF, (3, 10), (6, 35), 1, 20, {"tables": "column"}, {"dilation": (1, 2)}),
        (BFLOAT, (12, 12), (5, 18), 2, 8, {}, {}),
        (HALF, (13, 13), (7, 5), 1, 16, {"mask": 0.6, "tables": "row"}, {"border": "zeros"}),
        (FLOAT, (7, 12), (13, 5), 2, 8, {"content": False}, {}),
        (FLOAT, (1, 11), (5, 13), 1, 16, {"mask": 0.7}, {"dilation": (2, 1)}),
        (FLOAT, (11, 13), (6, 9), 2, 32, {"tables": "heads"}, {}),
        (FLOAT, (13, 10), (9, 6), 1, 12, {"mask": 0.7}, {"border": "zeros"}),
    ],
)
def test_windows_of_ten_to_thirteen_columns(dtype, window, size, heads, dim, change, options):
    """Tiles of 4×4, so that a halo has 16 columns: walked where the registers hold it, else in two passes."""
    inputs = make(dtype, size=size, heads=heads, dim=dim, window=window, **change)
    call = prepare(**inputs, window=window, **options)
    for kernel in ("forward", "walk", "queries", "keys"):
        shape = plan(call, kernel).shape
        assert (shape.ty, shape.tx, shape.nc) == (4, 4, 16)
    compare(inputs, window, **options)


@interpreted
@pytest.mark.parametrize("window", [(1, 3), (2, 2), (6, 4), (7, 9)])
def test_chunks_of_the_walk_in_float32(window):
    """One text for all of them: the first chunk leaves, the last is new; one is both."""
    compare(make(window=window, size=(11, 10), mask=0.8, heads=1, dim=16, batch=2), window)
    compare(make(window=window, size=(11, 10), content=False, heads=1, dim=8, tables="row"), window, border="zeros")


@interpreted
def test_a_window_too_tall_for_the_walk():
    tallest = TALLEST_WALK[4]
    for window in (tallest + 2, 3), (tallest + 6, 3):
        compare(make(window=window, size=(7, 5), mask=0.8, heads=1), window)
        compare(make(window=window, size=(7, 5), content=False, heads=1), window)
    window = (TALLEST_WALK[2] + 2, 3)
    compare(make(BFLOAT, window=window, size=(7, 5), mask=0.8, heads=1), window)


@interpreted
def test_heads_too_wide_for_the_walk():
    for dim in 32, 72:
        compare(make(window=(3, 3), size=(4, 5), mask=0.8, heads=1, dim=dim), (3, 3))


@interpreted
def test_a_halo_of_many_chunks():
    window = (21, 3)
    inputs = make(window=window, size=(9, 5), mask=0.8, heads=1)
    assert prepare_launch(prepare(**inputs, window=window), "forward").constants["CHUNKS"] == 6
    compare(inputs, window)
    compare(inputs, window, border="zeros")


@interpreted
@pytest.mark.parametrize("border", ["mask", "zeros"])
def test_borders_with_a_mask(border):
    compare(make(mask=0.6, size=(4, 5)), border=border)


@interpreted
@pytest.mark.parametrize("dilation", [2, (1, 3)])
def test_dilation(dilation):
    compare(make(size=(7, 5), tables="shared"), dilation=dilation)


@interpreted
def test_without_content():
    compare(make(content=False, mask=0.7, size=(4, 5)))


@interpreted
@pytest.mark.parametrize(
    ("heads", "dim", "tables"), [(1, 5, "none"), (3, 6, "shared"), (1, 64, "shared"), (5, 16, "heads"), (11, 8, "row")]
)
def test_heads_and_head_dims(heads, dim, tables):
    """Head dims that fill no product, heads that fill no program."""
    compare(make(BFLOAT, heads=heads, dim=dim, tables=tables, size=(3, 9)))


@interpreted
def test_a_strip_in_several_splits():
    """Tall maps are cut: the shares of dk and dv overlap in y as they do in x."""
    inputs = make(size=(23, 10), window=(5, 3), heads=1, dim=16)
    launch = walk_of(inputs, (5, 3))
    assert launch.runtime["splits"] > 1
    assert launch.runtime["strips"] > 1
    compare(inputs, (5, 3))


@interpreted
@pytest.mark.parametrize(
    ("size", "dim", "window", "change", "options"),
    [
        ((5, 11), 32, (5, 7), {"mask": 0.7}, {}),
        ((3, 16), 32, (4, 2), {"tables": "heads"}, {}),
        ((4, 9), 8, (3, 9), {"content": False, "heads": 3}, {"scale": 0.3}),
        ((5, 35), 16, (3, 5), {"tables": "column"}, {"dilation": (2, 3)}),
        ((7, 6), 64, (7, 7), {"mask": 0.7}, {}),
        ((8, 8), 32, (4, 2), {"tables": "heads"}, {}),
        ((3, 5), 16, (5, 9), {"tables": "row", "content": False}, {}),
        ((5, 11), 8, (3, 3), {"dtype": HALF, "heads": 3}, {"dilation": 2}),
    ],
)
def test_maps_that_fit_a_tile(size, dim, window, change, options):
    """The halo is the map itself: no columns beyond it, no shares, and of the smallest maps no rows beyond it either."""
    inputs = make(**{"dtype": BFLOAT, "heads": 2, **change}, size=size, dim=dim, window=window)
    dilation = options.get("dilation", 1)
    dilation = dilation if isinstance(dilation, tuple) else (dilation, dilation)
    fixed = walk_of(inputs, window, dilation).constants
    assert fixed["WHOLE_X"]
    assert fixed["WHOLE_Y"] == (-(-size[1] // dilation[1]) <= 8)
    compare(inputs, window, **options)


@interpreted
def test_maps_that_need_strips():
    """A border of zeros lies outside the map; splits of a tall map, of few images, share rows; a wide map does not fit."""
    inputs = make(BFLOAT, (4, 9), heads=1, dim=32)
    assert not walk_of(inputs, (3, 3), border="zeros").constants["WHOLE_X"]
    compare(inputs, border="zeros")
    inputs = make(BFLOAT, (17, 9), heads=1, dim=32)
    launch = walk_of(inputs, (3, 3))
    assert launch.runtime["splits"] > 1
    assert not launch.constants["WHOLE_X"]
    compare(inputs)
    inputs = make(BFLOAT, (3, 19), heads=3, dim=8)
    assert not walk_of(inputs, (3, 3)).constants["WHOLE_X"]
    compare(inputs)


@interpreted
@pytest.mark.parametrize(
    ("size", "heads", "dim", "window", "change", "options"),
    [
        ((5, 19), 2, 8, (7, 7), {"mask": 0.7}, {}),
        ((3, 19), 3, 8, (7, 4), {"tables": "heads", "dtype": HALF}, {"border": "zeros"}),
        ((5, 17), 1, 16, (6, 7), {"tables": "column"}, {"scale": 0.3}),
        ((3, 17), 2, 6, (3, 5), {"tables": "row", "content": False}, {}),
        ((4, 18), 1, 16, (8, 3), {"tables": "none", "mask": 0.5}, {}),
        ((7, 35), 1, 32, (9, 2), {}, {"dilation": (2, 1)}),
        ((27, 9), 1, 16, (7, 7), {"tables": "row"}, {"border": "zeros"}),
    ],
)
def test_strips_of_half_types(size, heads, dim, window, change, options):
    """Tiles of two rows: each row of queries has a row table of its own, whatever the window, its tables and the borders."""
    inputs = make(**{"dtype": BFLOAT, **change}, size=size, heads=heads, dim=dim, window=window)
    fixed = walk_of(inputs, window, options.get("dilation", (1, 1)), options.get("border", "mask")).constants
    assert (fixed["TY"], fixed["WHOLE_X"]) == (2, False)
    compare(inputs, window, **options)


@interpreted
@pytest.mark.parametrize(
    ("size", "heads", "dim", "window", "change", "options"),
    [
        ((5, 19), 2, 16, (7, 7), {"mask": 0.7}, {}),
        ((4, 21), 1, 12, (3, 9), {"tables": "heads", "dtype": HALF}, {"border": "zeros", "scale": 0.3}),
        ((7, 35), 1, 16, (5, 1), {"content": False, "mask": 0.1}, {"dilation": (2, 1)}),
        ((3, 17), 3, 10, (1, 2), {"tables": "row"}, {}),
    ],
)
def test_a_row_of_the_halo_at_a_time(size, heads, dim, window, change, options):
    inputs = make(**{"dtype": BFLOAT, **change}, size=size, heads=heads, dim=dim, window=window)
    assert plan(prepare(**inputs, window=window, **options), "forward").shape.by_row
    compare(inputs, window, **options)


@pytest.mark.parametrize(
    ("dim", "window", "dtype", "size", "expected"),
    [
        (16, (7, 7), BFLOAT, (9, 21), True),
        (10, (7, 9), HALF, (9, 21), True),
        (16, (8, 7), BFLOAT, (9, 21), False),
        (16, (7, 10), BFLOAT, (9, 21), False),
        (16, (5, 11), BFLOAT, (9, 21), False),  # its tiles have four rows
        (16, (7, 7), FLOAT, (9, 21), False),
        (8, (7, 7), BFLOAT, (9, 21), False),
        (32, (7, 7), BFLOAT, (9, 21), False),
        (16, (7, 7), BFLOAT, (9, 15), False),
    ],
)
def test_which_forwards_take_a_row_at_a_time(dim, window, dtype, size, expected):
    """Strips of one head of 16 channels, as many rows and columns as registers hold."""
    call = prepare(**make(dtype, size, dim=dim, window=window), window=window)
    assert plan(call, "forward").shape.by_row is expected


@pytest.mark.parametrize("kernel", ["forward", "walk"])
@pytest.mark.parametrize(
    ("size", "dim", "tile", "change", "options"),
    [
        ((6, 16), 32, (2, 16), {}, {}),
        ((6, 17), 32, (2, 8), {}, {}),
        ((6, 9), 64, (2, 8), {}, {}),  # heads too wide
        ((8, 8), 64, (8, 8), {}, {}),
        ((9, 8), 64, (2, 8), {}, {}),
        ((8, 8), 128, (2, 8), {}, {}),
        ((8, 31), 16, (2, 16), {}, {"dilation": (1, 2)}),
        ((16, 13), 16, (8, 8), {}, {"dilation": 2}),
        ((8, 8), 8, (2, 8), {}, {"border": "zeros"}),
        ((8, 8), 8, (2, 8), {"dtype": FLOAT}, {}),
    ],
)
def test_which_tiles_for_which_map(size, dim, tile, change, options, kernel):
    """Rows of 9 to 16 pixels, and maps of at most 8×8, have tiles of their own; in half types, with the border masked."""
    call = prepare(**make(**{"dtype": HALF, **change}, size=size, dim=dim, batch=4), window=3, **options)
    shape = plan(call, kernel).shape
    assert (shape.ty, shape.tx) == tile
    assert (shape.whole_y, shape.whole_x) == (tile == (8, 8), tile != (2, 8))


@interpreted
@pytest.mark.parametrize("tables", ["shared", "heads", "row", "column"])
@pytest.mark.parametrize(("programs", "heads", "dim"), [(2, 3, 12), (350, 3, 32), (900, 3, 8)])
def test_sums_of_the_tables_shares(tables, programs, heads, dim):
    """More rows than a program adds at a time, more than one launch does; every share once, and nothing else."""
    window = (3, 2)
    inputs = make(size=(2, 19), heads=heads, dim=dim, window=window, tables=tables)
    launch = walk_of(inputs, window)
    fixed, groups = launch.constants, launch.grid[1]
    of_row, half = fixed["HS"], dim // 2
    shape = (programs, groups, 2 * of_row, fixed["G"], fixed["DP"])
    partial = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(programs)).float()
    if heads % fixed["G"]:
        partial[:, -1, :, -1] = 0.0  # no head: zeros times its queries, which are not there
    found = [None if inputs[name] is None else torch.empty_like(inputs[name]) for name in ("rel_row", "rel_col")]
    found = [t if t is None or t.ndim == 3 else t[None] for t in found]
    sum_relative(partial, launch, *found)
    sums = partial.sum(0).movedim(2, 1).flatten(0, 1)[:heads]
    expected = sums[:, of_row : of_row + window[0], :half], sums[:, : window[1], half:dim]
    for one, every in zip(found, expected, strict=True):
        assert one is None or torch.equal(one, every if tables == "heads" else every.sum(0, True))


@interpreted
@pytest.mark.parametrize("tables", ["shared", "heads", "row", "none"])
@pytest.mark.parametrize(("block", "images"), [(64, 2), (1024, 3)])
def test_many_tables_are_added_up_beside_the_shares(tables, block, images):
    """In fewer numbers than a table has and in more, in two parts; the images of two launches."""
    inputs = make(batch=5, size=(3, 10), heads=3, dim=12, window=(3, 2), tables=tables)
    assert walk_of(inputs, (3, 2)).grid[0] == 10
    left, finish = [], launches.sum_relative
    # In a context: tests that are interpreted share a process, where no fixture undoes anything.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_launches, "MOST_ROWS", 8)
        patch.setattr(sum_launches, "MOST_IMAGES", images)
        patch.setattr(sum_launches, "TABLE_SUM", {"PARTS": 2, "ROWS": 2, "BLOCK": block})
        patch.setattr(launches, "sum_relative", lambda *given: (left.append(len(given[0])), finish(*given)))
        compare(inputs, (3, 2))
    assert set(left) == (set() if tables == "none" else {2})


@interpreted
@pytest.mark.parametrize(
    ("size", "window", "dilation", "change"),
    [
        ((3, 4), (1, 1), (1, 1), {}),
        ((1, 1), (3, 5), (1, 1), {}),
        ((2, 3), (3, 3), (2, 3), {"dtype": BFLOAT, "mask": 0.7}),
        ((1, 7), (2, 1), (1, 1), {"dtype": BFLOAT}),
        ((4, 1), (13, 3), (4, 1), {"content": False}),
    ],
)
def test_the_only_key_has_all_the_weight(size, window, dilation, change):
    """Whatever its logit: nothing of a rounding error may be left in the gradients of what makes it."""
    inputs = make(size=size, window=window, **change)
    leaves = {n: t.requires_grad_() for n, t in inputs.items() if t is not None and n != "key_mask"}
    out = local_attention(**inputs, window=window, dilation=dilation, backend="triton")
    found = dict(zip(leaves, torch.autograd.grad(out.square().sum(), list(leaves.values())), strict=True))
    assert found.pop("v").any()
    assert not any(gradient.any() for gradient in found.values())


@interpreted
@pytest.mark.parametrize(
    ("size", "dilation", "constant", "others"),
    [((1, 6), 1, "rel_row", ("q", "k", "rel_col")), ((5, 3), (1, 3), "rel_col", ("q", "k", "rel_row"))],
)
def test_one_tap_of_an_axis_adds_the_same_to_every_logit(size, dilation, constant, others):
    inputs = {n: t if t is None else t.requires_grad_() for n, t in make(size=size).items()}
    local_attention(**inputs, window=3, dilation=dilation, backend="triton").square().sum().backward()
    assert not inputs[constant].grad.any()
    assert all(inputs[name].grad.any() for name in others)
    # Beyond a border of zeros there are more taps.
    compare(make(size=size), dilation=dilation, border="zeros")
    compare(make(size=size, content=False, tables="column" if constant == "rel_col" else "row"), dilation=dilation)


@interpreted
@pytest.mark.parametrize("border", ["mask", "zeros"])
def test_dilation_beyond_the_map(border):
    """Takes no more programs than one that just leaves it."""
    from nearsight.ops.local.triton_impl import _call

    inputs = make(size=(3, 2), heads=1)
    q, k, v = (inputs[name] for name in "qkv")
    assert _call(q, k, v, None, None, None, [3, 3], [10**9, 7], False, 1.0).dilation == (3, 2)
    compare(inputs, dilation=(5, 7), border=border)


@interpreted
@pytest.mark.parametrize("dim", [4, 17, 40, 96, 128])
def test_more_head_dims(dim):
    """Padded inside to 4, 32, 64 and 128."""
    compare(make(BFLOAT, (2, 3), heads=1, dim=dim, tables="none" if dim % 2 else "shared", mask=0.8))


@interpreted
def test_views_that_are_not_copied():
    """Holes between pixels, rows and columns exchanged, an odd start, one image for all: the same numbers."""
    q, k, v = torch.randn(3, 2, 3, 10, 2, 16, generator=torch.Generator().manual_seed(0)).to(BFLOAT)
    k = k[:1].expand(2, -1, -1, -1, -1)
    want = local_attention(q, k.contiguous(), v, window=3, backend="triton")
    holes = torch.stack([q, v], 3)[:, :, :, 0]
    exchanged = v.transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.cat([v.new_zeros(1), v.flatten()])[1:].view(v.shape)
    for values in (exchanged, odd):
        assert torch.equal(local_attention(holes, k, values, window=3, backend="triton"), want)


@interpreted
def test_boxes_are_not_cut_of_expanded_tensors():
    """The copy engine knows no steps of 0."""
    whole = torch.zeros(2, 3, 9, 2, 16, dtype=BFLOAT)
    call = prepare(whole, whole, whole, window=9)  # too wide for a row at a time
    assert prepare_launch(call, "forward").constants["BOXES"]
    assert not prepare_launch(call._replace(k=whole[:1].expand_as(whole)), "forward").constants["BOXES"]


@interpreted
def test_more_images_than_a_launch_takes():
    assert sum_launches.MOST_IMAGES <= 65535
    sum_launches.MOST_IMAGES, before = 2, sum_launches.MOST_IMAGES
    grids, launch = [], sum_launches.launch_kernel
    sum_launches.launch_kernel = lambda kernel, grid, *args, **named: (
        grids.append(grid) or launch(kernel, grid, *args, **named)
    )
    try:
        compare(make(size=(2, 9), batch=5, heads=1))
    finally:
        sum_launches.MOST_IMAGES, sum_launches.launch_kernel = before, launch
    assert [grid[1] for grid in grids[:3]] == [2, 2, 1]


def test_shares_beyond_32_bit_offsets():
    """The relative tables' gradients of 2¹⁸ small images of eight heads of 64 channels."""
    q = torch.zeros(1, dtype=BFLOAT).expand(2**18, 3, 3, 8, 64)
    for batch, far in ((2**18, True), (2**17, False)):
        call = prepare(q[:batch], q[:batch], q[:batch], window=(3, 3), rel_row=torch.zeros(3, 32, dtype=BFLOAT))
        assert prepare_launch(call, "walk").constants["FAR"] == far
        assert not prepare_launch(call._replace(q=q[:1], k=q[:1], v=q[:1]), "queries").constants["FAR"]


@interpreted
@pytest.mark.parametrize("window", [(3, 3), (13, 3)])
def test_offsets_of_64_bits(window):
    from nearsight.ops.local import launches

    launches.INT32_LIMIT, before = 1, launches.INT32_LIMIT
    try:
        compare(make(size=(3, 9), window=window, heads=1), window)
    finally:
        launches.INT32_LIMIT = before


def short_of_memory(refuses):
    """Have launches that `refuses` (kernel, constants) fail as on a GPU with too little shared memory; what was launched."""
    from triton.runtime.errors import OutOfResources

    from nearsight.ops.local import launches

    launched, launch = [], launches.launch_kernel

    def attempt(kernel, grid, *arguments, **constants):
        if refuses(kernel.fn.__name__, constants):
            raise OutOfResources(300_000, 232_448, "shared memory")
        launched.append((kernel.fn.__name__, constants))
        launch(kernel, grid, *arguments, **constants)

    launches.launch_kernel = attempt
    return launched, lambda: setattr(launches, "launch_kernel", launch)


@interpreted
@pytest.mark.parametrize(("dtype", "dim", "window"), [(BFLOAT, 16, (3, 9)), (FLOAT, 8, (3, 3)), (BFLOAT, 64, (5, 3))])
def test_gpus_with_little_shared_memory(dtype, dim, window):
    """No loads ahead, fewer keys at a time, two passes instead of a walk; found out once, then remembered."""
    most = 32

    def refuses(name, constants):
        keys = constants.get("NR", 0) * constants.get("NC", 0)
        return name == "backward" or (name in ("forward", "backward_queries", "backward_keys") and keys > most)

    inputs = make(dtype, (4, 9), heads=1, dim=dim, window=window, mask=0.8)
    launched, restore = short_of_memory(refuses)
    try:
        compare(inputs, window)
        assert {"backward_queries", "backward_keys"} <= {name for name, _ in launched}
        from nearsight.ops.local import fitting

        assert max(fitting._lean.values()) >= 2
    finally:
        restore()


@interpreted
def test_a_gpu_without_shared_memory_gets_a_sentence():
    _, restore = short_of_memory(lambda *_: True)
    try:
        q = make(size=(2, 3), heads=1)["q"]
        with pytest.raises(BackendError) as raised:
            local_attention(q, q, q, window=(2, 3), backend="triton")
    finally:
        restore()
    assert str(raised.value) == (
        "local_attention: backend 'triton' cannot run this call: window 2×3 with head dim 8 needs 300000 bytes of shared "
        "memory, got a GPU with 232448; use backend='torch'."
    )


def test_no_option_of_nvidias_compiler_on_other_gpus(monkeypatch):
    """AMD's refuses what it does not know."""
    q = torch.zeros(2, 9, 21, 2, 16, dtype=BFLOAT, device="meta")
    call = prepare(q, q, q, window=9)
    for version, expected in ((None, True), ("6.3", False)):
        monkeypatch.setattr(torch.version, "hip", version)
        monkeypatch.setattr("nearsight.ops.local.launches._has_copy_engine", lambda index: False)
        assert ("maxnreg" in prepare_launch(call, "forward").constants) == expected


@interpreted
def test_queries_without_any_key():
    inputs = make(mask=0.5, size=(4, 5))
    inputs["key_mask"][:, :3, :4] = False
    compare(inputs)
    inputs["key_mask"][:] = False
    leaves = {n: t.requires_grad_() for n, t in inputs.items() if n != "key_mask"}
    out = local_attention(**leaves, key_mask=inputs["key_mask"], window=3, backend="triton")
    assert (out == 0).all()
    for gradient in torch.autograd.grad(out.sum(), list(leaves.values())):
        assert (gradient == 0).all()


@interpreted
@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_scale(scale):
    compare(make(size=(4, 5)), scale=scale)


@interpreted
def test_large_logits():
    inputs = make(size=(4, 5))
    inputs["q"] *= 40
    compare(inputs)


@interpreted
def test_empty_batch():
    compare(make(batch=0))


@interpreted
@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_projected_is_the_same(content, biased):
    """Projecting inside gives what projecting before does, output and every gradient."""
    generator = torch.Generator().manual_seed(0)
    parts = 3 if content else 2
    pixels = torch.randn(2, 4, 7, 5, generator=generator).transpose(1, 2)
    weight, bias = torch.randn(parts * 16, 5, generator=generator), torch.randn(parts * 16, generator=generator)
    tables = [torch.randn(3, 4, generator=generator) for _ in range(2)]
    leaves = [t.requires_grad_() for t in (pixels, weight, *tables, *([bias] if biased else []))]
    options = {"window": 3, "rel_row": tables[0], "rel_col": tables[1], "backend": "triton"}
    bias = bias if biased else None
    out = local_attention_projected(pixels, weight, bias, num_heads=2, content=content, **options)
    q, *k, v = torch.nn.functional.linear(pixels, weight, bias).unflatten(-1, (parts, 2, 8)).unbind(3)
    apart = local_attention(q, k[0] if k else None, v, **options)
    assert torch.equal(out, apart)
    up = torch.randn(out.shape, generator=generator)
    for one, other in zip(torch.autograd.grad(out, leaves, up), torch.autograd.grad(apart, leaves, up), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@interpreted
def test_projected_keeps_the_pixels_and_not_the_projection():
    pixels, weight = torch.randn(1, 6, 5, 4, requires_grad=True), torch.randn(48, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        local_attention_projected(pixels, weight, num_heads=2, window=3, backend="triton")
    assert torch.Size([1, 6 * 5, 4]) in kept
    assert all(len(shape) != 4 for shape in kept)  # which torch.compile would transpose
    assert max(shape.numel() for shape in kept) == 6 * 5 * 16  # the output


@interpreted
def test_twice_gives_the_same_bits():
    inputs = make(size=(6, 17), heads=3)
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]

    def gradients():
        out = local_attention(**inputs, window=3, backend="triton")
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


@interpreted
def test_the_registered_ops_are_sound():
    """Schema, fake kernel, autograd registration and tracing, as torch checks them; then one graph for every size."""
    from nearsight.ops.local import triton_impl

    inputs = make(size=(2, 3), mask=0.8)
    q, k, v, row, column = (t.requires_grad_() for n, t in inputs.items() if n != "key_mask")
    tables = row.detach()[None].requires_grad_(), None, inputs["key_mask"]
    options = ([3, 3], [1, 1], False, 1.0)
    torch.library.opcheck(triton_impl._forward_op, (q, k, v, *tables, *options))
    pixels, weight = torch.randn(1, 6, 5, requires_grad=True), torch.randn(48, 5, requires_grad=True)
    packed = torch.nn.functional.linear(pixels, weight).view(1, 2, 3, 3, 2, 8).detach()
    torch.library.opcheck(triton_impl._projected_forward_op, (packed, pixels, weight, None, *tables, *options))

    graphs = []

    def run(q, k, v, row, column):
        return local_attention(q, k, v, window=3, rel_row=row, rel_col=column, backend="triton").sin()

    def count(module, _):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(run, backend=count, fullgraph=True, dynamic=True)
    for size in ((5, 6), (7, 9), (6, 5)):
        leaves = [torch.randn(2, *size, 2, 8, requires_grad=True) for _ in range(3)]
        found = [torch.autograd.grad(f(*leaves, row, column).sum(), [*leaves, row]) for f in (run, compiled)]
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert len(graphs) == 1


@interpreted
@pytest.mark.parametrize("only", ["q", "k", "v", "rel_row", "rel_col"])
def test_one_gradient_alone(only):
    inputs = make(size=(2, 3))
    whole = {n: t.clone().requires_grad_() for n, t in inputs.items() if t is not None}
    local_attention(**whole, window=3, backend="triton").square().sum().backward()
    inputs[only].requires_grad_()
    local_attention(**inputs, window=3, backend="triton").square().sum().backward()
    assert torch.equal(inputs[only].grad, whole[only].grad)
    assert all(t is None or t.grad is None for n, t in inputs.items() if n != only)


@interpreted
def test_what_it_refuses():
    q = torch.randn(1, 3, 4, 2, 8)

    def reason(q, **options):
        return {r.name: r.reason for r in backends("local_attention", q, q, q, **options)}["triton"]

    assert reason(q, window=3) is None
    assert reason(q.double(), window=3) == "needs float32, bfloat16 or float16, got float64"
    assert reason(q, window=65) == "needs at most 64 taps per axis, got window (65, 65)"
    assert reason(q, window=3, scale=-1.0) == "needs a scale of at least 1e-06, got -1.0"
    assert "channels next to each other" in reason(q.transpose(-1, -2), window=3)
    assert reason(torch.randn(1, 2, 2, 1, 130), window=3) == "needs a head dim from 1 to 128, got 130"


def test_without_a_gpu_it_says_so():
    q = torch.randn(1, 3, 4, 2, 8)
    reasons = {r.name: r.reason for r in backends("local_attention", q, q, q, window=3)}
    assert reasons["triton"] == "needs CUDA tensors, got cpu"


@interpreted
@pytest.mark.parametrize("window", [(3, 3), (13, 3)])
def test_probabilities_of_large_logits_add_up_in_the_backward(window):
    """They are made again from the log-sum-exp: of some hundreds, one float32 would leave each sum off by 1e-5."""
    inputs = make(FLOAT, (1, 3), 4, 2, 16, window)
    inputs["v"].requires_grad_()
    local_attention(**inputs, window=window, scale=20.0, backend="triton").sum().backward()
    sums = inputs["v"].grad.sum((1, 2))
    torch.testing.assert_close(sums, torch.full_like(sums, 3.0), rtol=5e-7, atol=0.0)
