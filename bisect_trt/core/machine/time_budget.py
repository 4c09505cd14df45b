"""The minutes that a run may take (``--budget``): the search has three quarters of them, and what
it holds in hand then is proved and tested in the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.observer import Observer

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

    def station(self, name: str) -> None:
        self._inner.station(name)

    def progress(self, done: int, expected: int, note: str) -> None:
        self._inner.progress(done, expected, note)
        self._time.check()

    def best(self, pins: int) -> None:
        self._inner.best(pins)

    def finding(self, message: str) -> None:
        self._inner.finding(message)
