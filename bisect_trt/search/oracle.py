"""The probe callable with its memory: distinct probes in order, workers, the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Verdict


@dataclass(frozen=True)
class Probe:
    """One set of pins tried: its place in the order of probes (from 0), the pins, the verdict."""

    index: int
    pinned: frozenset[str]
    verdict: Verdict


@dataclass(frozen=True)
class PinSearch:
    """The result of a search.

    ``pinned`` is the best set seen to pass (all layers if none smaller did); ``feasible`` is false
    when pinning everything does not pass; ``certificate`` maps each pin to the probe that failed
    without it, all of them unless a budget ended the search (``complete`` is false then).
    ``rounds`` counts the rounds of parallel probes.
    """

    pinned: frozenset[str]
    feasible: bool
    complete: bool
    probes: tuple[Probe, ...] = ()
    certificate: Mapping[str, Probe] = field(default_factory=dict)
    rounds: int = 0


ProbeFunction = Callable[[frozenset[str]], Verdict]


class Oracle:
    """Owns the probe callable: remembers verdicts, and keeps the budget and the order."""

    def __init__(
        self, probe: ProbeFunction, workers: int = 1, max_probes: int | None = None
    ) -> None:
        self._probe = probe
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
        """The probe of ``wanted[0]``.

        Raises:
            BudgetSpentError: the next probe would be over the budget.
        """
        if wanted[0] not in self.known:
            self.run(wanted)
        return self.known[wanted[0]]

    def run(self, wanted: Sequence[frozenset[str]]) -> None:
        """One round: the first of ``wanted`` that are new, as many as there are workers.

        Raises:
            BudgetSpentError: no probe is left.
        """
        new = [w for w in dict.fromkeys(wanted) if w not in self.known][: self.workers]
        if not new:
            return
        if self._max is not None:
            if len(self.known) >= self._max:
                raise BudgetSpentError
            new = new[: self._max - len(self.known)]
        verdicts = (
            [self._probe(new[0])] if self._pool is None else list(self._pool.map(self._probe, new))
        )
        for pinned, verdict in zip(new, verdicts, strict=False):
            self.known[pinned] = Probe(len(self.known), pinned, Verdict(verdict))
        self.rounds += 1

    def close(self) -> None:
        """Let the workers end."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
