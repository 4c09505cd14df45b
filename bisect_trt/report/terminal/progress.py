"""What a person sees while it runs: on a terminal a line that changes, in a log one every few
seconds.
"""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Event, Thread
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bisect_trt.core.machine.memory import in_words, peak_bytes
from bisect_trt.core.names import counted, printable
from bisect_trt.core.observer import Observer
from bisect_trt.report.terminal.consoles import signs_of_life

_UNITS = {"load": "input"}
"""What a station counts where nobody knows how many there will be; others count probes."""

EVERY_S = 5.0
"""Between two lines in a log: few enough to keep, often enough to know that it lives."""


def progress(
    *, quiet: bool = False, verbose: bool = False, budget: float | None = None, subject: str = ""
) -> ProgressObserver:
    """Signs of life on standard error, also where JSON goes to standard output.

    Args:
        quiet: say nothing.
        verbose: tell every step.
        budget: minutes that the command may take, if that was said.
        subject: which of several things the lines are about, if there are several.
    """
    console = signs_of_life()
    return ProgressObserver(
        console, quiet=quiet, verbose=verbose, every_s=EVERY_S, budget=budget, subject=subject
    )


class ProgressObserver(Observer):
    """Draws a line for the station in work; with ``verbose`` every step is a line of its own.

    Where there is no terminal, a line is written every ``every_s`` seconds, whether or not anything
    was heard meanwhile: the time, the memory, the station with what it did last and what is left of
    it, the best plan so far, what is left of the budget. With ``verbose`` it is written only where
    no step was told for so long.

    Args:
        console: where to.
        quiet: say nothing.
        verbose: tell every step.
        every_s: seconds between two lines in a log.
        budget: minutes that the command may take, if that was said.
        subject: which of several things the lines are about, if there are several.
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool,
        verbose: bool = False,
        every_s: float = EVERY_S,
        budget: float | None = None,
        subject: str = "",
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._verbose = verbose
        self._every_s = every_s
        self._budget = budget
        self._subject = f"{subject}: " if subject else ""
        self._station, self._started = "starting", time.perf_counter()
        self._done = self._note = ""
        self._left: tuple[float | None, float] = None, self._started
        self._first: tuple[int, float] | None = None
        self._last, self._counted = (0, 0), self._started
        self._best: int | None = None
        self._told = self._started
        self._ended = Event()
        self._log: Thread | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(f"{self._subject}starting", total=None, note="")
        self._began = time.perf_counter()

    def __enter__(self) -> ProgressObserver:
        self._bar.start()
        if not (self._quiet or self._console.is_terminal):
            self._log = Thread(target=self._write_lines, daemon=True)
            self._log.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._ended.set()
        if self._log is not None:
            self._log.join(self._every_s)

    def station(self, name: str) -> None:
        self._began = self._counted = time.perf_counter()
        self._first, self._left = None, (None, self._began)
        self._station, self._done = name, ""
        self._bar.reset(self._task, total=None, description=f"{self._subject}{name}", note="")

    def progress(self, done: int, expected: int, note: str) -> None:
        self._left = self._seconds_left(done, expected), time.perf_counter()
        of = f"{done} of {expected}" if expected else f"{_UNITS.get(self._station, 'probe')} {done}"
        self._done, self._note = of, note
        left = self._left_in_words()
        self._bar.update(
            self._task,
            total=expected or None,
            completed=done,
            note=printable(f"{of}{left}: {note}"[:90]),
        )
        if self._verbose and not self._quiet:
            self._told = time.perf_counter()
            self._console.print(printable(f"{self._subject}{of}: {note}"))

    def _seconds_left(self, done: int, expected: int) -> float | None:
        """By the pace since the first that was done; what came before it was something else. None
        where nothing tells.
        """
        now, last = time.perf_counter(), self._last
        self._last = done, expected
        if self._first is None or done <= last[0] or expected != last[1]:
            if self._first is not None:  # a count of something else begins where the last ended
                self._began = self._counted
            self._first = done, now
        self._counted = now
        first, since = self._first
        if not expected or not done:
            return None
        each = (now - since) / (done - first) if done > first else (now - self._began) / done
        return each * max(expected - done, 0)

    def _left_in_words(self) -> str:
        """What is left by now; nothing once that has passed."""
        left, heard = self._left  # another thread may be told more meanwhile
        if left is None or (left := left - (time.perf_counter() - heard)) < 0.0:
            return ""
        return f", about {left:.0f} s left"

    def best(self, pins: int) -> None:
        self._best = pins

    def finding(self, message: str) -> None:
        if self._verbose and not self._quiet:
            self._console.print(printable(f"{self._subject}note: {message}"), style="yellow")

    def _write_lines(self) -> None:
        """In a thread of its own: a station may be silent for long."""
        while not self._ended.wait(self._every_s):
            if self._verbose and time.perf_counter() - self._told < self._every_s:
                continue
            line = printable(self._line(time.perf_counter() - self._started))
            # Not by the console: where the reader went away it would close standard output too.
            with suppress(OSError, ValueError):
                self._console.file.write(f"{line}\n")
                self._console.file.flush()

    def _line(self, elapsed: float) -> str:
        """What is going on, ``elapsed`` seconds from the start."""
        parts = [self._station]
        if self._done:
            parts = [f"{self._station}, {self._done}{self._left_in_words()}: {self._note}"]
        if self._best is not None:
            parts.append(f"best so far: {counted(self._best, 'pin')}")
        if self._budget is not None:
            left = max(0.0, 60.0 * self._budget - elapsed)
            parts.append(f"{left:.0f} s of the budget left")
        return (
            f"[{elapsed:.0f} s, {in_words(peak_bytes())} at most] {self._subject}{'; '.join(parts)}"
        )
