"""The command ``bisect-trt``, also as ``python -m bisect_trt``."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from bisect_trt.base.interrupt import interrupts_held

# As in bisect_trt.base.errors, which may take too long to import.
_EXIT_MACHINE = 4
_EXIT_INTERRUPTED = 130


def entry() -> None:
    """Run the command; Ctrl-C ends it with one line from the first import on."""
    # A large network's objects live to the end: searching them for garbage is a tenth of the time.
    gc.set_threshold(50_000, 20, 100)
    try:
        with interrupts_held():
            import click

            from bisect_trt.base.limits import share_arenas

            share_arenas()
            from bisect_trt.cli import main

        try:
            sys.exit(main(prog_name="bisect-trt", standalone_mode=False))
        except click.ClickException as error:
            _end(error.exit_code, error.show)
        except click.Abort:  # Ctrl-C while the options are read
            _end_interrupted()
        except OSError:  # while the help text is written; commands handle their own
            _end(_EXIT_MACHINE)
    except (KeyboardInterrupt, ImportError, OSError, MemoryError) as error:
        if not _was_interrupted(error):
            _report_import_failure(error)
            _end(_EXIT_MACHINE)  # 1 would mean "cannot be met"
        # Python itself would end by the signal if an extension's import was interrupted.
        _end_interrupted()


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused ``error``; some extensions turn it into an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _report_import_failure(error: BaseException) -> None:
    if sys.stderr is None:  # print_exception would write to standard output
        return
    with suppress(OSError):
        traceback.print_exception(error)
        sys.stderr.write("bisect-trt: cannot be started: a library does not load, see above\n")


def _end_interrupted() -> None:
    _end(_EXIT_INTERRUPTED, lambda: sys.stderr.write("bisect-trt: interrupted\n"))


def _end(code: int, say: Callable[[], object] = lambda: None) -> None:
    """End the process at once, after ``say`` if it can write."""
    try:
        say()
        sys.stderr.flush()
    except (OSError, AttributeError):  # a full stream, or no stream
        pass
    os._exit(code)


if __name__ == "__main__":
    entry()
