"""The smallest part of a network that is still bad.

"Bad" need not be monotone: an output in the middle may break the very fusion that is wrong. So
every step starts from a subgraph that was found to be bad, and the smallest of those is returned.
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
"""Gives PASS for a subgraph that is still bad; may raise BudgetSpentError to end the search."""

FindBypasses = Callable[[Subgraph], Sequence[Bypass]]
"""The bypasses that can be made in a subgraph."""


@dataclass(frozen=True)
class SubgraphEvaluation:
    """The ``verdict`` on one subgraph, and the ``step`` that tried it."""

    step: str
    subgraph: Subgraph
    verdict: Verdict


@dataclass(frozen=True)
class Reduction:
    """The smallest bad ``subgraph``; None if the whole is not bad.

    ``complete``: no node can be left out or bypassed. ``interrupted``: the user ended the search.
    ``evaluations``: each subgraph tried, in order.
    """

    subgraph: Subgraph | None
    complete: bool
    evaluations: tuple[SubgraphEvaluation, ...]
    interrupted: bool = False


def reduce(nodes: Sequence[str], ask: Ask, bypasses: FindBypasses = lambda _: ()) -> Reduction:
    """The smallest subgraph of ``nodes`` that is found to be bad."""
    search = _Search(nodes, ask)
    complete = interrupted = False
    try:
        complete = search.run(bypasses)
    except BudgetSpentError:
        pass
    except KeyboardInterrupt:
        interrupted = True
    return Reduction(search.best, complete, tuple(search.evaluations), interrupted)


class _Search:
    def __init__(self, nodes: Sequence[str], ask: Ask) -> None:
        self._nodes = list(nodes)
        self._ask = ask
        self._known: dict[Subgraph, Verdict] = {}
        self._step = "the whole model"
        self.best: Subgraph | None = None
        self.evaluations: list[SubgraphEvaluation] = []

    def run(self, bypasses: FindBypasses) -> bool:
        """Run every step; False if the whole is not bad."""
        nodes = self._nodes
        if not self._bad(nodes):
            return False
        self._step = "outputs moved up"
        nodes = nodes[: _fewest(len(nodes), lambda n: self._bad(nodes[:n]))]
        self._step = "inputs moved down"
        nodes = nodes[-_fewest(len(nodes), lambda n: self._bad(nodes[-n:])) :]
        self._step = "nodes left out"
        if len(nodes) > 1:
            find_pins(nodes, lambda kept: self._verdict(Subgraph(kept)))
        while True:
            self._step = "each node left out"
            subgraph = self._without_each()
            self._step = "nodes bypassed"
            if not any(self._verdict(subgraph.without(b)).passed for b in bypasses(subgraph)):
                return True

    def _without_each(self) -> Subgraph:
        """The best subgraph without the nodes that it is still bad without."""
        before = self.best
        assert before is not None
        found = one_minimal(
            [n for n in self._nodes if n in before.kept],
            lambda kept: self._verdict(Subgraph(kept, before.bypassed)),
            lambda verdict: verdict.passed,
        )
        return Subgraph(found.pinned, before.bypassed)

    def _bad(self, kept: Sequence[str]) -> bool:
        return self._verdict(Subgraph(frozenset(kept))).passed

    def _verdict(self, subgraph: Subgraph) -> Verdict:
        if not subgraph.kept:
            return Verdict.FAIL  # an empty model is not bad
        if subgraph not in self._known:
            verdict = self._known[subgraph] = Verdict(self._ask(subgraph))
            self.evaluations.append(SubgraphEvaluation(self._step, subgraph, verdict))
            if verdict.passed and (self.best is None or len(subgraph.kept) < len(self.best.kept)):
                self.best = subgraph
        return self._known[subgraph]


def _fewest(length: int, bad: Callable[[int], bool]) -> int:
    """The smallest bad number by bisection, given that ``length`` is bad."""
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bad(middle) else (middle, high)
    return high
