"""Ends commands: exit codes, one-line errors, interrupts and closed pipes."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from bisect_trt.base.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    NO_THREADS,
    BisectError,
    MachineError,
    is_out_of_memory,
    is_out_of_threads,
    one_line,
)
from bisect_trt.base.interrupt import STOPPING, StoppedError, is_stop

Command = Callable[..., int | None]


def _interrupt(number: int, frame: object) -> None:
    """Handles SIGTERM and SIGHUP as Ctrl-C."""
    STOPPING.set()
    raise KeyboardInterrupt


def _not_lost(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Wraps ``hook`` so that an interrupt inside a destructor is sent again."""
    main = threading.main_thread().ident

    def resend(unraisable: Any) -> object:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            return hook(unraisable)
        # Python drops what a destructor raises, so the signal is sent again after it has ended.
        again = threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGINT))
        again.daemon = True
        again.start()
        return None

    return resend


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt inside the block."""
    STOPPING.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Callable[[int, object], None]] = {
        signal.SIGINT: _interrupt,
        signal.SIGTERM: _interrupt,
    }
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none; under nohup it is ignored
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        terminals = [number for number in (1, 2) if os.isatty(number)]

        def hung_up(number: int, frame: object) -> None:
            for stream in terminals:  # writing to a closed terminal would raise
                _to_nowhere(stream)
            _interrupt(number, frame)

        handlers[hangup] = hung_up
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    hook, sys.unraisablehook = sys.unraisablehook, _not_lost(sys.unraisablehook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def guarded(command: Command) -> Command:
    """Turns the errors of a command into one line and an exit code."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        _prepare_streams()
        try:
            with _interruptible():
                code = command(*args, **kwargs) or 0
        except (KeyboardInterrupt, Exception) as error:
            if is_stop(error):
                left = str(error) if isinstance(error, StoppedError) else "nothing was kept"
                code, words = EXIT_INTERRUPTED, one_line(f"interrupted; {left}", 1000)
            else:
                code, words = ended_by(error)
            _complain(words)
        sys.exit(code)

    return wrapper


@contextmanager
def output(*, is_product: bool = False) -> Iterator[None]:
    """Prints inside the block; a closed pipe does not change the exit code.

    With ``is_product``, output that cannot be written is a MachineError.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _silence()
    except OSError as error:
        _silence()
        words = f"standard output cannot be written ({error.strerror})"
        if is_product:
            raise MachineError(words) from error
        _complain(words)


def ended_by(error: BaseException) -> tuple[int, str]:
    """The exit code for ``error`` and one line; an unexpected error prints its traceback."""
    if isinstance(error, BisectError):
        return error.exit_code, one_line(error, 500)
    if is_out_of_memory(error):
        words = "out of memory; use smaller or fewer inputs, fewer --workers, or a larger machine"
        return EXIT_MACHINE, words
    if is_out_of_threads(error):
        return EXIT_MACHINE, NO_THREADS
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return EXIT_MACHINE, one_line(f"{where}{error.strerror or error}")
    with suppress(OSError):
        traceback.print_exception(error)
    # Python's own exit code 1 would mean "cannot be met".
    return EXIT_INTERNAL, "internal error, please report it with the lines above"


def _complain(words: str) -> None:
    with suppress(OSError):
        click.echo(f"bisect-trt: {words}", err=True)


def _prepare_streams() -> None:
    """Opens missing standard streams and escapes characters that they cannot encode."""
    # Otherwise the next file opened would get descriptor 0, 1 or 2 and receive prints.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _silence() -> None:
    """Redirects standard output to nowhere, so that Python's last flush cannot fail."""
    with suppress(OSError, ValueError, AttributeError):
        _to_nowhere(sys.stdout.fileno())


def _to_nowhere(stream: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)
