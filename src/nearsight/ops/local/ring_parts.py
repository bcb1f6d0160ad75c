"""What the kernels with a ring share: where lanes hold what, and how numbers move between the lanes of a warp.

Written in Gluon, which Triton ships: its language can say which lane holds a number and what stays in shared memory. Products are
of 16 queries (two rows of eight, m = 8·row + column) and 8 or 16 columns; of a row of numbers four lanes hold two neighbours
each. LANES is one number a query and lane, with both rows of queries in one lane.
"""
# mypy: ignore-errors

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

__all__ = [
    "COPY",
    "LANES",
    "LEFT",
    "MMA",
    "RIGHT",
    "RUNTIME",
    "SHARED",
    "attends",
    "beside",
    "bits_of",
    "both_tables",
    "bound_columns",
    "channels",
    "commit",
    "copied_by_lane",
    "copy",
    "exp2",
    "halves",
    "interleave",
    "left_of",
    "log2",
    "mma_v2",
    "only",
    "own_channels",
    "pair_of",
    "parities",
    "pixels_of",
    "product_by_halves",
    "reciprocal",
    "right_of",
    "row_of",
    "row_terms",
    "second_image",
    "strip_of",
    "table_operand",
    "turned",
    "twice",
    "wait",
    "within",
]

# By its name in Triton 3.6, and by a later one: there the first is left as a name that raises.
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit = async_copy.commit_group
wait = async_copy.wait_group

# Sizes of one image: compiling again for each would cost a second per new size.
RUNTIME = ["H", "W", "images", "heads", "groups", "strips", "splits", "tiles", "row_head", "col_head"]

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
LANES = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [], [], [16, 4]),
)
# A lane copies 16 bytes, eight channels of a pixel.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0]))
# 16 bytes of four pixels in a row, then the other half of four: eight rows of an operand meet all banks.
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))

# What a version of Gluon may lack; better missed here, where it is imported, than when a kernel is compiled.
for _name in ("allocate_shared_memory", "convert_layout", "inline_asm_elementwise", "join", "split", "static_range"):
    getattr(gl, _name)


@gluon.jit
def within(i, size):
    # One comparison instead of two: a negative number is a large unsigned one.
    return i.to(gl.uint32, bitcast=True) < size.to(gl.uint32)


