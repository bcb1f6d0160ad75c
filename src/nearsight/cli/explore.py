"""Click a pixel, see what it attends to: a page in the browser."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearsight.cli.app import examples, new_app
from nearsight.errors import UserError

if TYPE_CHECKING:
    from nearsight.viz.explore.subjects import Subject

app = new_app()

EXAMPLES = examples(
    "nearsight explore  # the networks that come with nearsight",
    "nearsight explore runs/demo/qna_vit_nano runs/demo/sasa_resnet_nano  # compare two of your own",
    "nearsight explore expatt_resnet_nano --port 8000 --browser  # untrained: its radius can be moved all the same",
)
# One of each mechanism: what is looked into when nothing is named and nothing trained is at hand.
SMALL = ("qna_vit_nano", "sasa_resnet_nano", "expatt_resnet_nano")
UNTRAINED = "Random weights: its prediction means nothing, its maps show what the mechanism can see."
HOST = "127.0.0.1"


@app.command(epilog=EXAMPLES)
def explore(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT|MODEL]...",
            help="Runs, checkpoints or names of networks. None: those that come with nearsight.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The page's port.")] = 7860,
    host: Annotated[
        str,
        typer.Option(
            help="Whom to answer: this machine alone, or with 0.0.0.0 everyone who can reach it. There is no password."
        ),
    ] = HOST,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page.")] = False,
) -> None:
    """Show a page on which one clicks a pixel of an image and sees what every head of a layer attends to there.

    Everything stays on this machine: the page asks for nothing from elsewhere, and uploads are forgotten with the session.
    """
    # Before networks are loaded: the extra may be missing.
    from nearsight.viz.explore.serve import serve

    subjects = open_subjects(sources or default_sources())
    check_port(host, port)
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"http://{shown}:{port}: {', '.join(subject.name for subject in subjects)}. Stop with Ctrl+C.", err=True)
    if host not in (HOST, "localhost", "::1"):
        typer.echo(f"Everyone who can reach {host} can use this page: there is no password.", err=True)
    serve(subjects, host, port, browser=browser)


def default_sources() -> list[str]:
    """The networks that ship and have attention, the default first, and a small one of every mechanism that does not."""
    from nearsight import weights

    shipped = [name for name in weights.names() if has_attention(name.partition(".")[0])]
    known = {name.partition(".")[0] for name in shipped}
    first = sorted(shipped, key=lambda name: name != weights.DEFAULT)
    return [*first, *(name for name in SMALL if name not in known)]


def has_attention(name: str) -> bool:
    """Whether a network of the registry has layers to look into.

    >>> has_attention("sasa_resnet_nano"), has_attention("resnet_nano")
    (True, False)
    """
    import timm
    import torch

    from nearsight.viz.maps import attention_layers

    with torch.device("meta"):
        return bool(attention_layers(timm.create_model(name)))


def open_subjects(sources: Sequence[str]) -> list[Subject]:
    """The networks of some words of the command line, each once."""
    found: dict[str, Subject] = {}
    for source in dict.fromkeys(sources):
        subject = open_subject(source)
        # Two runs whose folders are called the same are called by their paths.
        names = itertools.chain([subject.name, source], (f"{source} ({n})" for n in itertools.count(2)))
        found[next(name for name in names if name not in found)] = subject
    return [dataclasses.replace(subject, name=name) for name, subject in found.items()]


def open_subject(source: str) -> Subject:
    from nearsight.cli.pictures import open_network, shown
    from nearsight.train.data.images import image_mode
    from nearsight.viz.explore.subjects import Subject

    opened = open_network(source)
    mode = image_mode(opened.channels)

    def prepare(image: Any) -> Any:
        return opened.prepare(image.convert(mode))[None]

    return Subject(
        opened.name,
        opened.model,
        prepare,
        lambda pixels: shown(opened, pixels),
        opened.classes or None,
        trained_note(source, len(opened.classes)) if opened.trained else UNTRAINED,
        opened.trained,
    )


def trained_note(source: str, classes: int) -> str:
    """What a checkpoint says of its training; the name alone for networks that came another way."""
    from nearsight.train import checkpoints

    try:
        state = checkpoints.find(source).state
    except UserError:
        return f"Trained: {source}."
    metrics = state.get("metrics") or {}
    share, images = metrics.get("accuracy"), metrics.get("images")
    told = f": {100 * share:.1f} % of {images:,.0f} test images right" if share is not None and images else ""
    limits = f" It names one of its {classes} classes whatever it is shown." if classes else ""
    source = state["config"]["data"]["source"]
    # Of a folder its name, not where it lies: others may read the page.
    return f"Trained on {Path(source.partition(':')[2] or source).name}{told}.{limits}"


def check_port(host: str, port: int) -> None:
    """A sentence when the page cannot be put there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: a port left a moment ago counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise UserError(f"--host: no such address {host!r} ({error.strerror}).") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port: {port} is in use on {host}; choose another, as in --port {port + 1}.") from error
        raise UserError(f"--host: cannot listen on {host}:{port} ({error.strerror}).") from error
