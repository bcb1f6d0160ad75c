"""The frame of the command line: the verbs, and what becomes of a mistake.

A verb is a file `cli/VERB.py` with a module docstring (its first line is the verb's line in `nearsight --help`) and
`app = new_app()`, a Typer application with one command or several. `VERBS` names it.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import nearsight
from nearsight.errors import NearsightError, UserError, did_you_mean, disk_full

__all__ = ["VERBS", "did_you_mean", "examples", "main", "new_app"]

# A new verb is one line here.
VERBS: tuple[str, ...] = (
    "demo",
    "train",
    "eval",
    "predict",
    "push",
    "export",
    "maps",
    "explore",
    "models",
    "tables",
    "bench",
    "convert",
    "doctor",
)

SETTINGS = {"help_option_names": ["-h", "--help"]}
TRACEBACK = "NEARSIGHT_TRACEBACK"


def new_app(**options: Any) -> typer.Typer:
    """The Typer application of one verb, with the settings all verbs share."""
    return typer.Typer(context_settings=SETTINGS, rich_markup_mode="rich", add_completion=False, **options)


def examples(*lines: str) -> str:
    """An epilog for `app.command`: one example per line, each a command and, after two spaces and #, what it does.

    >>> print(examples("nearsight models  # all of them"))
    [bold]Examples[/bold]
    <BLANKLINE>
    nearsight models  [dim]# all of them[/dim]
    """

    def show(line: str) -> str:
        command, mark, note = line.replace("[", r"\[").partition("  # ")
        return f"{command}  [dim]# {note}[/dim]" if mark else command

    return "\n\n".join(["[bold]Examples[/bold]", *map(show, lines)])


class _Verbs(TyperGroup):
    """Lists the verbs from their files' docstrings and imports only the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word not in VERBS and not word.startswith("-") and not ctx.resilient_parsing:
            raise UserError(f"no verb {word!r}.{did_you_mean(word, VERBS)} Verbs: {', '.join(VERBS)}.")
        name, _, rest = super().resolve_command(ctx, args)
        command = typer.main.get_command(importlib.import_module(f"nearsight.cli.{name}").app)
        command.name = name
        return name, command, rest


def _first_line(verb: str) -> str:
    source = (Path(__file__).parent / f"{verb}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nearsight {nearsight.__version__}")
        raise typer.Exit


def _frame() -> Any:
    app = new_app(cls=_Verbs, no_args_is_help=True)

    @app.callback()
    def frame(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """Local self-attention for vision: train, inspect, measure and check the networks of three papers.

        Each verb has examples in its own help: nearsight VERB --help.
        """

    for verb in VERBS:
        app.command(verb, help=_first_line(verb))(lambda: None)
    return typer.main.get_command(app)


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 0 on success, 2 after one line on stderr when the user made a mistake."""
    words = list(sys.argv[1:] if args is None else args)
    who = " ".join(["nearsight", *[word for word in words[:1] if word in VERBS]])
    try:
        code = _frame().main(words, prog_name="nearsight", standalone_mode=False)
    except Exception as error:
        line = _mistake(error)
        if line is None or os.environ.get(TRACEBACK):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2
        typer.echo(f"{who}: {' '.join(line.split())}", err=True)
        return 2
    return code if isinstance(code, int) else 0


def _mistake(error: Exception) -> str | None:
    """What to tell the user when `error` is his to mend; None when it is a fault of ours."""
    if isinstance(error, NearsightError):
        return str(error)
    if hasattr(error, "format_message"):  # click's and, from 0.26 on, Typer's own usage errors
        return _usage(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        from nearsight.cli.extras import extra_of

        extra = extra_of(error.name)
        if extra is not None:
            return f"needs {error.name}, which is not installed; run: pip install 'nearsight[{extra}]'."
    if (
        isinstance(
            error, FileNotFoundError | FileExistsError | PermissionError | IsADirectoryError | NotADirectoryError
        )
        and error.filename
    ):
        return f"cannot open {str(error.filename)!r}: {error.strerror}."
    if isinstance(error, OSError) and disk_full(error):
        return f"cannot write {str(error.filename)!r}: the disk is full." if error.filename else "the disk is full."
    if isinstance(error, typer.Abort):
        return "stopped."
    return None


def _usage(error: Any) -> str:
    text = str(error.format_message())
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option and error.ctx is not None:
        known = [name for param in error.ctx.command.get_params(error.ctx) for name in param.opts]
        return f"No such option: {option}.{did_you_mean(option, known)} See {error.ctx.command_path} --help."
    return text
