import ast
import errno
import re
import shlex
import subprocess
import sys
import types

import pytest
import typer

import nearsight
from nearsight.cli import app as frame
from nearsight.cli import main
from nearsight.cli.app import VERBS, examples, new_app
from nearsight.errors import UserError, did_you_mean

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def commands(verb):
    """Every command of a verb: itself, or its sub-commands."""
    module = __import__(f"nearsight.cli.{verb}", fromlist=["app"])
    command = typer.main.get_command(module.app)
    return (
        {verb: command} if not hasattr(command, "commands") else {f"{verb} {n}": c for n, c in command.commands.items()}
    )


@pytest.fixture
def verb(monkeypatch):
    """Put a function on the command line as the verb `probe`."""

    def register(function):
        module = types.ModuleType("nearsight.cli.probe")
        module.app = new_app()
        module.app.command()(function)
        monkeypatch.setitem(sys.modules, "nearsight.cli.probe", module)
        monkeypatch.setattr(frame, "VERBS", (*VERBS, "probe"))
        monkeypatch.setattr(frame, "_first_line", lambda name: "a verb")

    return register


def test_help_lists_every_verb(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in VERBS:
        assert re.search(rf"│ {name} +\w", out), name


def test_help_imports_no_verb():
    code = "import sys; from nearsight.cli import main; main(['--help']); print([m for m in sys.modules if m in %r])"
    verbs = [f"nearsight.cli.{name}" for name in VERBS]
    done = subprocess.run([sys.executable, "-c", code % verbs], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_module_is_the_program():
    done = subprocess.run([sys.executable, "-m", "nearsight", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nearsight {nearsight.__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "nearsight", "docter"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("nearsight: no verb 'docter'. Did you mean 'doctor'? Verbs: ")
    assert done.stderr.count("\n") == 1


def test_nothing_asked_shows_the_help_and_is_no_success(capsys):
    assert main([]) == 2
    assert "Usage: nearsight" in capsys.readouterr().out


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_with_examples_that_parse(name, capsys):
    for path, command in commands(name).items():
        assert main([*path.split(), "--help"]) == 0
        out = ANSI.sub("", capsys.readouterr().out)
        assert "Examples" in out, f"{path} has no examples; pass epilog=examples(...)"
        lines = [re.sub(r"\[/?\w+\]", "", line) for line in command.epilog.split("\n\n")[1:]]
        assert lines
        for line in lines:
            words = shlex.split(line.replace(r"\[", "["), comments=True)
            assert words[: 1 + len(path.split())] == ["nearsight", *path.split()], line
            try:
                command.make_context(path, words[1 + len(path.split()) :])
            except Exception as error:
                # An example may name a file that is not here; its options must exist all the same.
                if "does not exist" not in str(error):
                    raise AssertionError(line) from error


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_refuses_an_unknown_option_in_one_line(name, capsys):
    for path in commands(name):
        assert main([*path.split(), "--hepl"]) == 2
        got = capsys.readouterr()
        assert got.out == ""
        assert (
            got.err
            == f"nearsight {name}: No such option: --hepl. Did you mean '--help'? See nearsight {path} --help.\n"
        )


@pytest.mark.parametrize("name", VERBS)
def test_the_first_docstring_line_is_a_sentence(name):
    line = frame._first_line(name)
    assert line.endswith(".")
    assert len(line) < 120


def test_a_users_mistake_is_one_line(verb, capsys):
    def probe():
        raise UserError("got a,\n  wanted b.")

    verb(probe)
    assert main(["probe"]) == 2
    assert capsys.readouterr() == ("", "nearsight probe: got a, wanted b.\n")


def test_an_ops_refusal_is_one_line(verb, capsys):
    def probe():
        nearsight.ops.backends("nothing")

    verb(probe)
    assert main(["probe"]) == 2
    assert capsys.readouterr().err.startswith("nearsight probe: backends: got op 'nothing', wanted one of ")


def test_a_missing_extra_names_the_cure(verb, capsys):
    def probe():
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.pyplot")

    verb(probe)
    assert main(["probe"]) == 2
    wanted = "nearsight probe: needs matplotlib.pyplot, which is not installed; run: pip install 'nearsight[viz]'.\n"
    assert capsys.readouterr().err == wanted


def test_a_missing_file_is_named(verb, capsys, tmp_path):
    def probe():
        (tmp_path / "no.png").read_bytes()

    verb(probe)
    assert main(["probe"]) == 2
    assert (
        capsys.readouterr().err == f"nearsight probe: cannot open '{tmp_path / 'no.png'}': No such file or directory.\n"
    )


@pytest.mark.parametrize("kind", [PermissionError, IsADirectoryError, NotADirectoryError])
def test_a_file_that_cannot_be_opened_is_named(verb, capsys, kind):
    def probe():
        raise kind(1, "No way", "x.png")

    verb(probe)
    assert main(["probe"]) == 2
    assert capsys.readouterr().err == "nearsight probe: cannot open 'x.png': No way.\n"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("x.png", "nearsight probe: cannot write 'x.png': the disk is full.\n"),
        (None, "nearsight probe: the disk is full.\n"),
    ],
)
def test_a_full_disk_is_one_line(verb, capsys, name, line):
    def probe():
        raise OSError(errno.ENOSPC, "No space left on device", name)

    verb(probe)
    assert main(["probe"]) == 2
    assert capsys.readouterr().err == line


def test_our_own_faults_keep_their_traceback(verb):
    def probe():
        raise ModuleNotFoundError("No module named 'nearsight.nothing'", name="nearsight.nothing")

    verb(probe)
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        main(["probe"])


def test_a_traceback_can_be_asked_for(verb, monkeypatch):
    def probe():
        raise UserError("no.")

    verb(probe)
    monkeypatch.setenv("NEARSIGHT_TRACEBACK", "1")
    with pytest.raises(UserError):
        main(["probe"])


def test_exit_codes_pass_through(verb):
    def probe():
        raise typer.Exit(1)

    verb(probe)
    assert main(["probe"]) == 1


def test_interrupt_is_no_success(verb):
    def probe():
        raise KeyboardInterrupt

    verb(probe)
    assert main(["probe"]) == 130


def test_did_you_mean_is_silent_without_a_near_word():
    assert did_you_mean("zebra", ["models", "tables"]) == ""


def test_examples_escape_markup():
    assert examples("nearsight train a b=[1]") == "[bold]Examples[/bold]\n\nnearsight train a b=\\[1]"


def test_verb_files_are_registered():
    """A file in cli/ with an `app` is a verb; one that is not in VERBS was forgotten."""
    folder = frame.Path(frame.__file__).parent
    files = {
        path.stem
        for path in folder.glob("*.py")
        if any(
            isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "app" for target in node.targets)
            for node in ast.parse(path.read_text(encoding="utf-8")).body
        )
    }
    assert files == set(VERBS)
