"""The attention stem of SASA: attention inside small blocks, with values that know where in the block they sit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.errors import ArgumentValueError, BackendError
from nearsight.layers.common import (
    check_channels,
    check_divisible,
    check_map,
    only_weight,
    to_channels_last,
    to_nchw,
    typed_arguments,
    zero_masked,
)
from nearsight.ops.block import torch_impl, triton_impl
from nearsight.ops.block.call import BlockCall, prepare
from nearsight.ops.block.functional import block_attention
from nearsight.ops.block.partition import count_blocks, to_blocks
from nearsight.ops.block.pooled import attend_norm_pool
from nearsight.ops.checks import check_choice
from nearsight.ops.dispatch import full_precision
from nearsight.ops.windows import window_padding

__all__ = ["AttentionStem2d"]

LAYER = "AttentionStem2d"
EMBED_DIM = 16


class AttentionStem2d(nn.Module):
    """Self-attention inside non-overlapping k×k blocks of the image, for the first layer of a network.

        y_ij = Σ_ab softmax_ab( q_ij·k_ab + q_ij·r_{a−i,b−j} ) v_ab ,   (a, b) in the block of (i, j)
        v_ab = Σ_m p(a,b,m) W_V^m x_ab ,   p(a,b,m) = softmax_m( (emb_row(a) + emb_col(b))·ν_m )

    [B, in_channels, H, W] → [B, out_channels, H, W]; batch norm, ReLU and the k×k max-pool (ceil mode) follow in the
    network. An image that does not divide by k is padded below and on the right, and the padding masked. The mixture is
    folded into one W_V per place in the block before it meets a pixel, so it costs what a single W_V costs.

    Args:
        in_channels, out_channels: as in `nn.Conv2d`; the heads split out_channels.
        kernel_size: side of the blocks.
        num_heads: attention heads.
        values: "mixture" as above; "plain" is one W_V for all places; "conv" a k×k spatial convolution.
        mixtures: number of W_V^m.
        backend: the backend of the op, or None for the fastest that can run the call; values="conv" has "torch" alone.

    `forward(x, key_mask=None)`: key_mask is bool [B, H, W], True where a pixel may be attended.

    >>> import torch
    >>> from nearsight import AttentionStem2d
    >>> stem = AttentionStem2d(3, 64)
    >>> stem(torch.randn(2, 3, 9, 14)).shape
    torch.Size([2, 64, 9, 14])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 4,
        *,
        num_heads: int = 4,
        values: str = "mixture",
        mixtures: int = 6,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_channels(LAYER, in_channels=in_channels, kernel_size=kernel_size, mixtures=mixtures)
        head_dim = check_divisible(LAYER, "out_channels", out_channels, num_heads)
        check_choice(LAYER, "values", values, ("mixture", "plain", "conv"))
        if head_dim % 2:
            raise ArgumentValueError(
                f"{LAYER}: got out_channels={out_channels} and num_heads={num_heads} (head dim {head_dim}), wanted an even "
                f"head dim: rows act on its first half, columns on its second; change one of them."
            )
        if values == "conv" and backend not in (None, "torch"):
            raise ArgumentValueError(
                f"{LAYER}: got backend={backend!r} with values='conv', wanted None or 'torch': the op makes no such values."
            )
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        self.num_heads, self.head_dim = num_heads, head_dim
        self.values, self.mixtures, self.backend = values, mixtures, backend

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        # Convolutions hold the weights, so that timm can adapt them to another number of input channels.
        self.qk = nn.Conv2d(in_channels, 2 * out_channels, 1, bias=False, **factory)
        value_channels = out_channels * (mixtures if values == "mixture" else 1)
        value_kernel = kernel_size if values == "conv" else 1
        self.v = nn.Conv2d(in_channels, value_channels, value_kernel, bias=False, **factory)
        self.rel_row = nn.Parameter(torch.empty(2 * kernel_size - 1, head_dim // 2, **factory))
        self.rel_col = nn.Parameter(torch.empty(2 * kernel_size - 1, head_dim // 2, **factory))
        self.emb_row: nn.Parameter | None = None
        self.emb_col: nn.Parameter | None = None
        self.nu: nn.Parameter | None = None
        if values == "mixture":
            self.emb_row = nn.Parameter(torch.empty(kernel_size, EMBED_DIM, **factory))
            self.emb_col = nn.Parameter(torch.empty(kernel_size, EMBED_DIM, **factory))
            self.nu = nn.Parameter(torch.empty(mixtures, EMBED_DIM, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections that keep the variance, except W_Q: smaller by √head_dim, so that the unscaled logits start near 1."""
        std = self.in_channels**-0.5
        with torch.no_grad():
            nn.init.normal_(self.qk.weight[: self.out_channels], std=std * self.head_dim**-0.5)
            nn.init.normal_(self.qk.weight[self.out_channels :], std=std)
            taps = self.kernel_size**2 if self.values == "conv" else 1
            nn.init.normal_(self.v.weight, std=std * taps**-0.5)
            nn.init.normal_(self.rel_row)
            nn.init.normal_(self.rel_col)
            for table in (self.emb_row, self.emb_col, self.nu):
                if table is not None:
                    # (emb + emb)·ν starts near 1: places differ, and no mixture is lost.
                    nn.init.normal_(table, std=(2 * EMBED_DIM) ** -0.25)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        check_map(LAYER, x, self.in_channels, key_mask)
        x = zero_masked(x, key_mask)
        weights = self._weights()
        if self.values == "conv" or not self._only_weights():
            call = prepare(to_channels_last(x), **weights, w_v=weights["w_q"], key_mask=key_mask)
            return to_nchw(torch_impl.attend(call, self._values(x), self._queries_keys(x)))
        w_v = self.v.weight.flatten(1) if self.values == "plain" else self.value_weights()
        y = block_attention(to_channels_last(x), **weights, w_v=w_v, key_mask=key_mask, backend=self.backend)
        return to_nchw(y)

    def pooled(self, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        """ReLU(max_pool2d(norm(self(x)), k, ceil_mode=True)), [B, out_channels, ⌈H/k⌉, ⌈W/k⌉]: what follows a stem.

        Where Triton can run it, without ever writing the map at the image's size; `norm` keeps its running statistics.
        """
        check_map(LAYER, x, self.in_channels)
        # What watches these modules must see their outputs.
        plain = type(norm) is nn.BatchNorm2d and not any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (self, norm)
        )
        if plain and self.values != "conv" and self._only_weights() and self.backend in (None, "triton"):
            w_v = self.v.weight.flatten(1) if self.values == "plain" else self.value_weights()
            call = prepare(to_channels_last(x), **self._weights(), w_v=w_v)
            pixels = x.shape[0] * x.shape[2] * x.shape[3]
            if pixels > 1 and triton_impl.refusal(call) is None:
                return to_nchw(self._attend_norm_pool(call, norm, pixels))
        side = self.kernel_size
        # The maximum first: a ReLU does not change which pixel wins, and has fewer left to look at.
        return F.relu(F.max_pool2d(norm(self(x)), side, side, ceil_mode=True))

    def _attend_norm_pool(self, call: BlockCall, norm: nn.BatchNorm2d, pixels: int) -> Tensor:
        of_batch = norm.training or norm.running_mean is None
        weight = torch.ones_like(call.w_q[:, 0]) if norm.weight is None else norm.weight
        bias = torch.zeros_like(call.w_q[:, 0]) if norm.bias is None else norm.bias
        given = (None, None) if of_batch else (norm.running_mean, norm.running_var)
        out, mean, var = attend_norm_pool(call, weight, bias, *given, norm.eps)
        if norm.training and norm.running_mean is not None and norm.running_var is not None:
            with torch.no_grad():
                share: Any = norm.momentum
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.add_(1)
                    share = 1.0 / norm.num_batches_tracked if share is None else share
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
                norm.running_var.lerp_((var * (pixels / (pixels - 1))).to(norm.running_var.dtype), share)
        return out

    def attention_weights(self, x: Tensor, key_mask: Tensor | None = None, *, position: bool = True) -> Tensor:
        """The softmax weights [B, rows of blocks, blocks per row, heads, k·k (from), k·k (to)], for pictures.

        `position=False` leaves the relative term out.
        """
        check_map(LAYER, x, self.in_channels, key_mask)
        arguments = self._weights()
        if not position:
            arguments.update(rel_row=None, rel_col=None)
        image = to_channels_last(zero_masked(x, key_mask))
        call = prepare(image, **arguments, w_v=arguments["w_q"], key_mask=key_mask)
        weights = torch_impl.weights(call, self._queries_keys(to_nchw(image)))
        rows, columns = (count_blocks(size, self.kernel_size) for size in x.shape[2:])
        return weights.unflatten(0, (x.shape[0], rows, columns))

    def _only_weights(self) -> bool:
        """Whether the op may take the projections' weights; where it may not, they are called, and torch does the rest."""
        only = only_weight(self.qk, nn.Conv2d) and only_weight(self.v, nn.Conv2d)
        if not only and self.backend not in (None, "torch"):
            raise BackendError(
                f"{LAYER}: backend {self.backend!r} cannot run this call: needs projections without hooks, which are called by "
                f"their own forward, got others. Usable here: torch."
            )
        return only

    def _blocks(self, x: Tensor) -> Tensor:
        return to_blocks(to_channels_last(x), self.kernel_size)

    def _queries_keys(self, x: Tensor) -> Tensor | None:
        """q and k of every place, [blocks, places, 2·out_channels], where they are more than their weights' products."""
        return None if only_weight(self.qk, nn.Conv2d) else self._blocks(self.qk(x))

    def _values(self, x: Tensor) -> Tensor:
        """v of every place, [blocks, places, out_channels], by calling W_V."""
        if self.values == "conv":
            before, after = window_padding(self.kernel_size)
            x = F.pad(x, (before, after, before, after))
        v = self._blocks(self.v(x))
        mixture = self.mixture()
        if mixture is None:
            return v
        return torch.einsum("pm,npmc->npc", mixture.to(v.dtype), v.unflatten(-1, (self.mixtures, self.out_channels)))

    def _weights(self) -> dict[str, Any]:
        """What the op takes besides the image and W_V."""
        w_q, w_k = self.qk.weight.flatten(1).chunk(2)
        options = {"heads": self.num_heads, "block": self.kernel_size}
        return {"w_q": w_q, "w_k": w_k, "rel_row": self.rel_row, "rel_col": self.rel_col, **options}

    def mixture(self) -> Tensor | None:
        """p(a, b, m), [k·k, mixtures]: each place's share of every W_V^m; None for values other than "mixture"."""
        if self.emb_row is None or self.emb_col is None or self.nu is None:
            return None
        places = (self.emb_row[:, None] + self.emb_col[None]).flatten(0, 1)
        with full_precision(places):
            return (places @ self.nu.t()).softmax(-1)

    def value_weights(self) -> Tensor:
        """W_V of each place in the block, [k·k, out_channels, in_channels] (not for values="conv")."""
        weight = self.v.weight.flatten(1)
        mixture = self.mixture()
        if mixture is None:
            return weight.expand(self.kernel_size**2, -1, -1)
        with full_precision(weight):
            return torch.einsum("pm,moc->poc", mixture, weight.unflatten(0, (self.mixtures, self.out_channels)))

    def extra_repr(self) -> str:
        return typed_arguments(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            num_heads=(self.num_heads, None),
            values=(self.values, "mixture"),
            mixtures=(self.mixtures, 6),
            backend=(self.backend, None),
        )
