"""What share of which inputs must meet the requirement."""

from __future__ import annotations

_WANTED = 0.95
"""The share of unseen inputs that a plan shall hold on, where nobody asks for another."""


class Shares:
    """What the options of these names ask for."""

    robust: float | None
    holds_on: float
    pick: float | None

    @property
    def share_of_given(self) -> float:
        """The share of the given inputs that must meet the requirement."""
        return self.holds_on if self.pick is None else self.pick

    @property
    def fitted(self) -> bool:
        """Whether a set is searched for on the given inputs alone."""
        return self.robust == 0.0

    @property
    def share_of_unseen(self) -> float:
        """The share of unseen inputs that is asked for, or spoken of where a set is fitted.

        Where some of the given inputs need not meet the requirement no more of the unseen ones need
        to by themselves: a copy of an input that misses mostly misses too.
        """
        return self.robust or min(_WANTED, self.holds_on)
