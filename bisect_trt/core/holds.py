"""On what a plan was tested, and with what confidence it holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Robustness(str, Enum):
    """What the tests say of inputs that nobody has shown."""

    ROBUST = "robust"
    UNDECIDED = "undecided"
    LUCKY = "lucky"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Holding:
    """``passed`` of ``tested`` samples of one kind met the requirements.

    ``lower_bound`` is the share of all such samples that do, at least, with 95 % confidence; 0
    where the samples are no draws (the given ones, which the search saw). ``worst_score`` is the
    largest score in tolerances, NaN where nothing was tested, and ``worst`` the sample that had it.
    """

    passed: int = 0
    tested: int = 0
    lower_bound: float = 0.0
    worst_score: float = float("nan")
    worst: str = ""

    @property
    def share(self) -> float:
        """The share that passed, NaN where nothing was tested."""
        return self.passed / self.tested if self.tested else float("nan")


@dataclass(frozen=True)
class Holds:
    """What a plan holds on: the ``given`` inputs, copies of them with roundings ``redrawn``,
    ``variants`` of them, and the inputs that were kept apart (``holdout``).

    ``wanted`` is the share that ``--robust`` asks for; ``fitted`` is true where nothing but the
    given inputs was searched with.
    """

    given: Holding
    redrawn: Holding
    variants: Holding
    holdout: Holding
    wanted: float
    fitted: bool = False

    @property
    def word(self) -> Robustness:
        """Robust: every kind that was drawn is bounded by the wanted share, and the inputs kept
        apart do not speak against it. Lucky: some kind was seen to miss it.
        """
        drawn = [kind for kind in (self.redrawn, self.variants) if kind.tested]
        kinds = [*drawn, self.holdout] if self.holdout.tested else drawn
        if any(k.passed < int(self.wanted * k.tested) for k in kinds):
            return Robustness.LUCKY
        if drawn and all(k.lower_bound >= self.wanted for k in drawn):
            return Robustness.ROBUST
        return Robustness.UNDECIDED
