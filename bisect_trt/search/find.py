"""``find_pins``: a set of layers that must stay pinned, in few probes, each pin with the probe that proves it.

The layers are unpinned in groups, least suspicious first; the belief sizes each group so that its probe passes with
probability near one half, which makes the probe worth nearly a whole bit. When a group fails, the same rule bisects inside
it to the first layer that must stay pinned. Verdicts that are neither pass nor fail (build failed, crashed, timed out,
unsure) count as "not seen to pass": a pin is dropped only on a clear pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bisect_trt.search.belief import Belief, make_hypotheses
from bisect_trt.search.record import PinSearch, Probe
from bisect_trt.search.walk import Walk
from bisect_trt.verdict import Verdict

ProbeFunction = Callable[[frozenset[str]], Verdict]


class BudgetSpentError(Exception):
    """``max_probes`` distinct probes have been made."""


class Oracle:
    """Owns the probe callable: remembers verdicts, counts distinct probes, keeps the budget and the order."""

    def __init__(self, probe: ProbeFunction, workers: int = 1, max_probes: int | None = None) -> None:
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
        """The probe of ``wanted[0]``; the rest are guesses at what will be asked next, run beside it by idle workers.

        Raises :class:`BudgetSpentError` before the first probe over the budget.
        """
        first = wanted[0]
        if first not in self.known:
            new = [w for w in dict.fromkeys(wanted) if w not in self.known][: self.workers]
            if self._max is not None:
                if len(self.known) >= self._max:
                    raise BudgetSpentError
                new = new[: self._max - len(self.known)]
            verdicts = [self._probe(new[0])] if self._pool is None else list(self._pool.map(self._probe, new))
            for pinned, verdict in zip(new, verdicts, strict=False):
                self.known[pinned] = Probe(len(self.known), pinned, Verdict(verdict))
            self.rounds += 1
        return self.known[first]

    def close(self) -> None:
        """Let the workers end."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def find_pins(
    layers: Sequence[str],
    probe: ProbeFunction,
    *,
    suspicion: Mapping[str, float] | None = None,
    workers: int = 1,
    max_probes: int | None = None,
) -> PinSearch:
    """Find a set of ``layers`` (ids in network order) that passes pinned and of which no single one can be left out.

    ``probe`` takes the pinned set and returns a verdict; with ``workers`` > 1 it is called from that many threads.
    ``suspicion`` (larger is more suspicious, absent is 0) sets the order and the group sizes. ``max_probes`` bounds the distinct
    probes, the two baselines (no pins, all pins) included. Deterministic for given verdicts. For an oracle that is not
    monotone the certificate still holds for the sets it was probed with; the caller verifies the final set directly.
    """
    if len(set(layers)) != len(layers):
        raise ValueError("layer ids must be unique")
    oracle = Oracle(probe, workers, max_probes)
    try:
        return _Search(layers, oracle, suspicion).run()
    finally:
        oracle.close()


class _Search:
    def __init__(self, layers: Sequence[str], oracle: Oracle, suspicion: Mapping[str, float] | None) -> None:
        self._oracle = oracle
        self._everything = frozenset(layers)
        # Without a prior the network's own order is as good as any; sorted() is stable.
        self._order = sorted(layers, key=lambda name: suspicion.get(name, 0.0)) if suspicion else list(layers)
        self._informed = bool(suspicion)
        self._best = self._everything
        self._certificate: dict[str, Probe] = {}

    def run(self) -> PinSearch:
        feasible = False
        try:
            nothing, everything = frozenset[str](), self._everything
            unpinned = self._oracle.ask([nothing, everything])
            if unpinned.verdict.passed:
                feasible, self._best = True, nothing
            passes_pinned = self._oracle.ask([everything]).verdict.passed
            if unpinned.verdict.passed:
                return self._result(nothing, True, True)
            feasible = passes_pinned
            if not feasible:
                return self._result(everything, False, True)
            self._walk(unpinned)
        except BudgetSpentError:
            return self._result(self._best, feasible, False)
        return self._result(self._best, True, True)

    def _walk(self, unpinned: Probe) -> None:
        n = len(self._order)
        walk = Walk(Belief.start(make_hypotheses(n, informed=self._informed)), fails_at=n)
        failed_with: dict[int, Probe] = {n: unpinned}
        if n == 1:
            self._certificate[self._order[0]] = unpinned
            return
        while not walk.done:
            end = walk.next_end
            probe = self._oracle.ask(self._likely_next(walk))
            if probe.verdict.passed:
                self._best = probe.pinned
            else:
                failed_with[end] = probe
            before, walk = len(walk.culprits), walk.after(end, probe.verdict.passed)
            if len(walk.culprits) > before:
                found = walk.culprits[-1]
                self._certificate[self._order[found]] = failed_with[found + 1]
                failed_with.clear()

    def _pins(self, walk: Walk, end: int) -> frozenset[str]:
        return frozenset(self._order[end:]).union(self._order[c] for c in walk.culprits)

    def _likely_next(self, walk: Walk) -> list[frozenset[str]]:
        """The next probe, then the probes that would follow it, the likeliest first: work for idle workers."""
        wanted: list[frozenset[str]] = []
        queue: list[tuple[float, int, Walk]] = [(-1.0, 0, walk)]
        pushed = 0
        while queue and len(wanted) < self._oracle.workers:
            probability, _, state = heapq.heappop(queue)
            end = state.next_end
            wanted.append(self._pins(state, end))
            chance = state.pass_probability(end)
            for passed, share in ((True, chance), (False, 1.0 - chance)):
                following = state.after(end, passed)
                if not following.done:
                    pushed += 1
                    heapq.heappush(queue, (probability * share, pushed, following))
        return wanted

    def _result(self, pinned: frozenset[str], feasible: bool, complete: bool) -> PinSearch:
        proved = {name: self._certificate[name] for name in sorted(pinned) if name in self._certificate}
        return PinSearch(pinned, feasible, complete, self._oracle.probes, proved, self._oracle.rounds)
