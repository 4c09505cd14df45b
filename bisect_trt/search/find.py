"""``find_pins``: a set of layers that must stay pinned, in few probes, each pin with the probe that proves it.

The layers are unpinned in groups, least suspicious first; the belief sizes each group so that its probe passes with
probability near one half, which makes the probe worth nearly a whole bit. When a group fails, the same rule bisects inside
it to the first layer that must stay pinned. Verdicts that are neither pass nor fail (build failed, crashed, timed out,
unsure) count as "not seen to pass": a pin is dropped only on a clear pass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bisect_trt.search.belief import Belief, make_hypotheses
from bisect_trt.search.record import PinSearch, Probe
from bisect_trt.search.walk import Walk
from bisect_trt.verdict import Verdict

_SMALLEST_POOL = 8
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


def find_pins(
    layers: Sequence[str],
    probe: ProbeFunction,
    *,
    suspicion: Mapping[str, float] | None = None,
    workers: int = 1,
    max_probes: int | None = None,
    noise: float = 0.0,
) -> PinSearch:
    """Find a set of ``layers`` (ids in network order) that passes pinned and of which no single one can be left out.

    ``probe`` takes the pinned set and returns a verdict; with ``workers`` > 1 it is called from that many threads.
    ``suspicion`` (larger is more suspicious, absent is 0) sets the order and the group sizes. ``max_probes`` bounds the distinct
    probes, the two baselines (no pins, all pins) included. Deterministic for given verdicts. For an oracle that is not
    monotone the certificate still holds for the sets it was probed with; the caller verifies the final set directly.

    ``noise`` is the share of verdicts that are expected to be flipped. Each set is then asked again until one side leads by
    :func:`lead_needed`; a set that stays undecided is ``Verdict.UNSURE``, which drops no pin. ``PinSearch.calls`` counts all calls.
    """
    if len(set(layers)) != len(layers):
        raise ValueError("layer ids must be unique")
    oracle = Oracle(probe, workers, max_probes, noise)
    try:
        return _Search(layers, oracle, suspicion).run()
    finally:
        oracle.close()


class _Pool:
    """A walk over the layers of ``order``, with ``pinned`` pinned throughout; ``unpinned`` is the probe that gave all of them up."""

    def __init__(self, order: Sequence[str], pinned: frozenset[str], informed: bool, unpinned: Probe | None) -> None:
        n = len(order)
        self.order = order
        self.pinned = pinned
        self.walk = Walk(Belief.start(make_hypotheses(n, informed=informed)), fails_at=None if unpinned is None else n)
        if unpinned is not None and n == 1:
            self.walk = self.walk.after(n, passed=False)
        self.certificate: dict[str, Probe] = {} if unpinned is None or n > 1 else {order[0]: unpinned}
        self._failed_with: dict[int, Probe] = {} if unpinned is None else {n: unpinned}

    @property
    def culprits(self) -> frozenset[str]:
        """What was found so far."""
        return frozenset(self.order[c] for c in self.walk.culprits)

    def pins(self, walk: Walk) -> frozenset[str]:
        """The set that ``walk`` asks for next."""
        return self.pinned.union(self.order[walk.next_end :], (self.order[c] for c in walk.culprits))

    def learn(self, probe: Probe) -> None:
        """Move on by the answer to the set asked for."""
        end = self.walk.next_end
        if not probe.verdict.passed:
            self._failed_with[end] = probe
        before, self.walk = len(self.walk.culprits), self.walk.after(end, probe.verdict.passed)
        if len(self.walk.culprits) > before:
            found = self.walk.culprits[-1]
            self.certificate[self.order[found]] = self._failed_with[found + 1]
            self._failed_with.clear()


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
            self._settle(unpinned)
        except BudgetSpentError:
            return self._result(self._best, feasible, False)
        return self._result(self._best, True, True)

    def _settle(self, unpinned: Probe) -> None:
        count = max(1, min(self._oracle.workers, len(self._order) // _SMALLEST_POOL))
        if count == 1:
            self._explore([_Pool(self._order, frozenset(), self._informed, unpinned)])
            return
        dealt = [self._order[i::count] for i in range(count)]
        pools = [_Pool(o, self._everything.difference(o), self._informed, None) for o in dealt]
        self._explore(pools)
        found = frozenset().union(*(pool.culprits for pool in pools))
        together = self._oracle.ask([found])
        if together.verdict.passed:
            self._best = found
            return
        # Each pool was judged with the others pinned; together they give up too much. What must come back lies in the rest.
        rest = [name for name in self._order if name not in found]
        self._explore([_Pool(rest, found, self._informed, together)])

    def _explore(self, pools: Sequence[_Pool]) -> None:
        """Walk all ``pools`` to their ends, a round at a time."""
        while True:
            for pool in pools:
                while not pool.walk.done and (asked := pool.pins(pool.walk)) in self._oracle.known:
                    probe = self._oracle.known[asked]
                    if probe.verdict.passed and len(asked) <= len(self._best):
                        self._best = asked
                    pool.learn(probe)
            if all(pool.walk.done for pool in pools):
                break
            self._oracle.run(self._likely_next(pools))
        for pool in pools:
            self._certificate.update(pool.certificate)

    def _likely_next(self, pools: Sequence[_Pool]) -> list[frozenset[str]]:
        """Each pool's next probe, then the probes that would follow, the likeliest first: work for idle workers."""
        wanted: dict[frozenset[str], None] = {}
        queue: list[tuple[float, int, _Pool, Walk]] = []
        for number, pool in enumerate(pools):
            if not pool.walk.done:
                queue.append((-1.0, number, pool, pool.walk))
        pushed = len(pools)
        while queue and len(wanted) < self._oracle.workers:
            probability, _, pool, state = heapq.heappop(queue)
            wanted.setdefault(pool.pins(state))
            if self._oracle.workers == 1:
                break
            chance = state.pass_probability(state.next_end)
            for passed, share in ((True, chance), (False, 1.0 - chance)):
                following = state.after(state.next_end, passed)
                if not following.done:
                    pushed += 1
                    heapq.heappush(queue, (probability * share, pushed, pool, following))
        return list(wanted)

    def _result(self, pinned: frozenset[str], feasible: bool, complete: bool) -> PinSearch:
        proved = {name: self._certificate[name] for name in sorted(pinned) if name in self._certificate}
        return PinSearch(pinned, feasible, complete, self._oracle.probes, proved, self._oracle.rounds, self._oracle.calls)
