"""Consoles that show names as they are, and leave a reader who went away to the command."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


def plain(kind: type[Console] = Console, **more: Any) -> Console:
    """A console that takes text as it is: names may look like markup, codes of emoji or numbers.

    Args:
        kind: of the console.
        more: its further arguments.
    """
    return kind(markup=False, emoji=False, highlight=False, **more)


def screen() -> Console:
    """The console for results: wide where a program reads it, so that no name is broken over two
    lines.
    """
    seen = sys.stdout is not None and sys.stdout.isatty()
    return plain(_Screen, width=None if seen or "COLUMNS" in os.environ else 200)


class _Screen(Console):
    """A console that leaves a reader who went away to the command, which knows its exit code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
