"""The bisection of a part of the layers, with names instead of positions, and the proof of each
culprit it finds.
"""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.search.belief import Belief, make_hypotheses
from bisect_trt.search.position import Position
from bisect_trt.search.record import Probe


class Pool:
    """The bisection of the layers of ``order``, with ``pinned`` pinned throughout; ``unpinned`` is
    the probe that gave all of them up.
    """

    def __init__(
        self,
        order: Sequence[str],
        pinned: frozenset[str],
        informed: bool,
        unpinned: Probe | None,
    ) -> None:
        n = len(order)
        self.order = order
        self.pinned = pinned
        self.at = Position(
            Belief.start(make_hypotheses(n, informed=informed)),
            fails_at=None if unpinned is None else n,
        )
        if unpinned is not None and n == 1:
            self.at = self.at.after(n, passed=False)
        self.certificate: dict[str, Probe] = (
            {} if unpinned is None or n > 1 else {order[0]: unpinned}
        )
        self._failed_with: dict[int, Probe] = {} if unpinned is None else {n: unpinned}

    @property
    def culprits(self) -> frozenset[str]:
        """The layers of what was found so far."""
        return frozenset(self.order[c] for c in self.at.culprits)

    def pins(self, at: Position) -> frozenset[str]:
        """The set that position ``at`` asks for next."""
        return self.pinned.union(self.order[at.next_end :], (self.order[c] for c in at.culprits))

    def learn(self, probe: Probe) -> None:
        """Move on by the answer to the set asked for."""
        end = self.at.next_end
        if not probe.verdict.passed:
            self._failed_with[end] = probe
        before, self.at = len(self.at.culprits), self.at.after(end, probe.verdict.passed)
        if len(self.at.culprits) > before:
            found = self.at.culprits[-1]
            self.certificate[self.order[found]] = self._failed_with[found + 1]
            self._failed_with.clear()
