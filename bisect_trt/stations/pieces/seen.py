"""What trying a piece showed, what it is to be blamed for, and what the trials may cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.machine.time_budget import TimeBudget
from bisect_trt.core.verdict import Verdict


class Suspect(StrEnum):
    """In which way a piece is bad."""

    FAILED = "failed"
    WRONG = "wrong"
    UNSTEADY = "unsteady"
    CHECK = "check"


@dataclass(frozen=True)
class Seen:
    """What a piece showed, over all processes.

    ``runs`` are all inferences, ``wrong`` those whose error no rounding explains; ``worst`` is the
    largest error in multiples of what is allowed. ``differing`` counts the processes that gave the
    same input more than one answer. ``failure`` are the engine's words where it does not build or
    run, or a command's that calls the piece bad (``by_command``), ``verdict`` how that ended,
    ``allowed`` the allowance by output, ``breaks`` the outputs that rounding alone breaks.
    """

    processes: int = 0
    runs: int = 0
    wrong: int = 0
    worst: float = 0.0
    differing: int = 0
    failure: str = ""
    verdict: Verdict = Verdict.PASS
    allowed: Mapping[str, float] = field(default_factory=dict)
    breaks: tuple[str, ...] = ()
    by_command: bool = False

    @property
    def suspect(self) -> Suspect | None:
        """What it is to be blamed for; None if nothing was seen."""
        if self.failure:
            return Suspect.CHECK if self.by_command else Suspect.FAILED
        if self.differing or 0 < self.wrong < self.runs:
            return Suspect.UNSTEADY
        return Suspect.WRONG if self.wrong else None


class Budget:
    """What is left of the engine builds, or calls of a command, and of the time.

    Args:
        most: builds or calls; None for as many as it takes.
        time_budget: of the whole command.
    """

    def __init__(self, most: int | None, time_budget: TimeBudget | None = None) -> None:
        self._most = most
        self._time = time_budget
        self.spent = 0

    @property
    def is_spent(self) -> bool:
        """Whether none is left."""
        if self._time is not None and self._time.left_s <= 0.0:
            return True
        return self._most is not None and self.spent >= self._most

    def spend(self) -> None:
        """Count one.

        Raises:
            BudgetSpentError: none is left.
        """
        if self.is_spent:
            raise BudgetSpentError
        self.spent += 1
