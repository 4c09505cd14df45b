"""How a run is stopped, watched and bounded in time."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

STOPPING = Event()


def is_stop(error: BaseException) -> bool:
    """Whether the user ended the work: Ctrl-C in the middle of a library's call may come out of it
    as another error, of a lock that it held say.
    """
    if STOPPING.is_set() or isinstance(error, KeyboardInterrupt):
        return True
    # Not what the caller was handling already: a run may be started where Ctrl-C is answered.
    ours = _frames(error)
    seen, known = error.__cause__ or _context(error), set[int]()
    while seen is not None and id(seen) not in known:
        known.add(id(seen))
        if isinstance(seen, KeyboardInterrupt) and _frames(seen) & ours:
            return True
        seen = seen.__cause__ or _context(seen)
    return False


def _frames(error: BaseException) -> set[int]:
    """Those that ``error`` passed through until now."""
    return {id(frame) for frame, _ in traceback.walk_tb(error.__traceback__)}


def _context(error: BaseException) -> BaseException | None:
    return None if error.__suppress_context__ else error.__context__


class StoppedError(KeyboardInterrupt):
    """The user ended the work, and its message says what there is for it."""


class BudgetSpentError(Exception):
    """Nothing further may be tried: so many evaluations, builds or minutes were spent."""


class Observer:
    """Hears what a run does; this one ignores it all. Subclass what you want to show."""

    def step(self, name: str) -> None:
        """A step of the pipeline begins."""

    def progress(self, done: int, expected: int, note: str) -> None:
        """Work inside a step."""

    def best(self, pins: int) -> None:
        """A set of so many pins passed whatever it was tried on until now."""

    def finding(self, message: str) -> None:
        """Something the user should know now."""


_SEARCH, _MOST_KEPT = 0.75, 0.125


class TimeBudget:
    """The time that is left, counted from now on; without ``minutes`` there always is some.

    ``endings`` counts how often something was left out for want of time.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self.endings = 0
        self._began = time.monotonic()
        self._all_s = math.inf if minutes is None else 60.0 * minutes
        self._share = _SEARCH

    def keep(self, seconds: float) -> None:
        """Leave so many for what comes behind the run's last test, which no clock ends; an eighth
        of all at most.
        """
        self._all_s -= min(seconds, _MOST_KEPT * self._all_s)

    @property
    def cut_short(self) -> bool:
        """Whether anything was."""
        return self.endings > 0

    @property
    def left_s(self) -> float:
        """Seconds until the search has to end, or after :meth:`search_ended` the run."""
        return self._share * self._all_s - (time.monotonic() - self._began)

    def search_ended(self) -> None:
        """What was kept for proofs and tests may be spent from here on."""
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

    def check(self) -> None:
        """Look at the clock.

        Raises:
            BudgetSpentError: no time is left, or none of the part of it that is spent.
        """
        if self.left_s <= 0.0:
            self.endings += 1
            raise BudgetSpentError


class TimedObserver(Observer):
    """Passes on what it hears, and ends work whose time is spent: whatever takes long tells of its
    progress.
    """

    def __init__(self, inner: Observer, time_budget: TimeBudget) -> None:
        self._inner = inner
        self._time = time_budget

    def step(self, name: str) -> None:
        self._inner.step(name)

    def progress(self, done: int, expected: int, note: str) -> None:
        self._inner.progress(done, expected, note)
        self._time.check()

    def best(self, pins: int) -> None:
        self._inner.best(pins)

    def finding(self, message: str) -> None:
        self._inner.finding(message)
