"""Draw what a network attends to: the papers' figures, as pictures and as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console, print_json, table
from nearsight.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from nearsight.cli.pictures import Opened
    from nearsight.viz.panels import Drawing

app = new_app()

FIGURES = {
    "received": "per head, the attention each location receives (QnA, Figure 1)",
    "given": "per head, what a pixel attends to (SASA)",
    "kernels": "every window's kernel, tiled (QnA, Figure 2)",
    "parts": "key×query, key×query + position, the explicit map (ExpAtt, Figure 1)",
    "embeddings": "learned relative rows and columns (SASA)",
    "mixture": "the attention stem's mixture weights (SASA)",
    "radius": "the learned radius against depth (ExpAtt, Figure 3)",
}
EXAMPLES = examples(
    "nearsight maps runs/demo/qna_vit_nano test:3  # all figures of one test image",
    "nearsight maps runs/demo/sasa_resnet_nano digit.png --pixels 8,8 --layers layer1 --figures given",
    "nearsight maps qna_vit_tiny flower --figures received -o maps/qna  # untrained weights, a built-in photo",
    "nearsight maps runs/demo/*_nano --compare  # curves, accuracy against cost, radius against depth",
)
Pair = tuple[int, int]


class Made(NamedTuple):
    """One figure: what it is of, and the drawing."""

    figure: str
    layer: str
    image: str
    pixel: Pair | None
    drawing: Drawing


@app.command(epilog=EXAMPLES)
def maps(
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|MODEL", help="A run's folder, a checkpoint, or a network's name.")
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE",
            help="Image files; test:N for the N-th image of a run's evaluation split; flower or china (built in).",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")] = Path("maps"),
    layers: Annotated[
        list[str] | None, typer.Option(help="Names or patterns of layers: layer1,'stages.0.*'.", show_default="all")
    ] = None,
    pixels: Annotated[
        list[str] | None,
        typer.Option(metavar="Y,X", help="Query pixels on the network's input.", show_default="the centre"),
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Heads to draw, as in 0,2-5.", show_default="all")] = None,
    figures: Annotated[
        list[str] | None,
        typer.Option(help=f"Which figures: {', '.join(FIGURES)}.", show_default="all that apply"),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Take all arguments as runs; draw curves, costs and radii of all of them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Draw the papers' attention figures of a network: each as NAME.png, NAME.svg and its numbers as NAME.npz."""
    import matplotlib

    matplotlib.use("Agg")
    from nearsight.viz.panels import save_drawing

    notes: list[str] = []
    if compare:
        made = _compared([source, *(images or [])], notes)
    else:
        names = [name for text in layers for name in text.split(",")] if layers else None
        made = _figures(source, images or [], names, _pixels(pixels), _heads(heads), _wanted(figures), notes)
    rows: list[dict[str, Any]] = []
    for one in made:
        files = [str(file) for file in save_drawing(one.drawing, out)]
        rows.append({"figure": one.figure, "layer": one.layer, "image": one.image, "pixel": one.pixel, "files": files})
    if not rows:
        raise UserError(f"{source}: has none of the figures asked for; see nearsight maps --help for which there are.")
    if as_json:
        print_json({"source": source, "figures": rows, "notes": notes})
        return
    screen = console()
    cells = [[row["figure"], row["layer"], row["image"], Path(row["files"][0]).name] for row in rows]
    screen.print(
        table(
            f"{out}: {len(rows)} figures, each .png, .svg, .npz", COLUMNS, [[escape(c) for c in row] for row in cells]
        )
    )
    for note in notes:
        screen.print(note, markup=False, soft_wrap=True)


COLUMNS = ("figure", "layer", "image", "file")


def _figures(
    source: str,
    images: Sequence[str],
    layers: list[str] | None,
    pixels: list[Pair] | None,
    heads: list[int] | None,
    wanted: list[str],
    notes: list[str],
) -> Iterator[Made]:
    """Figures of one network, made one after the other."""
    from nearsight.cli.pictures import free_name, open_network

    opened = open_network(source)
    if not opened.trained:
        notes.append(f"{opened.name} has untrained weights: the maps show its initialisation.")
    if {"received", "given", "kernels", "parts"} & set(wanted):
        if not images and opened.test is None:
            raise UserError(f"got no image for {opened.name}; give a file, or flower or china.")
        names = set[str]()
        for text in images or ["test:0"]:
            name = free_name(Path(text).stem if Path(text).is_file() else text.replace(":", ""), names)
            yield from _of_image(opened, text, name, layers, pixels, heads, wanted)
    yield from _of_parameters(opened, layers, heads, wanted)


