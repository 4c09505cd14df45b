"""The evaluations of a search: each set once, in order, on workers, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Verdict


@dataclass(frozen=True)
class Probe:
    """One evaluation: its number (from 0), the pinned set, the outcome."""

    index: int
    pinned: frozenset[str]
    verdict: Verdict


@dataclass(frozen=True)
class PinSearch:
    """The result of a search.

    ``pinned``: the smallest set that passed, or all layers.
    ``feasible``: pinning everything passes.
    ``complete``: the budget did not end the search.
    ``probes``: the evaluations in order. ``rounds``: the rounds of parallel ones.
    ``certificate``: by pin, the evaluation that failed without it; of every pin if ``complete``.
    """

    pinned: frozenset[str]
    feasible: bool
    complete: bool
    probes: tuple[Probe, ...] = ()
    certificate: Mapping[str, Probe] = field(default_factory=dict)
    rounds: int = 0


ProbeFunction = Callable[[frozenset[str]], Verdict]


class Oracle:
    """Evaluates sets, each once, and keeps the budget and the order."""

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
        """The evaluations in order."""
        return tuple(self.known.values())

    def ask(self, wanted: Sequence[frozenset[str]]) -> Probe:
        """The evaluation of ``wanted[0]``; the others may be evaluated beside it.

        Raises:
            BudgetSpentError: no evaluation is left.
        """
        if wanted[0] not in self.known:
            self.run(wanted)
        return self.known[wanted[0]]

    def run(self, wanted: Sequence[frozenset[str]]) -> None:
        """Evaluate the first new ones of ``wanted``, one for each worker.

        Raises:
            BudgetSpentError: no evaluation is left.
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
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
