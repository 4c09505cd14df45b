"""The smallest part of a network that is still bad: outputs moved up, inputs moved down, nodes left
out, nodes bypassed.

"Bad" need not be monotone: an output in the middle breaks the very fusion that is wrong. So every
step stands on a piece that was itself seen to be bad, and the smallest of those is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Bypass, Subgraph
from bisect_trt.search.find import find_pins
from bisect_trt.search.minimise import one_minimal

Ask = Callable[[Subgraph], Verdict]
"""PASS means that the piece is still bad; anything else, that it was not seen to be. It may raise
:class:`BudgetSpentError`, which ends the search.
"""

WHOLE, PREFIX, SUFFIX, SET, EACH, BYPASS = (
    "the whole model",
    "outputs moved up",
    "inputs moved down",
    "nodes left out",
    "each node left out",
    "nodes bypassed",
)


@dataclass(frozen=True)
class SubgraphProbe:
    """One piece tried, in which step, and what was seen."""

    step: str
    subgraph: Subgraph
    verdict: Verdict


@dataclass(frozen=True)
class Reduction:
    """``subgraph`` is the smallest that was seen to be bad, None if not even the whole was.

    ``complete`` is true where no single node of it can be left out and none of the bypasses offered
    can be made; false where the budget ended the search, or the user (``interrupted``). ``probes``
    are the distinct ones in order.
    """

    subgraph: Subgraph | None
    complete: bool
    probes: tuple[SubgraphProbe, ...]
    interrupted: bool = False


def reduce(
    nodes: Sequence[str],
    ask: Ask,
    bypasses: Callable[[Subgraph], Sequence[Bypass]] = lambda _: (),
) -> Reduction:
    """The smallest piece of ``nodes`` that can be seen to be bad."""
    search = _Search(nodes, ask)
    complete = interrupted = False
    try:
        complete = search.run(bypasses)
    except BudgetSpentError:
        pass
    except KeyboardInterrupt:
        interrupted = True
    return Reduction(search.best, complete, tuple(search.probes), interrupted)


class _Search:
    def __init__(self, nodes: Sequence[str], ask: Ask) -> None:
        self._nodes = list(nodes)
        self._ask = ask
        self._known: dict[Subgraph, Verdict] = {}
        self._step = WHOLE
        self.best: Subgraph | None = None
        self.probes: list[SubgraphProbe] = []

    def run(self, bypasses: Callable[[Subgraph], Sequence[Bypass]]) -> bool:
        """Every step in turn; false where the whole is not bad."""
        nodes = self._nodes
        if not self._bad(nodes):
            return False
        self._step = PREFIX
        nodes = nodes[: _fewest(len(nodes), lambda n: self._bad(nodes[:n]))]
        self._step = SUFFIX
        nodes = nodes[-_fewest(len(nodes), lambda n: self._bad(nodes[-n:])) :]
        self._step = SET
        if len(nodes) > 1:
            find_pins(nodes, lambda kept: self._verdict(Subgraph(kept)))
        while True:
            subgraph = self._without_each()
            if not self._bypassed(subgraph, bypasses):
                return True

    def _without_each(self) -> Subgraph:
        """The best piece, less every node that it is bad without."""
        assert self.best is not None
        self._step, before = EACH, self.best
        ordered = [n for n in self._nodes if n in before.kept]
        found = one_minimal(
            ordered,
            lambda kept: self._verdict(Subgraph(kept, before.bypassed)),
            lambda verdict: verdict.passed,
        )
        return Subgraph(found.pinned, before.bypassed)

    def _bypassed(
        self, subgraph: Subgraph, bypasses: Callable[[Subgraph], Sequence[Bypass]]
    ) -> bool:
        """Whether some bypass leaves it bad: the best piece is then smaller."""
        self._step = BYPASS
        return any(self._verdict(subgraph.without(bypass)).passed for bypass in bypasses(subgraph))

    def _bad(self, kept: Sequence[str]) -> bool:
        return self._verdict(Subgraph(frozenset(kept))).passed

    def _verdict(self, subgraph: Subgraph) -> Verdict:
        if not subgraph.kept:
            return Verdict.FAIL  # nothing is no bad model
        if subgraph not in self._known:
            verdict = self._known[subgraph] = Verdict(self._ask(subgraph))
            self.probes.append(SubgraphProbe(self._step, subgraph, verdict))
            if verdict.passed and (self.best is None or len(subgraph.kept) < len(self.best.kept)):
                self.best = subgraph
        return self._known[subgraph]


def _fewest(length: int, bad: Callable[[int], bool]) -> int:
    """A number for which ``bad`` was seen to hold, by bisection below ``length``, for which it
    does.
    """
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bad(middle) else (middle, high)
    return high
