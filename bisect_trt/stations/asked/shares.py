"""What share of which inputs must meet the requirement."""

from __future__ import annotations

from bisect_trt.core.errors import BadInputError


class Shares:
    """What the options of these names ask for."""

    robust: float | None
    holds_on: float | None
    pick: float | None

    def check_shares(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            BadInputError: names the options.
        """
        if self.fitted and self.pick is not None:
            raise BadInputError(
                f"--pick {self.pick:g}: with --robust 0 no ranking is measured to pick from; leave "
                "one of the two out"
            )

        if self.pick is not None and self.holds_on is not None:
            raise BadInputError(
                f"--pick {self.pick:g}: it is the share of the given inputs too; leave --holds-on "
                "out"
            )

    @property
    def asked_of_given(self) -> float:
        """The share of the given inputs that ``--holds-on`` asks for."""
        return 1.0 if self.holds_on is None else self.holds_on

    @property
    def share_of_given(self) -> float:
        """The share of the given inputs that must meet the requirement."""
        return self.asked_of_given if self.pick is None else self.pick

    @property
    def fitted(self) -> bool:
        """Whether a set is searched for on the given inputs alone."""
        return self.robust == 0.0
