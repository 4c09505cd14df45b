"""The command ``bisect-trt``, also as ``python -m bisect_trt``."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_MACHINE, _INTERRUPTED = 4, 130

_COLLECTED_AFTER = 50_000, 20, 100
"""Objects, and generations: with Python's 700 a network of 20,000 nodes, all of whose objects live
to the end, takes a tenth longer for being searched for garbage that is not there."""


def entry() -> None:
    """Run the command; Ctrl-C is answered in one line from the first import on, and wrong usage has
    its exit code also where nobody can read why.
    """
    gc.set_threshold(*_COLLECTED_AFTER)
    try:
        with _interrupts_held():
            import click

            from bisect_trt.cli import main

        try:
            sys.exit(main(prog_name="bisect-trt", standalone_mode=False))
        except click.ClickException as error:
            _end(error.exit_code, error.show)
        except click.Abort:  # Ctrl-C while the options are read
            _end_interrupted()
        except OSError:  # of the help text: a command answers for its own
            _end(_MACHINE)
    except (KeyboardInterrupt, ImportError, OSError, MemoryError) as error:
        if not _was_interrupted(error):
            _complain(error)
            _end(_MACHINE)  # 1 would mean "cannot be met"
        # Python itself would end by the signal where an extension's import was interrupted.
        _end_interrupted()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C comes at the end, a second later at most: an extension that it interrupts while it is
    imported may abort the process, as onnx's does.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # of a job in the background it is ignored
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind ``error``: some extensions make an ImportError of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _complain(error: BaseException) -> None:
    """Of what this was installed with, or of a machine that has no room for it."""
    if sys.stderr is None:  # else it would go to standard output
        return
    with suppress(OSError):
        traceback.print_exception(error)
        sys.stderr.write("bisect-trt: cannot be started: a library does not load, see above\n")


def _end_interrupted() -> None:
    _end(_INTERRUPTED, lambda: sys.stderr.write("bisect-trt: interrupted\n"))


def _end(code: int, say: Callable[[], object] = lambda: None) -> None:
    """End at once, after saying why if that can be said."""
    try:
        say()
        sys.stderr.flush()
    except (OSError, AttributeError):  # a full stream, or none
        pass
    os._exit(code)


if __name__ == "__main__":
    entry()