@gluon.jit
def strip_of(pid, groups, splits, strips, tiles):
    """Which strip a program walks: group of heads, first column, image, its first tile and the one after its last.

    Heads change fastest, so that those of a pixel are read together.
    """
    group = pid % groups
    pid = pid // groups
    split = pid % splits
    pid = pid // splits
    x0 = (pid % strips) * 8
    image = (pid // strips).to(gl.int64)
    per_split = (tiles + splits - 1) // splits
    first = split * per_split
    return group, x0, image, per_split, first, gl.minimum(tiles, first + per_split)


@gluon.jit
def pair_of(pid, groups, splits, strips, images, x0, image):
    """After all strips come those of two images' last columns: first column and image of either kind, the bits `near` of a
    query's place in a row of the tile that are its column (7, of a pair 3), and how many images there are from this one on."""
    pair = pid // groups // splits - images * strips
    image = gl.where(pair < 0, image, 2 * pair)
    return gl.where(pair < 0, x0, strips * 8), image, gl.where(pair < 0, 7, 3), images - image


@gluon.jit
def second_image(place, near):
    """Whether (1 or 0) one of the eight places in a row of the tile is of the second image of a pair."""
    return (place & 7 & ~near) >> 2


@gluon.jit
def _in_one_instruction(x, INSTRUCTION: gl.constexpr):
    return gl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    return _in_one_instruction(x, "ex2.approx.ftz.f32 $0, $1;")


@gluon.jit
def log2(x):
    return _in_one_instruction(x, "lg2.approx.ftz.f32 $0, $1;")


@gluon.jit
def reciprocal(x):
    return _in_one_instruction(x, "rcp.approx.ftz.f32 $0, $1;")


@gluon.jit
def copied_by_lane(x0, W, KW: gl.constexpr, near=7, left=2):
    """What a lane copies, 16 bytes each: of a chunk of the halo its column, row and whether it is there; of a tile's queries the
    same; the channels; of both, whether it is of the second image of a pair (`near` and `left` as in `pair_of`)."""
    place = gl.arange(0, 32, gl.SliceLayout(1, COPY))
    pixel = gl.arange(0, 16, gl.SliceLayout(1, COPY))
    channel = gl.arange(0, 16, gl.SliceLayout(0, COPY))[None, :]
    # To the right of a pair's columns there is nothing: the halo of each image has eight.
    halo_side = (place & 8 & ~(2 * near)) >> 3
    halo_x = x0 - (KW - 1) // 2 + (place & (2 * near + 1))
    halo_in = within(halo_x, W) & (place % 16 < 7 + KW + 2 * (7 - near)) & (halo_side < left)
    side = second_image(pixel, near)
    qx = x0 + (pixel & near)
    query_in = (qx < W) & (side < left)
    every = channel >= 0
    return (
        halo_x,
        place // 16,
        halo_in[:, None] & every,
        qx,
        pixel // 8,
        query_in[:, None] & every,
        channel,
        halo_side,
        side,
    )


@gluon.jit
def pixels_of(ptr, image, step, first, y, x, step_y, step_x, channel, side=0):
    """Where channels from `first` on of pixels (y, x) of an image, or of the `side` next one, lie."""
    return ptr + image * step + first + ((side * step + y * step_y + x * step_x)[:, None] + channel)


@gluon.jit
def row_of(chunks, slot, r, CHUNKS: gl.constexpr):
    """The 16 pixels of row r of a tile's halo, which begins with chunk `slot` of the ring."""
    at = slot + r // 2
    at = gl.where(at >= CHUNKS, at - CHUNKS, at)
    return chunks.index(at).slice(r % 2 * 16, 16, 0)


@gluon.jit
def channels(memory, h, D: gl.constexpr):
    """A head's channels of pixels in shared memory."""
    if D < 16:
        memory = memory.slice(h * D, D, 1)
    return memory


@gluon.jit
def halves(x):
    """[16, 16] as its columns 0–7 and 8–15; both lie in the same lane."""
    a, b = gl.split(gl.permute(gl.reshape(x, [16, 2, 8]), [0, 2, 1]))
    return gl.convert_layout(a, MMA), gl.convert_layout(b, MMA)


def _of_depth_8(kind):
    """Of [left, right, two to start from], each [16, 8]: one product with the first eight rows of `right`, one with the rest."""
    name = f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32"
    return gl.constexpr(
        f"{name} {{$0, $1, $2, $3}}, {{$8, $9}}, {{$10}}, {{$12, $13, $14, $15}};"
        f"{name} {{$4, $5, $6, $7}}, {{$8, $9}}, {{$11}}, {{$16, $17, $18, $19}};"
    )


DEPTH_8_BFLOAT16, DEPTH_8_FLOAT16 = _of_depth_8("bf16"), _of_depth_8("f16")


@gluon.jit
def beside(a, b, LAYOUT: gl.constexpr):
    """[16, 8] and [16, 8] → [16, 16]."""
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(a, b), [0, 2, 1]), [16, 16]), LAYOUT)


