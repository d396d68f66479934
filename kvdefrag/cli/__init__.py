"""The command line: parse, build, run, print."""

from kvdefrag.cli.app import main

__all__ = ["main"]
