"""``find_pins``: a set of layers that must stay pinned, in few probes, each pin with the probe that
proves it.

The layers are unpinned in groups, least suspicious first; the belief sizes each group so that its
probe passes with probability near one half, which makes the probe worth nearly a whole bit. When a
group fails, the same rule bisects inside it to the first layer that must stay pinned. Verdicts that
are neither pass nor fail (build failed, crashed, timed out, unsure) count as "not seen to pass": a
pin is dropped only on a clear pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.search.one_minimal import one_minimal
from bisect_trt.search.oracle import Oracle, ProbeFunction
from bisect_trt.search.pool import Pool
from bisect_trt.search.position import Position
from bisect_trt.search.record import PinSearch, Probe

_SMALLEST_POOL = 8


def find_pins(
    layers: Sequence[str],
    probe: ProbeFunction,
    *,
    suspicion: Mapping[str, float] | None = None,
    workers: int = 1,
    max_probes: int | None = None,
) -> PinSearch:
    """Find a set of ``layers`` (ids in network order) that passes pinned and of which no single one
    can be left out.

    Deterministic for given verdicts. For an oracle that is not monotone the certificate still holds
    for the sets it was probed with; the caller verifies the final set directly.

    Args:
        layers: unique ids in network order.
        probe: takes the pinned set and returns a verdict, from ``workers`` threads.
        suspicion: by layer, in any unit, larger is more suspicious, absent is 0; it sets the order
            and the group sizes.
        workers: how many probes may run at a time.
        max_probes: the most distinct probes, the two baselines (no pins, all pins) included.

    Returns:
        The set, its proof, and every probe; ``complete`` is false where ``max_probes`` were spent.

    Raises:
        ValueError: two layers have one id.
    """
    if len(set(layers)) != len(layers):
        raise ValueError("layer ids must be unique")
    oracle = Oracle(probe, workers, max_probes)
    try:
        return _Search(layers, oracle, suspicion).run()
    finally:
        oracle.close()


class _Search:
    def __init__(
        self, layers: Sequence[str], oracle: Oracle, suspicion: Mapping[str, float] | None
    ) -> None:
        self._oracle = oracle
        self._everything = frozenset(layers)
        # Without a prior the network's own order is as good as any; sorted() is stable.
        self._order = (
            sorted(layers, key=lambda name: suspicion.get(name, 0.0)) if suspicion else list(layers)
        )
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
        # Each pool was judged with the others pinned; together they give up too much. What must
        # come back lies in the rest.
        rest = [name for name in self._order if name not in found]
        self._explore([Pool(rest, found, self._informed, together)])
        self._leave_out()

    def _leave_out(self) -> None:
        """What the pools proved they proved beside other layers than are left: leave out of the
        smallest set what can be.
        """
        ordered = [name for name in self._order if name in self._best]
        workers = self._oracle.workers

        def ask(pins: frozenset[str]) -> Probe:
            probe = self._oracle.ask([pins])
            if probe.verdict.passed:  # should the budget end
                self._best = pins
            return probe

        minimal = one_minimal(
            ordered,
            ask,
            lambda probe: probe.verdict.passed,
            ahead=self._oracle.run,
            workers=workers,
        )
        self._best, self._certificate = minimal.pinned, dict(minimal.proof)

    def _explore(self, pools: Sequence[Pool]) -> None:
        """Bring all ``pools`` to their ends, a round at a time."""
        while True:
            for pool in pools:
                while not pool.at.done and (asked := pool.pins(pool.at)) in self._oracle.known:
                    probe = self._oracle.known[asked]
                    if probe.verdict.passed and len(asked) <= len(self._best):
                        self._best = asked
                    pool.learn(probe)
            if all(pool.at.done for pool in pools):
                break
            self._oracle.run(self._likely_next(pools))
        for pool in pools:
            self._certificate.update(pool.certificate)

    def _likely_next(self, pools: Sequence[Pool]) -> list[frozenset[str]]:
        """Each pool's next probe, then the probes that would follow, the likeliest first: work for
        idle workers.
        """
        wanted: dict[frozenset[str], None] = {}
        queue: list[tuple[float, int, Pool, Position]] = []
        for number, pool in enumerate(pools):
            if not pool.at.done:
                queue.append((-1.0, number, pool, pool.at))
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
        proved = {
            name: self._certificate[name] for name in sorted(pinned) if name in self._certificate
        }
        return PinSearch(
            pinned, feasible, complete, self._oracle.probes, proved, self._oracle.rounds
        )
