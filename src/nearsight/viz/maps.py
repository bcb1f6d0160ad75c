"""What the attention layers of a network attend to, as numbers: `attention_maps`. Needs torch alone."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.errors import ArgumentTypeError, ArgumentValueError, did_you_mean
from nearsight.layers import ExplicitAttention2d, ExplicitAugmentedConv2d
from nearsight.models.qna_vit import PatchEmbed2d
from nearsight.ops.checks import check_key_mask, check_pair, shape_text
from nearsight.viz.extractors import Extractor, Given, extractor_of

__all__ = ["LayerMaps", "attention_layers", "attention_maps", "cell_of", "choose_layers", "explicit_map", "layer_maps"]

OP = "attention_maps"
Pair = tuple[int, int]
Box = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """What one attention layer attends to: N query pixels of B images, on the layer's own h×w grid.

    The tensors are float32 (float64 for a float64 layer), on the device of the layer. `weights`, `softmax`, `outside` and
    `content` are None when no pixels were asked for, `received` when it was switched off.

    Attributes:
        name: the layer's name in the model; a layer that runs several times is there again as "name#2", "name#3", ….
        kind: "local", "stem", "qna", "qna_upsample", "window", "explicit" or "global" (the attention of AA-Net).
        image_size, grid: (rows, columns) of the input image and of the map the layer attends to.
        query_grid: (rows, columns) of the layer's queries. A layer that pools its output (stride 2 of local, explicit and
            global attention) has them before that pooling; a strided `QnA2d` has fewer than pixels, `QnAUpsample2d` more.
        cells: the N queries (y, x) on the query grid that lie under the pixels asked for.
        centres: the pixels (y, x) of the grid at which these queries stand.
        weights: [B, N, heads, h, w], what acts on the values: Σ_j weights_j·values_j is the query's output, before pooling
            and output projection. For QnA this is Σ_l softmax·tap_scale, and may be negative; for the others it sums to 1
            (0 where nothing may be attended).
        softmax: [B, N, L, heads, h, w], before the tap scale, for each of QnA's L learned queries; L = 1 for the others.
        outside: [B, N, heads], softmax mass that went to padding (border="zeros" alone has any), summed over L.
        content: [B, N, L, heads, h, w], the softmax of key×query alone, where asked for and where the layer adds positions.
        received: [B, heads, h, w], for each pixel the sum of the softmax over all queries that see it (and over L).
        kernels: [B, rows, columns, heads, kh, kw], the weights of every window as they act (for `QnAUpsample2d` summed over
            the pixels it makes), where asked for and where the layer has windows of taps: local attention and QnA.
        before: the rows above and columns left of the image that the network padded it with (QnA-ViT, up to whole patches).

    `on_image(maps)` brings any of them from h×w to the image's grid.
    """

    name: str
    kind: str
    image_size: Pair
    grid: Pair
    query_grid: Pair
    cells: list[Pair]
    centres: list[Pair]
    weights: Tensor | None
    softmax: Tensor | None
    outside: Tensor | None
    content: Tensor | None
    received: Tensor | None
    kernels: Tensor | None = None
    before: Pair = (0, 0)

    @property
    def heads(self) -> int:
        some = self.weights if self.weights is not None else self.received
        return 0 if some is None else some.shape[-3]

    def on_image(self, maps: Tensor | None = None, *, smooth: bool = False) -> Tensor:
        """Maps […, h, w] (None: the weights) on the image's grid, […, H, W]: each pixel has its cell's number.

        `smooth` interpolates between the cells' centres instead, for overlays.

        >>> import torch, nearsight
        >>> layer = nearsight.LocalAttention2d(4, 4, 3, num_heads=1)
        >>> net = torch.nn.Sequential(torch.nn.AvgPool2d(2), layer)
        >>> maps = nearsight.attention_maps(net, torch.randn(1, 4, 6, 10), pixels=[(5, 9)])["1"]
        >>> maps.weights.shape[-2:], maps.on_image().shape[-2:], bool(maps.on_image()[0, 0, 0, 0, 0] == 0)
        (torch.Size([3, 5]), torch.Size([6, 10]), True)
        """
        if maps is None:
            maps = self.weights
        if maps is None or tuple(maps.shape[-2:]) != self.grid:
            got = "nothing" if maps is None else f"shape {shape_text(maps.shape)}"
            raise ArgumentValueError(
                f"on_image: got {got}, wanted maps […, {self.grid[0]}, {self.grid[1]}] of layer {self.name!r}; ask "
                f"attention_maps for pixels to have weights."
            )
        if smooth:
            step = _step(self.image_size, self.grid)
            size = self.image_size if step is None else (self.grid[0] * step, self.grid[1] * step)
            top, left = (0, 0) if step is None else self.before
            flat = maps.reshape(1, -1, *self.grid)
            flat = F.interpolate(flat, size, mode="bilinear", align_corners=False) if flat.numel() else flat
            height, width = self.image_size
            if size[0] < height or size[1] < width:  # pixels that the network left out
                flat = F.pad(flat, (0, max(0, width - size[1]), 0, max(0, height - size[0])), mode="replicate")
            flat = flat[..., top : top + height, left : left + width]
            return flat.reshape(*maps.shape[:-2], height, width)
        under = _cells(self.image_size, self.grid, self.before)
        rows, columns = (torch.tensor(axis, device=maps.device) for axis in under)
        return maps.index_select(-2, rows).index_select(-1, columns)

    def image_part(self, part: Box) -> Box:
        """The pixels of the image under a part of the grid; both are (top, left, bottom, right), the last two not included."""
        rows, columns = _cells(self.image_size, self.grid, self.before)
        top, left, bottom, right = part
        return (
            bisect_left(rows, top),
            bisect_left(columns, left),
            bisect_left(rows, bottom),
            bisect_left(columns, right),
        )


def attention_maps(
    model: nn.Module,
    images: Tensor | Sequence[Tensor],
    layers: str | Sequence[str] | None = None,
    pixels: Sequence[Pair] | None = None,
    *,
    received: bool = True,
    content: bool = False,
    kernels: bool = False,
    key_mask: Tensor | None = None,
) -> dict[str, LayerMaps]:
    """What every attention layer of a network attends to: the weights of chosen pixels, and what each location receives.

        y_i = Σ_j weights_ij·v_j ,   received_j = Σ_i softmax_ij

    exactly those of the layer's own computation, for the layers of this package in any network: its own, or one of timm's or
    torchvision's after `replace_conv`. The network runs once, in evaluation mode and without gradients, and each layer's maps
    are made while it runs, so memory is that of one layer; its training mode is restored.

    Args:
        model: any network that can be called with `images`; also a single layer.
        images: [B, C, H, W], as the network wants them; for a detector a list of images [C, H, W] of one size, best one that
            it need not pad.
        layers: which layers: a name or a pattern ("stages.0.*", as in timm's `AttentionExtract`), or several; the name of a
            module around them stands for all layers in it. None is all of them.
        pixels: query pixels (y, x) of the image, the same for all images. A layer on a coarser grid answers for the cell
            that holds the pixel. None asks for `received` alone.
        received: also the received attention, which needs all queries of the layer.
        content: also the softmax of key×query without positions, where a layer adds them.
        kernels: also the weights of all windows, tap by tap, for local attention and QnA: kh·kw·heads numbers per query.
        key_mask: bool [B, H, W], True where a pixel may be attended, for networks that take it.

    Returns:
        {name: `LayerMaps`}, in the order in which the layers run. Sizes, on the layer's h×w grid: weights
        [B, N, heads, h, w], received [B, heads, h, w]; `on_image` brings them to H×W.

    >>> import timm, torch, nearsight
    >>> model = timm.create_model("sasa_resnet_nano")
    >>> found = nearsight.attention_maps(model, torch.randn(1, 3, 24, 32), pixels=[(11, 20)])
    >>> name, maps = next(iter(found.items()))
    >>> maps.kind, maps.grid, maps.cells, maps.weights.shape
    ('local', (24, 32), [(11, 20)], torch.Size([1, 1, 4, 24, 32]))
    >>> bool((maps.weights.sum((-2, -1)) - 1).abs().max() < 1e-5)
    True
    >>> some = nearsight.attention_maps(model, torch.randn(1, 3, 24, 32), layers="layer2.*")
    >>> [maps.received.shape for maps in some.values()][0]
    torch.Size([1, 4, 24, 32])
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"{OP}: got model of type {type(model).__name__}, wanted a torch.nn.Module.")
    size = _image_size(images)
    # Hooks on a compiled network's modules do not run; its own modules are the ones that were given to torch.compile.
    model = getattr(model, "_orig_mod", model)
    chosen = choose_layers(model, layers)
    wanted = None if pixels is None else [_pixel(pixel, size) for pixel in pixels]
    found: dict[str, LayerMaps] = {}
    before: Pair = (0, 0)

    def note_padding(module: PatchEmbed2d, args: tuple[Any, ...], output: Any) -> None:
        nonlocal before
        if tuple(args[0].shape[2:]) == size:
            before = module.before(*size)

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = args[0] if args else kwargs["x"]
            mask = args[1] if len(args) > 1 else kwargs.get("key_mask")
            times = sum(1 for maps in found.values() if maps.name.partition("#")[0] == name)
            label = name if times == 0 else f"{name}#{times + 1}"
            grid = (x.shape[2], x.shape[3])
            extractor = _extractor(module)
            query_grid = extractor.query_grid(module, grid)
            cells = None if wanted is None else [cell_of(pixel, size, query_grid, before) for pixel in wanted]
            maps = _look(label, module, x, mask, cells, size, received, content, kernels)
            found[label] = replace(maps, before=before)

        return hook

    handles = [m.register_forward_hook(look(name), with_kwargs=True) for name, m in chosen.items()]
    handles += [m.register_forward_hook(note_padding) for m in model.modules() if isinstance(m, PatchEmbed2d)]
    try:
        with _evaluating(model), torch.no_grad():
            _run(model, images, key_mask)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise ArgumentValueError(
            f"{OP}: got a network whose forward runs none of its attention layers {', '.join(map(repr, chosen))}, wanted at "
            f"least one that runs."
        )
    return found


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a network by name, in the order in which they are registered; nothing is run.

    >>> import timm, nearsight
    >>> layers = attention_layers(timm.create_model("expatt_resnet_nano"))
    >>> next(iter(layers)), type(next(iter(layers.values()))).__name__
    ('layer1.0.conv2.attention', 'ExplicitAttention2d')
    """
    return {name: module for name, module in model.named_modules() if extractor_of(module) is not None}


def layer_maps(
    layer: nn.Module,
    x: Tensor,
    cells: Sequence[Pair] | None = None,
    *,
    received: bool = True,
    content: bool = False,
    kernels: bool = False,
    key_mask: Tensor | None = None,
) -> LayerMaps:
    """The maps of one layer from its own input [B, C, h, w]; `cells` are (y, x) on its query grid.

    >>> import torch, nearsight
    >>> layer = nearsight.QnA2d(8, 8, kernel_size=3, stride=2, num_heads=2)
    >>> maps = layer_maps(layer, torch.randn(1, 8, 5, 7), cells=[(2, 3)])
    >>> maps.query_grid, maps.weights.shape, maps.received.shape
    ((3, 4), torch.Size([1, 1, 2, 5, 7]), torch.Size([1, 2, 5, 7]))
    """
    extractor = _extractor(layer)
    _check_images(x)
    check_key_mask("layer_maps", key_mask, x.shape[0], x.shape[2], x.shape[3])
    size = (x.shape[2], x.shape[3])
    wanted = None if cells is None else [_pixel(cell, extractor.query_grid(layer, size)) for cell in cells]
    with torch.no_grad():
        return _look("", layer, x, key_mask, wanted, size, received, content, kernels)


def explicit_map(
    layer: nn.Module,
    size: Pair,
    cell: Pair,
    *,
    radius: float | Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The map of one cell of an explicit layer on a grid of `size`, with its own radius or another: [heads, h, w].

    Explicit attention does not look at the image, so neither image nor network is needed. `radius` is ignored by the kinds
    without one.

    >>> import nearsight
    >>> layer = nearsight.ExplicitAttention2d(8, 8, kind="gaussian")
    >>> narrow, own = (explicit_map(layer, (5, 7), (2, 3), radius=r)[0, 2, 3] for r in (0.05, None))
    >>> bool(narrow > own)
    True
    """
    if isinstance(layer, ExplicitAugmentedConv2d):
        layer = layer.attention
    if not isinstance(layer, ExplicitAttention2d):
        raise ArgumentTypeError(
            f"explicit_map: got {type(layer).__name__}, wanted an ExplicitAttention2d or ExplicitAugmentedConv2d."
        )
    height, width = check_pair("explicit_map", "size", size)
    cell = _pixel(cell, (height, width))
    extractor: Any = _extractor(layer)
    with torch.no_grad():
        empty = layer.value.weight.new_empty(1, 0, height, width)
        own = radius if layer.log_radius is not None else None
        maps: Given = extractor.given(layer, empty, key_mask, [cell], True, own)
    return maps.weights[0, 0]