def _of_image(
    opened: Opened,
    text: str,
    name: str,
    layers: list[str] | None,
    pixels: list[Pair] | None,
    heads: list[int] | None,
    wanted: list[str],
) -> Iterator[Made]:
    from nearsight.cli.pictures import open_picture, shown
    from nearsight.viz import figures
    from nearsight.viz.maps import attention_maps

    x = opened.prepare(open_picture(opened, text))
    picture = figures.Picture(name, shown(opened, x))
    queries = pixels or [(x.shape[1] // 2, x.shape[2] // 2)]
    found = attention_maps(
        opened.model,
        x[None],
        layers,
        queries,
        received="received" in wanted,
        content="parts" in wanted,
        kernels="kernels" in wanted,
    )
    most = max(one.heads for one in found.values())
    beyond = next((head for head in heads or [] if head >= most), None)
    if beyond is not None:
        raise UserError(f"--heads: got {beyond}, wanted 0 to {most - 1}: no layer drawn here has more.")
    for layer, one in found.items():
        if "received" in wanted:
            yield Made("received", layer, name, None, figures.draw_received(picture, one, heads))
        if "given" in wanted:
            for number, pixel in enumerate(queries):
                drawing = figures.draw_given(picture, one, pixel, number, heads)
                yield Made("given", layer, name, pixel, drawing)
        if one.kernels is not None and one.kind.startswith("qna"):
            yield Made("kernels", layer, name, None, figures.draw_kernels(picture, one, heads))
    if "parts" in wanted:
        for group in figures.grouped(found):
            parts = figures.draw_parts(picture, group, queries)
            if parts is not None:
                yield Made("parts", ", ".join(one.name for one in group), name, None, parts)


def _of_parameters(
    opened: Opened, layers: list[str] | None, heads: list[int] | None, wanted: list[str]
) -> Iterator[Made]:
    """Figures that need no image."""
    from nearsight.viz import figures
    from nearsight.viz.maps import choose_layers
    from nearsight.viz.run_figures import draw_radii

    draw: dict[str, Callable[..., Drawing | None]] = {
        "embeddings": partial(figures.draw_embeddings, chosen=heads),
        "mixture": figures.draw_mixture,
    }
    for name, layer in choose_layers(opened.model, layers).items():
        for figure in draw.keys() & set(wanted):
            drawing = draw[figure](name, layer)
            if drawing is not None:
                yield Made(figure, name, "", None, drawing)
    radii = figures.learned_radii(opened.model)
    if "radius" in wanted and radii:
        yield Made("radius", "", "", None, draw_radii({opened.name: radii}, figures.first_radii(opened.model)))


def _compared(runs: list[str], notes: list[str]) -> Iterator[Made]:
    """Figures of several runs."""
    from nearsight import weights
    from nearsight.models.flops import count_flops, count_parameters
    from nearsight.train.inference import load_network
    from nearsight.train.log import read_log
    from nearsight.viz.figures import first_radii, learned_radii
    from nearsight.viz.run_figures import RunFacts, draw_costs, draw_radii, draw_run_curves

    names = _short_names(runs)
    logs: dict[str, Any] = {}
    facts: dict[str, RunFacts] = {}
    radii: dict[str, Any] = {}
    starts: set[float] = set()
    for run, name in zip(runs, names, strict=True):
        if not Path(run).is_dir() and not weights.find(run):
            raise UserError(f"no run {run!r}; --compare takes runs' folders and the names of shipped networks.")
        network = load_network(run)
        rows = read_log(Path(run))
        if rows:
            logs[name] = rows
        else:
            notes.append(f"{run} has no log: left out of the curves.")
        scores = [row["accuracy"] for row in rows if row["kind"] == "eval" and "accuracy" in row]
        if scores:
            flops = count_flops(network.model, network.data.image_size)
            facts[name] = RunFacts(scores[-1], count_parameters(network.model), flops)
        else:
            notes.append(f"{run} has no accuracy: left out of the comparison with its cost.")
        learned = learned_radii(network.model)
        if learned:
            radii[name] = learned
            starts |= first_radii(network.model)
    if logs:
        yield Made("curves", "", "", None, draw_run_curves(logs))
    if facts:
        yield Made("costs", "", "", None, draw_costs(facts))
    if radii:
        yield Made("radius", "", "", None, draw_radii(radii, starts))


def _short_names(runs: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart.

    >>> _short_names(["a/x", "a/y"]), _short_names(["a/x", "b/x"])
    (['x', 'y'], ['a/x', 'b/x'])
    """
    tails = [Path(run).resolve().parts for run in runs]
    for count in range(1, max(map(len, tails)) + 1):
        names = ["/".join(tail[-count:]) for tail in tails]
        if len(set(names)) == len(set(runs)):
            return names
    return list(runs)


def _pixels(texts: Sequence[str] | None) -> list[Pair] | None:
    """Pairs from "y,x".

    >>> _pixels(["3,12"])
    [(3, 12)]
    """
    if not texts:
        return None
    found = []
    for text in texts:
        y, comma, x = text.partition(",")
        if not (comma and y.strip().isdecimal() and x.strip().isdecimal()):
            raise UserError(f"--pixels: got {text!r}, wanted Y,X as in 8,12: row and column from 0 on.")
        found.append((int(y), int(x)))
    return found


def _heads(text: str | None) -> list[int] | None:
    """Numbers from "0,2-5".

    >>> _heads("0,2-5")
    [0, 2, 3, 4, 5]
    """
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 10_000):
            raise UserError(f"--heads: got {text!r}, wanted numbers from 0 on, as in 0,2-5.")
        found += range(int(first), int(last) + 1)
    return found


def _wanted(figures: Sequence[str] | None) -> list[str]:
    words = [word for text in figures or FIGURES for word in text.split(",")]
    for word in words:
        if word not in FIGURES:
            raise UserError(f"--figures: no figure {word!r}.{did_you_mean(word, FIGURES)} Known: {', '.join(FIGURES)}.")
    return words
