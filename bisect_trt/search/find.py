"""``find_pins``: a set of layers that must stay pinned, in few probes, each pin with the probe that proves it.

The layers are unpinned in groups, least suspicious first; the belief sizes each group so that its probe passes with
probability near one half, which makes the probe worth nearly a whole bit. When a group fails, the same rule bisects inside
it to the first layer that must stay pinned. Verdicts that are neither pass nor fail (build failed, crashed, timed out,
unsure) count as "not seen to pass": a pin is dropped only on a clear pass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from bisect_trt.search.oracle import BudgetSpentError, Oracle, ProbeFunction
from bisect_trt.search.pool import Pool
from bisect_trt.search.record import PinSearch, Probe
from bisect_trt.search.shares import Shares, exchange, shares_prior
from bisect_trt.search.walk import Walk

_SMALLEST_POOL = 8
_CROWDED = 0.5
_MOST_GUILTY = 0.25
"""Groups are given up when more than this share of them is guilty: then they tell little."""

_MOST_SHARED_PINS, _MOST_CONTENDERS = 256, 512


def find_pins(
    layers: Sequence[str],
    probe: ProbeFunction,
    *,
    suspicion: Mapping[str, float] | None = None,
    workers: int = 1,
    max_probes: int | None = None,
    noise: float = 0.0,
    exchanges: int | None = None,
    groups: Sequence[Sequence[str]] = (),
) -> PinSearch:
    """Find a set of ``layers`` (ids in network order) that passes pinned and of which no single one can be left out.

    ``probe`` takes the pinned set and returns a verdict; with ``workers`` > 1 it is called from that many threads.
    ``suspicion`` (larger is more suspicious, absent is 0) sets the order and the group sizes. ``max_probes`` bounds the distinct
    probes, the two baselines (no pins, all pins) included. Deterministic for given verdicts. For an oracle that is not
    monotone the certificate still holds for the sets it was probed with; the caller verifies the final set directly.

    Where the pins turn out to share the blame (one of them alone can be given up), up to ``exchanges`` further probes look for a
    smaller set by exchanging pins; None stands for 160 and 16 a pin.

    ``groups`` are layers that probably share their fate, such as one operator of every block; each layer is in one at most, and
    the rest stand alone. The search then finds the guilty groups first and goes on among their layers, unless too many are guilty.

    ``noise`` is the share of verdicts that are expected to be flipped. Each set is then asked again until one side leads by
    :func:`lead_needed`; a set that stays undecided is ``Verdict.UNSURE``, which drops no pin. ``PinSearch.calls`` counts all calls.
    """
    grouped = [name for group in groups for name in group]
    if len(set(layers)) != len(layers) or len(set(grouped)) != len(grouped) or not set(grouped) <= set(layers):
        raise ValueError("layer ids must be unique, and groups disjoint sets of them")
    oracle = Oracle(probe, workers, max_probes, noise)
    try:
        return _Search(layers, oracle, suspicion, exchanges, groups).run()
    finally:
        oracle.close()


class _Search:
    def __init__(
        self,
        layers: Sequence[str],
        oracle: Oracle,
        suspicion: Mapping[str, float] | None,
        exchanges: int | None,
        groups: Sequence[Sequence[str]],
    ) -> None:
        self._oracle = oracle
        self._everything = frozenset(layers)
        self._groups = groups
        # Without a prior the network's own order is as good as any; sorted() is stable.
        self._order = sorted(layers, key=lambda name: suspicion.get(name, 0.0)) if suspicion else list(layers)
        self._informed = bool(suspicion)
        self._best = self._everything
        self._certificate: dict[str, Probe] = {}
        self._exchanges = exchanges
        self._shared = False

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
            if self._groups and (not self._informed or alike(self._order, self._groups)):
                self._narrow(unpinned)
            self._settle(unpinned)
            self._exchange()
        except BudgetSpentError:
            return self._result(self._best, feasible, False)
        return self._result(self._best, True, True)

    def _narrow(self, unpinned: Probe) -> None:
        """Find the guilty groups; only their layers are searched on. A group is as suspicious as its worst layer."""
        place = {name: i for i, name in enumerate(self._order)}
        grouped = {name for group in self._groups for name in group}
        units = [
            *(frozenset(group) for group in self._groups if group),
            *(frozenset({name}) for name in self._order if name not in grouped),
        ]
        units.sort(key=lambda unit: max(place[name] for name in unit))
        members = {str(i): unit for i, unit in enumerate(units)}
        pool = Pool(list(members), frozenset(), self._informed, unpinned, members)
        self._explore([pool], most=max(2, int(_MOST_GUILTY * len(units))))
        # Given up or not, what passed is known to: the rest of the layers need not be looked at again.
        self._everything = self._best
        self._order = [name for name in self._order if name in self._everything]

    def _settle(self, unpinned: Probe) -> None:
        count = max(1, min(self._oracle.workers, len(self._order) // _SMALLEST_POOL))
        if count == 1:
            self._explore([Pool(self._order, frozenset(), self._informed, unpinned)])
            return
        dealt = [self._order[i::count] for i in range(count)]
        pools = [Pool(o, self._everything.difference(o), self._informed, None) for o in dealt]
        self._explore(pools)
        found = frozenset().union(*(pool.culprits for pool in pools))
        together = self._oracle.ask([found])
        if together.verdict.passed:
            self._best = found
            return
        # Each pool was judged with the others pinned; together they give up too much. What must come back lies in the rest.
        rest = [name for name in self._order if name not in found]
        self._explore([Pool(rest, found, self._informed, together)])

    def _explore(self, pools: Sequence[Pool], most: float = math.inf) -> None:
        """Walk all ``pools`` to their ends, a round at a time, or until one has more than ``most`` culprits."""
        while all(len(pool.walk.culprits) <= most for pool in pools):
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
            self._certificate.update(pool.certificate if pool.of_layers else {})

    def _likely_next(self, pools: Sequence[Pool]) -> list[frozenset[str]]:
        """Each pool's next probe, then the probes that would follow, the likeliest first: work for idle workers."""
        wanted: dict[frozenset[str], None] = {}
        queue: list[tuple[float, int, Pool, Walk]] = []
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

    def _exchange(self) -> None:
        """Look for a smaller set if the blame is shared.

        Only pins that crowd the suspicious end of the order are worth the probe that tells: with culprits of their own they stand
        apart, and a limit that is reached keeps all that follows.
        """
        found = self._best
        position = {name: i for i, name in enumerate(self._order)}
        first = min((position[name] for name in found), default=0)
        if len(found) < 2 or len(found) < _CROWDED * (len(self._order) - first):
            return
        self._shared = self._oracle.ask([self._everything - {self._order[first]}]).verdict.passed
        budget = 160 + 16 * len(found) if self._exchanges is None else self._exchanges
        if not self._shared or not budget or len(found) > _MOST_SHARED_PINS:
            return
        others = [name for name in reversed(self._order) if name not in found]
        contenders = [*sorted(found), *others[: min(4 * len(found) + 64, _MOST_CONTENDERS - len(found))]]
        prior = shares_prior(self._order, informed=self._informed)
        mean, variance = (np.asarray([prior[name][i] for name in contenders]) for i in (0, 1))
        shares = Shares(contenders, (mean, variance), found)
        allowed = frozenset(contenders)
        for probe in self._oracle.probes:
            if probe.pinned <= allowed and not (probe.verdict.passed and found <= probe.pinned):
                shares.learn(shares.mask(probe.pinned), probe.verdict.passed)
        exchange(shares, found, self._passes, budget)
        if self._best is not found:
            self._prove()

    def _passes(self, pinned: frozenset[str]) -> bool:
        passed = self._oracle.ask([pinned]).verdict.passed
        if passed and len(pinned) < len(self._best):
            self._best = pinned
        return passed

    def _prove(self) -> None:
        """Every single removal from the best set, to a fixpoint: what passes is taken, what does not is the proof."""
        proved: dict[str, Probe] = {}
        while len(proved) < len(self._best):
            for name in sorted(self._best):
                rest = self._best - {name}
                if self._passes(rest):
                    proved = {}
                    break
                proved[name] = self._oracle.known[rest]
        self._certificate = proved

    def _result(self, pinned: frozenset[str], feasible: bool, complete: bool) -> PinSearch:
        proved = {name: self._certificate[name] for name in sorted(pinned) if name in self._certificate}
        return PinSearch(pinned, feasible, complete, self._oracle.probes, proved, self._oracle.rounds, self._oracle.calls, self._shared)


def alike(order: Sequence[str], groups: Sequence[Sequence[str]]) -> bool:
    """Whether the most suspicious layers, the end of ``order``, come from the same groups more often than chance would have it."""
    n = len(order)
    top = frozenset(order[-max(_SMALLEST_POOL, n // 20) :])
    pairs = sum(math.comb(len(top.intersection(group)), 2) for group in groups)
    expected = math.comb(len(top), 2) * sum(math.comb(len(group), 2) for group in groups) / max(1, math.comb(n, 2))
    return pairs >= max(3.0, 2.0 * expected)
