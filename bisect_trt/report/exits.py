"""How a command ends: an exit code, and one line for a person where something went wrong."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import click

from bisect_trt.core.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, BisectError, one_line

Command = Callable[..., int | None]


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM is answered as Ctrl-C is: workers ended, the best plan written."""
    raise KeyboardInterrupt


def guarded(command: Command) -> Command:
    """Turn the tool's errors into one line and an exit code; nobody sees a traceback for their own
    mistake.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        previous = (
            signal.signal(signal.SIGTERM, _interrupt)
            if threading.current_thread() is threading.main_thread()
            else None
        )
        try:
            code = command(*args, **kwargs) or 0
        except BisectError as error:
            click.echo(f"bisect-trt: {one_line(error, 500)}", err=True)
            code = error.exit_code
        except KeyboardInterrupt:
            click.echo(
                "bisect-trt: interrupted; run the same command again to go on from here", err=True
            )
            code = EXIT_INTERRUPTED
        except BrokenPipeError:
            code = 0
        # our own mistake: the traceback helps whoever mends it, and 1 would mean "cannot be met"
        except Exception:
            traceback.print_exc()
            click.echo(
                "bisect-trt: internal error, please report it with the lines above", err=True
            )
            code = EXIT_INTERNAL
        finally:
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)
        sys.exit(code)

    return wrapper
