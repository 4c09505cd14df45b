"""The end of a run in which the engine is to blame: the smallest piece that does it."""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.diagnosis import Cause
from bisect_trt.core.errors import BadInputError, MachineError
from bisect_trt.core.machine.time_budget import TimeBudget
from bisect_trt.core.precision import Precision
from bisect_trt.core.sample import Sample
from bisect_trt.runners.base import Restartable
from bisect_trt.stations.answer.known import Known
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.pieces.reduce import Reduced, reduce_piece
from bisect_trt.stations.pieces.reduce_model import engine_trials
from bisect_trt.stations.pieces.seen import Budget, Seen

REPRODUCER = "reproducer"
"""The folder within the run's."""

BUILDS = 60
"""Engine builds that a run spends on the piece where --max-builds says nothing; `bisect-trt
reduce` takes as many as it needs."""

SECONDS = 30.0
"""That a run spends on it at most, but for the build in work: its answer is there already. An
engine of thousands of layers takes that long to build, and sixty of them would take an hour."""

_ENGINE = (Cause.UNSTEADY, Cause.NOT_PRECISION, Cause.ENGINE_FAILED)


def piece_to_blame(known: Known, bench: Bench) -> Reduced | Seen | None:
    """The smallest bad piece found within the builds and the time that may be spent; what the whole
    shows where it was not seen to be bad again; None where the engine is not to blame.

    Args:
        known: what the run found.
        bench: says who judged.
    """
    diagnosis, engine, settings = known.diagnosis, known.engine, known.case.settings
    blamed = diagnosis is not None and diagnosis.cause in _ENGINE
    if not blamed or engine is None or not isinstance(bench.opened, Restartable):
        return None
    precision = settings.precision if engine.fp32.verdict.passed else Precision.FP32
    builds = settings.max_builds if settings.max_builds is not None else BUILDS
    budget = Budget(builds, _time_for_it(bench))
    if budget.is_spent:
        return None
    seen = known.steadiness or engine.steadiness
    sample = _named(known.case.samples, seen.sample if seen is not None else "")
    trials = engine_trials(settings, precision, known.case.graph, [sample], budget)
    try:
        return reduce_piece(known.case.graph, sample, trials, bench.observer)
    # The answer stands, also where there was no time to try the whole, or no memory.
    except (BadInputError, MachineError):
        return None


def _time_for_it(bench: Bench) -> TimeBudget:
    found = TimeBudget(min(SECONDS, bench.time.left_s) / 60.0)
    found.search_ended()
    return found


def _named(samples: Sequence[Sample], name: str) -> Sample:
    return next((sample for sample in samples if sample.name == name), samples[0])
