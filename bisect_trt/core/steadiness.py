"""Whether a runner that runs each sample several times makes up its mind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_APART = 0.1


@dataclass(frozen=True)
class Steadiness:
    """``differing`` of ``runs`` gave another answer to a sample than most of its runs did.

    ``passed`` runs met the requirements; ``best`` and ``worst`` are the scores, in tolerances, of
    the answers to that sample which they differ most for. ``apart`` is the largest difference
    between two answers, over the range of the reference's output, on output ``output`` of sample
    ``sample``; 0 where no two differ, infinite where only one of them is finite there.
    ``processes`` counts those that the runs were made in, ``right`` those in which every run met
    the requirements; None where nobody counted. ``broken`` is how one ended that gave no answer,
    which counts as a run.
    """

    runs: int
    differing: int = 0
    passed: int = 0
    best: float = 0.0
    worst: float = 0.0
    apart: float = 0.0
    output: str = ""
    sample: str = ""
    processes: int = 1
    right: int | None = None
    broken: str = ""

    def of_set(self, best: float, worst: float) -> Steadiness:
        """The same runs where all samples are judged together, of which no run of one passes or
        misses alone.

        Args:
            best: the score of all samples, each by its best run.
            worst: likewise by its worst.
        """
        usual = self.runs - self.differing if best <= 1.0 else 0
        passed = self.runs if worst <= 1.0 else usual
        return replace(self, passed=passed, best=best, worst=worst)

    @property
    def steady(self) -> bool:
        """Whether all answers to each sample were the same, bit for bit."""
        return self.differing == 0

    @property
    def decides(self) -> bool:
        """Whether the verdict depends on it: a run fails, and others are better by more than a
        tenth. Sums whose order is left to chance differ too, but by last bits.
        """
        return self.worst > 1.0 and self.best < self.worst * (1.0 - _APART)


def together(found: Sequence[Steadiness]) -> Steadiness:
    """Those of several samples, one at least: counts added, the others of the unsteadiest."""
    last = max(found, key=lambda s: (s.decides, s.differing > 0, _gap(s), s.apart))
    return replace(
        last,
        runs=sum(s.runs for s in found),
        differing=sum(s.differing for s in found),
        passed=sum(s.passed for s in found),
        processes=max(s.processes for s in found),
    )


def _gap(one: Steadiness) -> float:
    """In tolerances; infinite where only one of the two is finite."""
    return 0.0 if one.best == one.worst else one.worst - one.best
