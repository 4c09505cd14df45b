"""How a run is stopped, watched and bounded in time."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

STOPPING = Event()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block, such as while libraries are imported.

    Raises:
        KeyboardInterrupt: Ctrl-C came inside the block.
    """
    # Interrupted during its import an extension may abort the process, as onnx's does.
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not is_main:  # a background job ignores it
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


def is_stop(error: BaseException) -> bool:
    """Whether the user ended the work."""
    # Ctrl-C inside a library's call may come out as another error, such as a lock's.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return STOPPING.is_set() or cause is not None


class StoppedError(KeyboardInterrupt):
    """The user ended the work; the message says what is there."""


class BudgetSpentError(Exception):
    """The budget of evaluations, builds or minutes is spent."""


STAGES = ("load", "baselines", "cause", "search", "validation")
"""The stages of a run, in their order."""


class Observer:
    """Receives what a run does, and ignores it; subclass it to show something."""

    def stage(self, name: str) -> None:
        """One of the five ``STAGES`` of a run begins; its steps follow."""

    def step(self, name: str) -> None:
        """A step of the pipeline begins."""

    def progress(self, done: int, expected: int, note: str) -> None:
        """A part of a step is done."""

    def best(self, pins: int) -> None:
        """A set of ``pins`` layers passed everything it was tried on until now."""

    def finding(self, message: str) -> None:
        """Something the user should know now."""


class TimeBudget:
    """The time that is left, counted from now on; without ``minutes`` it is unlimited.

    ``cut_short``: whether anything was left out for lack of time.
    """

    def __init__(self, minutes: float | None) -> None:
        self.cut_short = False
        self._began = time.monotonic()
        self._all_s = math.inf if minutes is None else 60.0 * minutes
        self._share = 0.75  # what the search may spend; the rest is for validation

    def keep(self, seconds: float) -> None:
        """Reserve ``seconds``, at most an eighth of the budget, for writing after the last test."""
        self._all_s -= min(seconds, 0.125 * self._all_s)

    @property
    def left_s(self) -> float:
        """Seconds until the search has to end, or after :meth:`search_ended` the run."""
        return self._share * self._all_s - (time.monotonic() - self._began)

    def search_ended(self) -> None:
        """Allow the whole budget to be spent from here on."""
        self._share = 1.0

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Inside, no more than ``share`` of what is left now may be spent."""
        all_s, left = self._all_s, self.left_s
        if math.isfinite(left):
            self._all_s -= (1.0 - share) * max(0.0, left) / self._share
        try:
            yield
        finally:
            self._all_s = all_s

    def child(self, share: float) -> TimeBudget:
        """A budget of ``share`` of what is left now, for work that ends by itself."""
        left = self.left_s
        return TimeBudget(None if math.isinf(left) else max(0.0, share * left) / 60.0)

    def check(self) -> None:
        """Check the clock.

        Raises:
            BudgetSpentError: no time is left.
        """
        if self.left_s <= 0.0:
            self.cut_short = True
            raise BudgetSpentError


class StagelessObserver(Observer):
    """Passes everything on but stages, for work that is a part of one."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner

    def step(self, name: str) -> None:
        self._inner.step(name)

    def progress(self, done: int, expected: int, note: str) -> None:
        self._inner.progress(done, expected, note)

    def best(self, pins: int) -> None:
        self._inner.best(pins)

    def finding(self, message: str) -> None:
        self._inner.finding(message)


class TimedObserver(StagelessObserver):
    """Passes everything on, and ends work at its next progress once the time is spent."""

    def __init__(self, inner: Observer, time_budget: TimeBudget) -> None:
        super().__init__(inner)
        self._time = time_budget

    def stage(self, name: str) -> None:
        self._inner.stage(name)

    def progress(self, done: int, expected: int, note: str) -> None:
        super().progress(done, expected, note)
        self._time.check()
