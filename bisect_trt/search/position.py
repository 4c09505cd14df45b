"""The state of the bisection, and how a verdict moves it. Pure: the same verdicts give the same
positions.

Every probe pins a suffix of the order plus the culprits found so far. So the state is a position
(everything before it is decided), a bracket (a later end that is known to fail) and a list of
culprits.
"""

from __future__ import annotations

from dataclasses import dataclass

from bisect_trt.search.belief import Belief


@dataclass(frozen=True)
class Position:
    """``position``: layers before it are decided. ``fails_at``: unpinning up to there is known to
    fail, or None.
    """

    belief: Belief
    position: int = 0
    fails_at: int | None = None
    culprits: tuple[int, ...] = ()

    @property
    def done(self) -> bool:
        """True when every layer is decided."""
        return self.position >= self.belief.hypotheses.size

    @property
    def next_end(self) -> int:
        """The end of the group to unpin next."""
        return self.belief.even_split(self.position, self.fails_at)

    def pass_probability(self, end: int) -> float:
        """How likely unpinning up to ``end`` passes."""
        return self.belief.pass_probability(self.position, end, self.fails_at)

    def after(self, end: int, passed: bool) -> Position:
        """The state after the probe that unpinned up to ``end``; an implied culprit is taken at
        once.
        """
        if passed:
            moved = Position(
                self.belief.innocent(self.position, end), end, self.fails_at, self.culprits
            )
        else:
            moved = Position(self.belief, self.position, end, self.culprits)
        if moved.fails_at is None or moved.fails_at - moved.position > 1:
            return moved
        found = moved.position
        return Position(moved.belief.culprit(found), found + 1, None, (*moved.culprits, found))
