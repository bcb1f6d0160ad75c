"""Global self-attention with two-dimensional relative positions: the attention branch of AA-Net."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.layers.common import (
    avg_pool_valid,
    check_channels,
    check_divisible,
    check_map,
    check_stride,
    settled,
    split_heads,
    to_channels_last,
    to_nchw,
    typed_arguments,
    zero_masked,
)
from nearsight.ops.checks import check_pair
from nearsight.ops.dispatch import exporting, transform_refusal
from nearsight.ops.relative import triton_impl
from nearsight.ops.relative.rows import MASKED_LOGIT, attend_by_rows

__all__ = ["RelativeAttention2d", "resize_table"]

LAYER = "RelativeAttention2d"
# Pixels from which attention by rows is twice as fast on a CPU; below, one fused call wins or is close.
LARGE = 2048
# Pixels from which Triton's kernels run where they can: they are the faster way on every map (ops/relative/README.md).
SMALLEST = 1


class RelativeAttention2d(nn.Module):
    """Every pixel attends to every pixel, by content and by relative position.

        y_i = W_o Σ_j softmax_j( (q_i·k_j + q_i·r^row_{y_j−y_i} + q_i·r^col_{x_j−x_i}) / √d ) v_j

    [B, in_channels, H, W] → [B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉], any H and W. The tables r hold one embedding per
    offset on a map of `feature_size` and are stretched linearly over other sizes.

    Where Triton runs, the kernels of `nearsight.ops.relative` add the position logits to the products of q and k as they are
    made; besides q, k, v and y they keep one number per query and head for the backward. Elsewhere the position terms enter the
    one product of queries and keys: the logits of a query's H row offsets and W column offsets are appended to q, the one-hot
    row and column of a key to k. So torch's fused attention runs it all, and where that has a kernel no n×n matrix exists. On a
    CPU maps of 2048 pixels and more go by rows, `nearsight.ops.relative.rows`.

    Args:
        in_channels, out_channels: as in `nn.Conv2d`; out_channels is the paper's d_v.
        key_channels: d_k, the channels of q and of k.
        feature_size: the map size the tables are built for, an int or (rows, columns).
        stride: 1, or 2 to average 3×3 outputs around every second pixel.
        num_heads: attention heads; they split out_channels and key_channels.
        per_head_position: one embedding per head and offset instead of one for all heads.

    `forward(x, key_mask=None)`: key_mask is bool [B, H, W], True where a pixel may be attended; where it is False x
    counts as 0. A query with nothing to attend to outputs 0.

    >>> import torch
    >>> from nearsight.layers.relative_attention import RelativeAttention2d
    >>> layer = RelativeAttention2d(16, 8, key_channels=24, feature_size=(5, 7), num_heads=4)
    >>> layer(torch.randn(2, 16, 5, 7)).shape, layer(torch.randn(2, 16, 9, 4)).shape
    (torch.Size([2, 8, 5, 7]), torch.Size([2, 8, 9, 4]))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        key_channels: int,
        feature_size: int | tuple[int, int],
        stride: int = 1,
        num_heads: int = 8,
        per_head_position: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_channels(LAYER, in_channels=in_channels, out_channels=out_channels, key_channels=key_channels)
        check_divisible(LAYER, "out_channels", out_channels, num_heads)
        self.head_dim = check_divisible(LAYER, "key_channels", key_channels, num_heads)
        self.in_channels, self.out_channels, self.key_channels = in_channels, out_channels, key_channels
        self.feature_size = check_pair(LAYER, "feature_size", feature_size)
        self.stride = check_stride(LAYER, stride)
        self.num_heads, self.per_head_position = num_heads, per_head_position

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(in_channels, 2 * key_channels + out_channels, bias=False, **factory)
        self.proj = nn.Linear(out_channels, out_channels, bias=False, **factory)
        heads = num_heads if per_head_position else 1
        rows, columns = self.feature_size
        self.rel_row = nn.Parameter(torch.empty(heads, 2 * rows - 1, self.head_dim, **factory))
        self.rel_col = nn.Parameter(torch.empty(heads, 2 * columns - 1, self.head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections keep the variance; embeddings start at d^−½, as in AA-Net."""
        nn.init.normal_(self.qkv.weight, std=self.in_channels**-0.5)
        nn.init.normal_(self.proj.weight, std=self.out_channels**-0.5)
        for table in (self.rel_row, self.rel_col):
            nn.init.normal_(table, std=self.head_dim**-0.5)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        check_map(LAYER, x, self.in_channels, key_mask)
        packed = self._project(x, key_mask)
        if self._fused(packed):
            y = self._attend_fused(packed, key_mask)
        else:
            pixels = x.shape[2] * x.shape[3]
            by_rows = x.device.type == "cpu" and not exporting() and pixels >= LARGE and transform_refusal() is None
            y = (self._attend_by_rows if by_rows else self._attend)(*self._split(packed), key_mask)
        y = y.flatten(3)
        if self.stride == 2:
            # Before W_o, which commutes with an average and is then four times cheaper.
            y = to_channels_last(avg_pool_valid(to_nchw(y), key_mask, 3, 2, padding=1))
        return to_nchw(self.proj(y))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Of q, k and v as `project` makes them: [B, H, W, heads, ·]."""
        height, width = q.shape[1:3]
        row, column = self.position_logits(q)
        parts_q = [q.permute(0, 3, 1, 2, 4), row, column]
        parts_k = [k, *_one_hot_positions(height, width, k)]
        if key_mask is not None:
            parts_q.append(torch.ones_like(row[..., :1]))
            parts_k.append((~key_mask)[..., None, None].to(k.dtype).expand(*k.shape[:4], 1) * MASKED_LOGIT)
        # One width for all three, a multiple of 8: what fused kernels ask for.
        width_q = sum(p.shape[-1] for p in parts_q)
        size = (max(width_q, v.shape[-1]) + 7) // 8 * 8
        if exporting():
            # Which is wider is no question for a graph that holds for every size, nor may what is spare be 1 for some.
            size = width_q + v.shape[-1]
        wide = _side_by_side(parts_q, size).flatten(2, 3)
        keys, values = (
            _side_by_side(parts, size).permute(0, 3, 1, 2, 4).flatten(2, 3)
            for parts in ([p.expand(*k.shape[:4], -1) for p in parts_k], [v])
        )
        y = F.scaled_dot_product_attention(wide, keys, values, scale=1.0)[..., : v.shape[-1]]
        return settled(y.permute(0, 2, 1, 3)).unflatten(1, (height, width))

    def _attend_by_rows(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """The same on maps for which the position logits, H + W of them per query, are wide."""
        return attend_by_rows(q, k, v, *self._tables(*q.shape[1:3]), key_mask)

    def _fused(self, packed: Tensor) -> bool:
        if exporting():  # an exported graph holds for every size: it must not ask for this one's
            return False
        height, width = packed.shape[1:3]
        # Asked first: a refusal's sentence names the size, and a compiled graph would hold for that size alone.
        if height * width < SMALLEST or max(height, width) > triton_impl.longest_side(packed, self.head_dim):
            return False
        values = self.out_channels // self.num_heads
        return triton_impl.refusal(packed, height, width, self.head_dim, values) is None

    def _attend_fused(self, packed: Tensor, key_mask: Tensor | None) -> Tensor:
        """The same by kernels that add the position logits where the products of q and k are."""
        rel_row, rel_col = self._tables(*packed.shape[1:3])
        options = {"heads": self.num_heads, "dim": self.head_dim, "scale": self.head_dim**-0.5}
        return triton_impl.run(packed, rel_row, rel_col, key_mask, **options)

    def _tables(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        return resize_table(self.rel_row, height), resize_table(self.rel_col, width)

    def project(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q (already divided by √d), k and v of a map, each [B, H, W, heads, ·]; all 0 where key_mask is False.

        So an image that is all masked outputs 0, though its softmax weighs every pixel alike.
        """
        return self._split(self._project(x, key_mask))

    def _project(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """q, k and v side by side, q not divided yet: [B, H, W, 2·key_channels + out_channels]."""
        packed: Tensor = self.qkv(to_channels_last(zero_masked(x, key_mask)))
        return packed

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = packed.split([self.key_channels, self.key_channels, self.out_channels], dim=-1)
        q, k, v = (split_heads(part, self.num_heads) for part in parts)
        return q * self.head_dim**-0.5, k, v

    def position_logits(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """q·r of every query with each row and each column of the map: [B, heads, H, W, H] and [B, heads, H, W, W]."""
        height, width = q.shape[1:3]
        row, column = _by_position(self.rel_row, height).to(q.dtype), _by_position(self.rel_col, width).to(q.dtype)
        return torch.einsum("byxnd,nykd->bnyxk", q, row), torch.einsum("byxnd,nxkd->bnyxk", q, column)

    def attention_weights(self, x: Tensor, key_mask: Tensor | None = None, *, position: bool = True) -> Tensor:
        """The softmax weights [B, H, W, heads, H, W], for pictures: the n×n matrix that `forward` avoids.

        `position=False` leaves the relative terms out, as in the paper's picture of key × query alone.
        """
        check_map(LAYER, x, self.in_channels, key_mask)
        q, k, _ = self.project(x, key_mask)
        rows = [t.flatten(2, 3) for t in self.position_logits(q)] if position else []
        weights = self.weights_from(q.flatten(1, 2), k, *rows, key_mask=key_mask)
        return weights.unflatten(1, (x.shape[2], x.shape[3]))

    @staticmethod
    def weights_from(
        q: Tensor, k: Tensor, row: Tensor | None = None, column: Tensor | None = None, *, key_mask: Tensor | None = None
    ) -> Tensor:
        """The softmax weights of some queries over the whole map, [B, N, heads, H, W].

        q is [B, N, heads, d] and k [B, H, W, heads, d], as `project` makes them; row [B, heads, N, H] and column
        [B, heads, N, W] are those queries' `position_logits`, or None to leave positions out.
        """
        logits = torch.einsum("bqnd,bijnd->bqnij", q, k)
        if row is not None and column is not None:
            logits = logits + row.transpose(1, 2)[..., :, None] + column.transpose(1, 2)[..., None, :]
        if key_mask is not None:
            logits = logits + (~key_mask)[:, None, None].to(logits.dtype) * MASKED_LOGIT
        weights = logits.flatten(3).softmax(-1).view_as(logits)
        return weights if key_mask is None else weights * key_mask[:, None, None].to(weights.dtype)

    def extra_repr(self) -> str:
        """The arguments as they would be typed, defaults of the options left out."""
        return typed_arguments(
            self.in_channels,
            self.out_channels,
            key_channels=(self.key_channels, None),
            feature_size=(self.feature_size, None),
            stride=(self.stride, 1),
            num_heads=(self.num_heads, 8),
            per_head_position=(self.per_head_position, False),
        )


def resize_table(table: Tensor, size: int) -> Tensor:
    """A table of relative embeddings [heads, 2·S − 1, d] stretched linearly over a map of `size`: [heads, 2·size − 1, d].

    Offset 0 stays in the middle and the largest offset at the end, whatever the size.

    >>> import torch
    >>> resize_table(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])[None, :, None], 5)[0, :, 0].tolist()
    [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]
    """
    return _at_offsets(table, torch.arange(1 - size, size, device=table.device), size)


def _by_position(table: Tensor, size: int) -> Tensor:
    """The embedding between positions i (query) and j (key) of one axis, the table stretched: [heads, size, size, d]."""
    position = torch.arange(size, device=table.device)
    # Not from the stretched table: Inductor of torch 2.15 stumbles over a row's row where it keeps sizes free.
    return _at_offsets(table, position - position[:, None], size)


def _at_offsets(table: Tensor, offset: Tensor, size: int) -> Tensor:
    """The embeddings of integer offsets […] on a map of `size`: [heads, …, d]."""
    reach = table.shape[1] // 2
    # In integers as far as they go: an equal size must give back the table bit for bit.
    steps = max(size - 1, 1)
    low = torch.div(offset * reach, steps, rounding_mode="floor")
    share = ((offset * reach - low * steps) / steps).to(table.dtype)[..., None]
    low = low + reach
    return table[:, low] * (1 - share) + table[:, (low + 1).clamp(max=2 * reach)] * share


def _side_by_side(parts: list[Tensor], size: int) -> Tensor:
    """Parts […, ·] joined along the channels, then zeros up to `size` of them."""
    spare = size - sum(part.shape[-1] for part in parts)
    # Not by F.pad: where torch.compile keeps sizes free, its gradient does not lie in memory as compiled code is told.
    return torch.cat([*parts, parts[0].new_zeros(*parts[0].shape[:-1], spare)], dim=-1)


def _one_hot_positions(height: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Which row and which column a pixel is in, one-hot: [1, H, W, 1, H] and [1, H, W, 1, W]."""
    rows = torch.eye(height, dtype=like.dtype, device=like.device)[None, :, None, None]
    columns = torch.eye(width, dtype=like.dtype, device=like.device)[None, None, :, None]
    return rows.expand(1, height, width, 1, height), columns.expand(1, height, width, 1, width)