def cell_of(pixel: Pair, image: Pair, grid: Pair, before: Pair = (0, 0)) -> Pair:
    """The cell of a grid under a pixel of the image, which the network padded with some rows and columns `before`.

    >>> cell_of((8, 13), (9, 14), (3, 4)), cell_of((8, 13), (10, 20), (7, 7)), cell_of((3, 3), (9, 9), (3, 3), (1, 0))
    ((2, 3), (5, 4), (1, 0))
    """
    rows, columns = _cells(image, grid, before)
    return rows[pixel[0]], columns[pixel[1]]


def _cells(image: Pair, grid: Pair, before: Pair) -> tuple[list[int], list[int]]:
    """The cell of every row and of every column of an image."""
    step = _step(image, grid)
    rows, columns = (
        [min((i + padding) // step, cells - 1) if step else i * cells // size for i in range(size)]
        for size, cells, padding in zip(image, grid, before, strict=True)
    )
    return rows, columns


def _step(image: Pair, grid: Pair) -> int | None:
    """The power of two by which a network made `grid`, or None: the grid is then stretched over the image.

    Networks that pad make ⌈image / step⌉ cells, those that do not (VGG's pooling) leave the last pixels out.
    """
    steps = [1 << n for n in range(max(image).bit_length())]
    padded = (step for step in steps if all(-(-n // step) == cells for n, cells in zip(image, grid, strict=True)))
    cut = (
        step for step in steps if all(cells in (n // step, -(-n // step)) for n, cells in zip(image, grid, strict=True))
    )
    return next(itertools.chain(padded, cut), None)


def _look(
    name: str,
    layer: nn.Module,
    x: Tensor,
    key_mask: Tensor | None,
    cells: list[Pair] | None,
    image_size: Pair,
    received: bool,
    content: bool,
    kernels: bool,
) -> LayerMaps:
    extractor = _extractor(layer)
    given = parts = None
    if cells is not None:
        given = extractor.given(layer, x, key_mask, cells, True)
        if content and extractor.has_parts(layer):
            parts = extractor.given(layer, x, key_mask, cells, False).softmax
    grid = (x.shape[2], x.shape[3])
    return LayerMaps(
        name,
        extractor.kind,
        image_size,
        grid,
        extractor.query_grid(layer, grid),
        cells or [],
        [extractor.centre(layer, cell) for cell in cells or []],
        None if given is None else given.weights,
        None if given is None else given.softmax,
        None if given is None else given.outside,
        parts,
        extractor.received(layer, x, key_mask) if received else None,
        extractor.kernels(layer, x, key_mask) if kernels else None,
    )


def _extractor(layer: nn.Module) -> Extractor:
    extractor = extractor_of(layer)
    if extractor is None:
        raise ArgumentTypeError(
            f"layer_maps: got {type(layer).__name__}, wanted an attention layer of nearsight; attention_layers(model) lists "
            f"a network's."
        )
    return extractor


def _check_images(images: Any) -> None:
    if not isinstance(images, Tensor):
        raise ArgumentTypeError(f"{OP}: got images of type {type(images).__name__}, wanted a tensor [B, C, H, W].")
    if images.dim() != 4 or 0 in images.shape[2:]:
        hint = "; add the batch axis with images[None]" if images.dim() == 3 else ""
        raise ArgumentValueError(f"{OP}: got shape {shape_text(images.shape)}, wanted images [B, C, H, W]{hint}.")


def _image_size(images: Any) -> Pair:
    """(H, W) of a batch or of a list of images, checked."""
    if isinstance(images, list | tuple):
        sizes = {tuple(image.shape[1:]) if isinstance(image, Tensor) and image.dim() == 3 else None for image in images}
        if len(sizes) != 1 or None in sizes:
            raise ArgumentTypeError(
                f"{OP}: got a {type(images).__name__} of images, wanted tensors [C, H, W] of one size, or one tensor "
                f"[B, C, H, W]."
            )
        ((height, width),) = sizes  # type: ignore[misc]
        return height, width
    _check_images(images)
    return images.shape[2], images.shape[3]


def _pixel(pixel: Any, size: Pair) -> Pair:
    if isinstance(pixel, int):
        raise ArgumentTypeError(f"{OP}: got the pixel {pixel!r}, wanted (y, x); for one pixel pass [(y, x)].")
    y, x = check_pair(OP, "pixels", tuple(int(n) for n in pixel), minimum=0)
    if y >= size[0] or x >= size[1]:
        raise ArgumentValueError(f"{OP}: got the pixel ({y}, {x}), wanted (y, x) inside {size[0]}×{size[1]}.")
    return y, x


def choose_layers(model: nn.Module, layers: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """The attention layers that the patterns name, in the model's order; every pattern must name one.

    >>> import timm, nearsight
    >>> list(choose_layers(timm.create_model("sasa_resnet_nano"), "layer[12].*"))
    ['layer1.0.conv2', 'layer2.0.conv2']
    """
    known = attention_layers(model)
    if not known:
        raise ArgumentValueError(
            f"{OP}: got {type(model).__name__}, which has no attention layer of nearsight; swap convolutions with "
            f"replace_conv, or use one of nearsight's networks."
        )
    if layers is None:
        return known
    patterns = [layers] if isinstance(layers, str) else list(layers)
    picked = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentTypeError(f"{OP}: got layers={layers!r}, wanted names or patterns of layers.")
        names = {n for n in known if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"{pattern}.*")}
        if not names:
            near = did_you_mean(pattern, known)
            raise ArgumentValueError(
                f"{OP}: no attention layer is named {pattern!r}.{near} This network has: {', '.join(known)}."
            )
        picked |= names
    return {name: module for name, module in known.items() if name in picked}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _run(model: nn.Module, images: Tensor | Sequence[Tensor], key_mask: Tensor | None) -> None:
    if key_mask is None:
        model(images)
    elif "key_mask" in inspect.signature(model.forward).parameters:
        model(images, key_mask=key_mask)
    else:
        raise ArgumentTypeError(
            f"{OP}: got a key_mask for {type(model).__name__}, whose forward takes none; use one of nearsight's networks or "
            f"leave it out."
        )
