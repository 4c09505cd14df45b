"""Consoles that show names as they are, and leave a reader who went away to the command."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

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


def signs_of_life() -> Console:
    """The console for progress, which nobody's work depends on."""
    if sys.stderr is None:  # started without: rich knows what to do
        return plain(stderr=True)
    return plain(file=_Unheard(sys.stderr))


class _Unheard:
    """A stream to a terminal that may be closed, on whose account no work shall end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Screen(Console):
    """A console that leaves a reader who went away to the command, which knows its exit code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