@gluon.jit
def product_by_halves(left, right, start0, start1, D: gl.constexpr):
    """Of 16 queries and 16 pixels (or taps), their channels side by side: [16, D]·[16, D]ᵀ as its columns 0–7 and 8–15, added
    to what they start from. `left` and `right` as `left_of` and `right_of` load them.

    Gluon's own products are 16 deep: of heads of eight channels half would be another head's, or nothing.
    """
    if D == 8:
        columns0, columns1 = gl.inline_asm_elementwise(
            DEPTH_8_BFLOAT16 if left.dtype == gl.bfloat16 else DEPTH_8_FLOAT16,
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,f,f,f,f,f,f,f,f",
            [left, right, start0, start1],
            dtype=(gl.float32, gl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        columns0, columns1 = halves(mma_v2(left, right, beside(start0, start1, MMA)))
    return columns0, columns1


@gluon.jit
def left_of(memory, h, D: gl.constexpr):
    """A head's channels of 16 queries in shared memory, as `product_by_halves` takes them first."""
    if D == 8:
        found = channels(memory, h, D).load(MMA)
    else:
        found = memory.load(LEFT)
    return found


@gluon.jit
def right_of(memory, h, D: gl.constexpr):
    """A head's channels of 16 pixels in shared memory, as `product_by_halves` takes them second."""
    if D == 8:
        found = channels(memory, h, D).load(MMA)
    else:
        found = memory.permute([1, 0]).load(RIGHT)
    return found


@gluon.jit
def both_tables(
    row_ptr,
    col_ptr,
    row_head,
    col_head,
    h0,
    c,
    s,
    KH: gl.constexpr,
    KW: gl.constexpr,
    D: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Both tables, eight places s of column taps, then eight of row taps, at channels c (of heads from h0 on)."""
    h = h0 + c // D
    d = c % D
    use = (s < KW) & (d >= D // 2)
    col = gl.load(col_ptr + h * col_head + s * (D // 2) + d - D // 2, mask=use, other=0.0)
    use = (s >= 8) & (s < 8 + KH) & (d < D // 2)
    row = gl.load(row_ptr + h * row_head + (s - 8) * (D // 2) + d, mask=use, other=0.0)
    return (col + row).to(DTYPE)


@gluon.jit
def table_operand(
    row_ptr,
    col_ptr,
    row_head,
    col_head,
    h0,
    KH: gl.constexpr,
    KW: gl.constexpr,
    D: gl.constexpr,
    DEPTH: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """`both_tables` as `product_by_halves` takes them second: of one head, or (DEPTH 16) of all that 16 channels hold."""
    if DEPTH == 8:
        s = gl.arange(0, 16, gl.SliceLayout(1, MMA))[:, None]
        c = gl.arange(0, 8, gl.SliceLayout(0, MMA))[None, :]
    else:
        c = gl.arange(0, 16, gl.SliceLayout(1, RIGHT))[:, None]
        s = gl.arange(0, 16, gl.SliceLayout(0, RIGHT))[None, :]
    return both_tables(row_ptr, col_ptr, row_head, col_head, h0, c, s, KH, KW, D, DTYPE)


@gluon.jit
def parities(x):
    """[16, 8] as its even and its odd columns, [16, 4]."""
    a, b = gl.split(gl.reshape(x, [16, 4, 2]))
    return gl.convert_layout(a, LANES), gl.convert_layout(b, LANES)


@gluon.jit
def interleave(even, odd):
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [16, 8]), MMA)


@gluon.jit
def twice(x):
    """[16, 4] → [16, 8], each number for both columns of its lane."""
    return interleave(x, x)


@gluon.jit
def only(x, bits):
    """Half numbers where the bits of `bits` are set, 0 elsewhere, two at a time."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, bits], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def own_channels(h, W, D: gl.constexpr):
    """Bits for the channels of head h among 16, as a left operand.

    Zeros that the compiler knows it writes anew for each product, with a copy of all beside them: these it does not know.
    """
    channel = (
        gl.arange(0, 16, gl.SliceLayout(0, LEFT))[None, :] + gl.arange(0, 16, gl.SliceLayout(1, LEFT))[:, None] * 0
    )
    return gl.where(channel // D == h, (W >> 31) ^ -1, W >> 31).to(gl.int16)


@gluon.jit
def attends(place, column, KW: gl.constexpr, near=7):
    """Whether a query at a place in its row attends to columns 0–7 of the halo, and to 8–15.

    Of two columns eight apart it attends to one at most; of a pair's images each has eight.
    """
    tap = column - (place & near)
    side = second_image(place, near)
    inside = (tap >= 0) & (tap < KW)
    return inside & (side == 0), gl.where(near == 7, tap + 8 < KW, inside & (side == 1))


@gluon.jit
def bits_of(mine):
    """As `only` takes them."""
    return gl.where(mine, -1, 0).to(gl.int16)


@gluon.jit
def bound_columns(x0, W, KW: gl.constexpr, LARGE: gl.constexpr, near=7):
    """Of the halo's columns 0–7 and 8–15: what a query's terms may be at most (−LARGE where window or image ends), and whether
    it attends to them."""
    column = gl.arange(0, 8, gl.SliceLayout(0, MMA))[None, :]
    mine0, mine1 = attends(gl.arange(0, 16, gl.SliceLayout(1, MMA))[:, None], column, KW, near)
    x = x0 - (KW - 1) // 2 + column
    bound0 = gl.where(mine0 & within(x, W), float("inf"), -LARGE)
    bound1 = gl.where(mine1 & within(x + 2 * (near - 3), W), float("inf"), -LARGE)
    return bound0, bound1, mine0, mine1


class _Type:
    """How PTX packs two floats as halves in 32 bits, and unpacks them; −LARGE as it adds it."""

    def __init__(self, name, large):
        self.name = name
        self.large = f"0x{struct.pack('>f', -large).hex()}"

    def pack(self, into, low, high):
        return [f"cvt.rn.{self.name}x2.f32 {into}, {high}, {low};"]

    def unpack(self, x, low, high):
        if self.name == "bf16":
            return [f"shl.b32 {low}, {x}, 16;", f"and.b32 {high}, {x}, 0xffff0000;"]
        return [f"mov.b32 {{l, h}}, {x};", f"cvt.f32.f16 {low}, l;", f"cvt.f32.f16 {high}, h;"]


BFLOAT16, FLOAT16 = _Type("bf16", 1e30), _Type("f16", 60000.0)


def _turn(kind):
    """Of [even, odd, lane of the first, lane of the second, whether they change places], two queries each."""
    lines = [
        ".reg .b32 x, y, a, b;",
        ".reg .b16 l, h;",
        ".reg .pred p;",
        *kind.pack("x", "$4", "$5"),
        *kind.pack("y", "$6", "$7"),
        "setp.ne.s32 p, $12, 0;",
        "selp.b32 a, y, x, p;",
        "selp.b32 b, x, y, p;",
        "shfl.sync.idx.b32 a, a, $8, 0x1c1f, 0xffffffff;",
        "shfl.sync.idx.b32 b, b, $10, 0x1c1f, 0xffffffff;",
        *kind.unpack("a", "$0", "$1"),
        *kind.unpack("b", "$2", "$3"),
    ]
    return gl.constexpr("{" + "\n".join(lines) + "}")


def _fetch_rows(kind):
    """Tap t of a query in the first row is row t of the halo, of one in the second row t + 1; the rest is none's."""
    lines = [".reg .b32 x, y, z;", ".reg .b16 l, h;", *kind.pack("x", "$16", "$17"), *kind.pack("y", "$18", "$19")]
    for tap in range(7):
        lines.append(f"shfl.sync.idx.b32 z, {'xy'[tap % 2]}, {tap // 2}, 0x1c1f, 0xffffffff;")
        lines += kind.unpack("z", f"${2 * tap}", f"${2 * tap + 3}")
    lines += [f"mov.b32 $1, {kind.large};", f"mov.b32 $14, {kind.large};"]
    return gl.constexpr("{" + "\n".join(lines) + "}")


TURN_BFLOAT16, TURN_FLOAT16 = _turn(BFLOAT16), _turn(FLOAT16)
ROWS_BFLOAT16, ROWS_FLOAT16 = _fetch_rows(BFLOAT16), _fetch_rows(FLOAT16)


@gluon.jit
def turned(x, SIGN: gl.constexpr, DTYPE: gl.constexpr, near=7):
    """x [16, 8], rounded to DTYPE, with the columns of query m moved round by its own: column c comes from
    (c + SIGN·(m & near)) mod 8.

    Terms go so (SIGN −1) from taps to columns of the halo modulo 8, their gradients (SIGN 1) back.
    """
    even, odd = parities(x)
    m = gl.arange(0, 16, gl.SliceLayout(1, LANES))[:, None] & near
    t = gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    first = ((2 * t + SIGN * m) & 7) >> 1
    second = ((2 * t + 1 + SIGN * m) & 7) >> 1
    swap = (m + t * 0) & 1
    a, b = gl.inline_asm_elementwise(
        TURN_BFLOAT16 if gl.bfloat16 == DTYPE else TURN_FLOAT16,
        "=&r,=&r,=&r,=&r,f,f,f,f,r,r,r,r,r,r",
        [even, odd, first, second, swap],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=2,
    )
    return interleave(a.to(gl.float32, bitcast=True), b.to(gl.float32, bitcast=True))


@gluon.jit
def row_terms(taps, y0, H, KH: gl.constexpr, LARGE: gl.constexpr, DTYPE: gl.constexpr):
    """Each query's terms for eight rows of the halo (eight tensors, as bits), in the four lanes of its logits, rounded to
    DTYPE; −LARGE where window or image ends."""
    even, odd = parities(taps)
    m = gl.arange(0, 16, gl.SliceLayout(1, LANES))[:, None]
    t = gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    y = y0 - (KH - 1) // 2 + m // 8 + 2 * t
    even_in = within(y, H)
    odd_in = within(y + 1, H)
    if KH < 7:
        even_in = even_in & (2 * t < KH)
        odd_in = odd_in & (2 * t + 1 < KH)
    even = gl.where(even_in, even, -LARGE)
    odd = gl.where(odd_in, odd, -LARGE)
    return gl.inline_asm_elementwise(
        ROWS_BFLOAT16 if gl.bfloat16 == DTYPE else ROWS_FLOAT16,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,f,f,f,f",
        [even, odd],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=2,
    )
