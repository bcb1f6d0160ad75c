"""The command line: one file per verb, imported only when its verb is called."""

from nearsight.cli.app import main

__all__ = ["main"]
