"""What share of which inputs must meet the requirement."""

from __future__ import annotations


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
