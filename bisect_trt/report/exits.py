"""Exit codes, options and arguments of the command line."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
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
from bisect_trt.base.plan import Precision
from bisect_trt.settings import FORMER, Option, Settings, options

Command = Callable[..., int | None]

_AGAIN_S = 0.02
"""Then the destructor is left, in which nothing can be raised."""


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM, and the end of the terminal, are answered as Ctrl-C is: workers ended, the best plan
    written.
    """
    STOPPING.set()
    raise KeyboardInterrupt


def _not_lost(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """``hook`` for what nothing can raise; an interrupt that came while an object was freed comes
    again.
    """

    main = threading.main_thread().ident

    def hear(unraisable: Any) -> object:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            return hook(unraisable)
        again = threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))
        again.daemon = True
        again.start()
        return None

    return hear


@contextmanager
def _interruptible() -> Iterator[None]:
    """These signals tell the waiting threads too, inside the block."""
    STOPPING.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    answers: dict[int, Callable[[int, object], None]] = {
        signal.SIGINT: _interrupt,
        signal.SIGTERM: _interrupt,
    }
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none; under nohup it is ignored
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        terminals = [number for number in (1, 2) if os.isatty(number)]

        def hung_up(number: int, frame: object) -> None:
            for stream in terminals:  # whoever wrote there would be the one to end
                _to_nowhere(stream)
            _interrupt(number, frame)

        answers[hangup] = hung_up
    before = {number: signal.signal(number, answer) for number, answer in answers.items()}
    hook, sys.unraisablehook = sys.unraisablehook, _not_lost(sys.unraisablehook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def guarded(command: Command) -> Command:
    """Turn the tool's errors into one line and an exit code; nobody sees a traceback for their own
    mistake, or their machine's.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        _prepare_streams()
        try:
            with _interruptible():
                code = command(*args, **kwargs) or 0
        except (KeyboardInterrupt, Exception) as error:
            if is_stop(error):
                said = str(error) if isinstance(error, StoppedError) else "nothing was kept"
                code, words = EXIT_INTERRUPTED, one_line(f"interrupted; {said}", 1000)
            else:
                code, words = ended_by(error)
            _complain(words)
        sys.exit(code)

    return wrapper


@contextmanager
def output(*, is_product: bool = False) -> Iterator[None]:
    """What is printed inside never decides how a command ends: its reader may stop reading.

    Raises:
        MachineError: the product could not be written.
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
    """The exit code of a command that ``error`` ends, and the one line that says whose it is.

    An error that nobody foresaw is our own: its traceback goes to stderr, for whoever mends it.
    """
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
    # 1 would mean "cannot be met".
    return EXIT_INTERNAL, "internal error, please report it with the lines above"


def _complain(words: str) -> None:
    with suppress(OSError):
        click.echo(f"bisect-trt: {words}", err=True)


def _prepare_streams() -> None:
    """Give the process standard streams, where it was started without, so that no file of ours
    takes their place; and let characters that their encoding lacks be written as escapes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _silence() -> None:
    """Nothing more goes to standard output, also not when Python flushes it at the end."""
    with suppress(OSError, ValueError, AttributeError):
        _to_nowhere(sys.stdout.fileno())


def _to_nowhere(stream: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)


class NamedPath(click.Path):
    """A path that has a name: an empty one would be the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path", param, ctx)
        return super().convert(value, param, ctx)


MODEL = click.argument("model", type=NamedPath())
INPUT = click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    help="A file (.npz, .npy, polygraphy's .json), folder, glob or MODULE:FUNCTION. Repeatable.",
)

PRECISION = click.option(
    "--precision",
    type=click.Choice(options()["precision"].choices),
    default="fp16",
    show_default=True,
    help=options()["precision"].help,
)
ENGINE_PRECISION = click.option(
    "--precision",
    type=click.Choice([p.value for p in Precision]),
    default="fp32",
    show_default=True,
    help="What the engine runs in.",
)
PLAN = click.option(
    "--plan",
    "plan_path",
    type=NamedPath(),
    required=True,
    help="The plan.json that a run wrote.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
QUIET = click.option("--quiet", is_flag=True, help="Print nothing but errors.")


def settings_options(command: str) -> Callable[[Command], Command]:
    """MODEL, ``--input`` and the options of :class:`Settings` that ``command`` takes."""

    def decorate(function: Command) -> Command:
        return MODEL(INPUT(_with_options(function, command)))

    return decorate


def run_options(function: Command) -> Command:
    """The options of ``run`` but for those that say on what and where to."""
    return _with_options(function, "run", without="out")


def _with_options(function: Command, command: str, without: str = "") -> Command:
    defaults = Settings.__dataclass_fields__
    for name, its in reversed(options().items()):
        if command in its.commands and name != without:
            said = replace(its, help=its.help_of.get(command, its.help))
            # What another default takes the place of is not shown as one.
            shown = "Default" not in said.help and "default" not in said.help
            option = _click_option(name, said, defaults[name].default, shown=shown)
            function = option(function)
    return function


def _click_option(
    name: str, its: Option, default: Any, *, shown: bool
) -> Callable[[Command], Command]:
    """A field of the settings as click has it."""
    kind: Any = None
    if its.choices:
        kind = click.Choice(its.choices)
    elif its.kind is Path:
        kind = NamedPath()
    elif its.kind is int:
        kind = click.IntRange(min=None if its.least is None else int(its.least))
    elif its.kind is float:
        kind = click.FloatRange(min=its.least, max=its.most, min_open=its.above)
    if its.kind is bool:
        return click.option(its.flag, name, is_flag=True, default=default, help=its.help)
    return click.option(
        its.flag,
        name,
        type=kind,
        multiple=its.repeatable,
        default=str(default) if its.kind is Precision else default,
        show_default=shown and default not in (None, ()),
        help=f"{its.help} Repeatable." if its.repeatable else its.help,
        metavar=its.metavar,
    )


_OPTIONS = ("--input", "--holdout")


def in_todays_words(args: Sequence[str]) -> list[str]:
    """``args`` with today's options for those of older versions."""
    today, former = [], ""
    for arg in args:
        flag, equals, value = arg.partition("=")
        if former:
            today.append(FORMER[former][1](arg))
            former = ""
        elif flag in FORMER:
            name, translated = FORMER[flag]
            today.append(f"{name}={translated(value)}" if equals else name)
            former = "" if equals else flag
        else:
            today.append(arg)
    return today


class InputsCommand(click.Command):
    """Takes ``--input`` with one file, folder or pattern each time, and options' former names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, which only says that there are words too many.

        Raises:
            UsageError: click's, with what may have made them.
        """
        args = in_todays_words(args)
        told = [option for option in _OPTIONS if any(word.startswith(option) for word in args)]
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if type(error) is click.UsageError and told and "extra argument" in error.message:
                words = (
                    f"{error.message}. Each {' and each '.join(told)} is one file, folder or "
                    "pattern: put a pattern into quotes ('data/*.npz'), or the shell makes "
                    "several words of it"
                )
                raise click.UsageError(words, ctx) from error
            raise
