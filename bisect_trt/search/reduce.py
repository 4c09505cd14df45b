"""The smallest part of a network that is still bad.

"Bad" need not be monotone: an output in the middle may break the very fusion that is wrong. So
every step starts from a subgraph that was found to be bad, and the smallest of those is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.search.find import find_pins
from bisect_trt.search.minimise import one_minimal

Nodes = frozenset[str]

Ask = Callable[[Nodes], Verdict]
"""Gives PASS for a subgraph that is still bad; may raise BudgetSpentError to end the search."""


@dataclass(frozen=True)
class SubgraphEvaluation:
    """The ``verdict`` on one subgraph, and the ``step`` that tried it."""

    step: str
    subgraph: Nodes
    verdict: Verdict


@dataclass(frozen=True)
class Reduction:
    """The nodes of the smallest bad ``subgraph``; None if the whole is not bad.

    ``complete``: no node can be left out. ``interrupted``: the user ended the search.
    ``evaluations``: each subgraph tried, in order.
    """

    subgraph: Nodes | None
    complete: bool
    evaluations: tuple[SubgraphEvaluation, ...]
    interrupted: bool = False


def reduce(nodes: Sequence[str], ask: Ask) -> Reduction:
    """The smallest subgraph of ``nodes`` that is found to be bad."""
    search = _Search(nodes, ask)
    complete = interrupted = False
    try:
        complete = search.run()
    except BudgetSpentError:
        pass
    except KeyboardInterrupt:
        interrupted = True
    return Reduction(search.best, complete, tuple(search.evaluations), interrupted)


class _Search:
    def __init__(self, nodes: Sequence[str], ask: Ask) -> None:
        self._nodes = list(nodes)
        self._ask = ask
        self._verdicts: dict[Nodes, Verdict] = {}
        self._step = "the whole model"
        self.best: Nodes | None = None
        self.evaluations: list[SubgraphEvaluation] = []

    def run(self) -> bool:
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
            find_pins(nodes, self._verdict)
        self._step = "each node left out"
        smallest = self.best or frozenset()
        one_minimal([n for n in self._nodes if n in smallest], self._verdict, lambda v: v.passed)
        return True

    def _bad(self, kept: Sequence[str]) -> bool:
        return self._verdict(frozenset(kept)).passed

    def _verdict(self, kept: Nodes) -> Verdict:
        if not kept:
            return Verdict.FAIL  # an empty model is not bad
        if kept not in self._verdicts:
            verdict = self._verdicts[kept] = Verdict(self._ask(kept))
            self.evaluations.append(SubgraphEvaluation(self._step, kept, verdict))
            if verdict.passed and (self.best is None or len(kept) < len(self.best)):
                self.best = kept
        return self._verdicts[kept]


def _fewest(length: int, bad: Callable[[int], bool]) -> int:
    """The smallest bad number by bisection, given that ``length`` is bad."""
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bad(middle) else (middle, high)
    return high
