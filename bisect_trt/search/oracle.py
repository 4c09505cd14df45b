"""The probe callable with its memory: distinct probes in order, votes where verdicts are noisy, workers, the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bisect_trt.search.record import Probe
from bisect_trt.verdict import Verdict

_WRONG, _MOST_VOTES = 2e-4, 4

ProbeFunction = Callable[[frozenset[str]], Verdict]


class BudgetSpentError(Exception):
    """``max_probes`` distinct probes have been made."""


class Oracle:
    """Owns the probe callable: remembers verdicts, counts distinct probes, keeps the budget and the order."""

    def __init__(self, probe: ProbeFunction, workers: int = 1, max_probes: int | None = None, noise: float = 0.0) -> None:
        self._probe = probe
        self._margin = lead_needed(noise)
        self.calls = 0
        self.workers = max(1, workers)
        self._max = max_probes
        self._pool = ThreadPoolExecutor(self.workers) if self.workers > 1 else None
        self.known: dict[frozenset[str], Probe] = {}
        self.rounds = 0

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The distinct probes in the order they were made."""
        return tuple(self.known.values())

    def ask(self, wanted: Sequence[frozenset[str]]) -> Probe:
        """The probe of ``wanted[0]``; the rest are guesses at what will be asked next, run beside it by idle workers.

        Raises :class:`BudgetSpentError` before the first probe over the budget.
        """
        if wanted[0] not in self.known:
            self.run(wanted)
        return self.known[wanted[0]]

    def run(self, wanted: Sequence[frozenset[str]]) -> None:
        """One round: the first of ``wanted`` that are new, as many as there are workers."""
        new = [w for w in dict.fromkeys(wanted) if w not in self.known][: self.workers]
        if self._max is not None:
            if len(self.known) >= self._max:
                raise BudgetSpentError
            new = new[: self._max - len(self.known)]
        decided = [self._decide(new[0])] if self._pool is None else list(self._pool.map(self._decide, new))
        for pinned, (verdict, calls) in zip(new, decided, strict=False):
            self.known[pinned] = Probe(len(self.known), pinned, verdict)
            self.calls += calls
        self.rounds += 1

    def _decide(self, pinned: frozenset[str]) -> tuple[Verdict, int]:
        """The verdict on ``pinned`` and the calls it took: asked again until pass or not-pass leads by the margin."""
        lead, calls, last = 0, 0, Verdict.UNSURE
        while abs(lead) < self._margin:
            if calls >= _MOST_VOTES * self._margin:
                return Verdict.UNSURE, calls
            verdict = Verdict(self._probe(pinned))
            calls += 1
            lead += 1 if verdict.passed else -1
            last = last if verdict.passed else verdict
        return (Verdict.PASS if lead > 0 else last), calls

    def close(self) -> None:
        """Let the workers end."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def lead_needed(noise: float) -> int:
    """By how many votes one side must lead, where a verdict is wrong with probability ``noise`` below one half.

    A lead of m is wrong with odds (noise / (1 - noise))**m (Wald's sequential test); one in 5,000 is asked for, so that a search
    of tens of probes is right.
    """
    if not 0.0 <= noise < 0.5:
        raise ValueError("noise is a probability below one half")
    return 1 if noise == 0.0 else max(1, math.ceil(math.log(_WRONG) / math.log(noise / (1.0 - noise))))
