"""What a run knows so far: one frozen record that each station's answer makes larger."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from bisect_trt.core.diagnosis import Diagnosis
from bisect_trt.core.holds import Holds
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.steadiness import Steadiness
from bisect_trt.stations.baselines.baselines import Baselines
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.triage import Triage
from bisect_trt.stations.cause.unseen import Unseen
from bisect_trt.stations.engine.baselines import EngineBaselines
from bisect_trt.stations.plans.bisect import Bisection
from bisect_trt.stations.verdict.engine_judge import Judgement


@dataclass(frozen=True)
class Known:
    """The stations' records; None where a run ended before the station, or there was no need of it.

    ``inputs`` has a row an input, ``frontier`` a row a number of pins. ``settled`` is the diagnosis
    that ended the run early, if one did. ``steadiness`` is that of the engine that the answer
    stands on, ``unsteady`` the diagnosis where it takes the answer back. ``out_of_time`` is true if
    the budget ended the search, ``interrupted`` if the user did.
    """

    case: Case
    settled: Diagnosis | None = None
    baselines: Baselines | None = None
    engine: EngineBaselines | None = None
    triage: Triage | None = None
    bisection: Bisection | None = None
    judgement: Judgement | None = None
    unseen: Unseen | None = None
    holds: Holds | None = None
    inputs: pd.DataFrame | None = None
    frontier: pd.DataFrame | None = None
    steadiness: Steadiness | None = None
    unsteady: Diagnosis | None = None
    out_of_time: bool = False
    interrupted: bool = False

    def with_(self, **found: Any) -> Known:
        """The same with one more record."""
        return replace(self, **found)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The cause, None before it is known."""
        if self.unsteady is not None:
            return self.unsteady
        return self.triage.diagnosis if self.triage is not None else self.settled

    @property
    def base(self) -> PrecisionPlan:
        """The plan without pins, with the precision that a pin really runs in."""
        if self.engine is None:
            return self.case.base
        return self.case.base.with_pins_in(self.engine.pin_precision)
