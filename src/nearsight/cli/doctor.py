"""Say what is installed, which backend each op would use here and why, and what an extra still needs."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

import nearsight
from nearsight import ops
from nearsight.cli.app import examples, new_app
from nearsight.cli.extras import needs
from nearsight.cli.output import console, print_json, table

app = new_app()

EXAMPLES = examples(
    "nearsight doctor  # is this machine ready?",
    "nearsight doctor --json  # the same for a program, or for a bug report",
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _local(device: str) -> Arguments:
    q = torch.zeros(1, 14, 14, 8, 32, device=device)
    rel = torch.zeros(7, 16, device=device)
    return (q, q, q), {"window": 7, "rel_row": rel, "rel_col": rel}


def _qna(device: str) -> Arguments:
    scores = torch.zeros(1, 14, 14, 2, 8, device=device)
    return (scores, torch.zeros(1, 14, 14, 8, 8, device=device)), {"window": 3}


def _explicit(device: str) -> Arguments:
    return (torch.zeros(1, 14, 14, 24, device=device),), {"kind": "gaussian", "radius": 0.75}


def _block(device: str) -> Arguments:
    w, rel = torch.zeros(64, 3, device=device), torch.zeros(7, 8, device=device)
    return (torch.zeros(1, 56, 56, 3, device=device), w, w, w), {"heads": 4, "rel_row": rel, "rel_col": rel}


# A typical call of each op; whether a backend can run it is the op's own answer.
TYPICAL: dict[str, Callable[[str], Arguments]] = {
    "local_attention": _local,
    "block_attention": _block,
    "qna": _qna,
    "explicit_attention": _explicit,
}


@app.command(epilog=EXAMPLES)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what is installed, which backend each op would use here and why, and what an extra still needs.

    Exits with 1 when something nearsight always needs is missing or too old.
    """
    report = examine()
    if as_json:
        print_json(report)
    else:
        _show(report)
    if not report["healthy"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Everything `nearsight doctor` knows, as plain data."""
    wanted = needs()
    extras: dict[str, list[dict[str, Any]]] = {}
    for need in wanted:
        entry = {"name": need.name, "wanted": need.wanted, "installed": need.installed, "met": need.met}
        extras.setdefault(need.extra or "core", []).append(entry)
    return {
        "nearsight": nearsight.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "cpu_threads": torch.get_num_threads(),
        "cpu_cores": os.cpu_count(),
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "ops": {op: {device: _backends(op, device) for device in _devices()} for op in TYPICAL},
        "needs": extras,
        "healthy": all(entry["met"] for entry in extras["core"]),
    }


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = round(properties.total_memory / 2**30, 1)
        found.append({"name": properties.name, "capability": capability, "memory_gib": memory})
    return found


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)


def _backends(op: str, device: str) -> dict[str, Any]:
    args, options = TYPICAL[op](device)
    reports = ops.backends(op, *args, **options)
    chosen = next((report.name for report in reports if report.usable), None)
    return {"chosen": chosen, "backends": {report.name: report.reason or "usable" for report in reports}}


def _show(report: dict[str, Any]) -> None:
    out = console()
    gpus = [f"{gpu['name']}, {gpu['memory_gib']} GiB, capability {gpu['capability']}" for gpu in report["gpus"]]
    machine = [
        ("nearsight", report["nearsight"]),
        ("Python", f"{report['python']} on {report['system']}"),
        ("CPU", f"{report['cpu_cores']} cores, torch uses {report['cpu_threads']} threads"),
        ("GPU", "; ".join(gpus) or "none that torch can use"),
        ("CUDA (torch built for)", report["cuda"] or "none"),
        ("Triton", report["triton"] or "not installed"),
    ]
    out.print(table("Machine", ("what", "found"), machine))
    verdicts = []
    for op, devices in report["ops"].items():
        for device, answer in devices.items():
            for name, reason in answer["backends"].items():
                mark = "[green]used[/green]" if name == answer["chosen"] else reason
                verdicts.append((op, device, name, mark))
    out.print(table("Backends, for a typical call", ("op", "device", "backend", "verdict"), verdicts))
    rows = []
    for extra, entries in report["needs"].items():
        missing = [f"{e['name']}{e['wanted']} (found {e['installed'] or 'none'})" for e in entries if not e["met"]]
        have = ", ".join(f"{e['name']} {e['installed']}" for e in entries if e["met"])
        install = "nearsight" if extra == "core" else f"'nearsight\\[{extra}]'"
        cure = f"[red]{', '.join(missing)}[/red]: pip install {install}" if missing else "[green]complete[/green]"
        rows.append((extra, cure, have))
    out.print(table("Needed packages", ("extra", "missing", "present"), rows))
