"""What kind of problem it is, before anything is searched: a cause and a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.holds import InputKind
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample, evenly
from bisect_trt.core.verdict import Verdict
from bisect_trt.numerics.scores import times
from bisect_trt.probe.result import ProbeResult
from bisect_trt.search.tolerance_share import MARGIN, matching_limit
from bisect_trt.stations.baselines.baselines import Baselines
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.held import blame_lowered
from bisect_trt.stations.cause.reduced_cause import diagnose_reduced
from bisect_trt.stations.cause.sensitivity import (
    Sensitivity,
    measure_sensitivity,
    suspicion_of,
    time_allowed,
)
from bisect_trt.stations.cause.unseen import Unseen
from bisect_trt.stations.draws.fresh_test import set_size
from bisect_trt.stations.engine.baselines import EngineBaselines

_MOST_RANKED, _FEWEST_RANKED, _RANKED_ROWS = 8, 2, 800
"""Layers are ranked over as many samples as make so many rows: by count and not by the clock, so
that the same command gives the same answer. Four or eight samples rank the text models' layers no
better than two (benchmarks/results/holds.md)."""

_ROW = 0.5
"""A row takes about half an inference: it starts at its layer, and some are made side by side."""

_SHARE_OF_TIME = 0.4
"""Of what a run's budget leaves for the search."""


@dataclass(frozen=True)
class Triage:
    """The cause, and what the search begins with.

    ``base`` is the plan without pins, with the precision that a pin really runs in; ``pinned`` the
    emulated probe of all pins; ``limit`` the share of the tolerance to search within at first;
    ``ranking`` are all layers, most harmful first; ``unseen`` what a robust search begins
    with, None where the given inputs are all.
    """

    diagnosis: Diagnosis
    base: PrecisionPlan
    pinned: ProbeResult
    sensitivity: Sensitivity
    limit: float
    ranking: tuple[str, ...]
    unseen: Unseen | None


def _missed_with_all_pins(
    case: Case, pinned: ProbeResult, emulated: Baselines, engine: EngineBaselines | None
) -> Diagnosis | None:
    """That pinning cannot help, where the requirement is missed with every layer pinned."""
    decided = engine.pinned if engine is not None else pinned
    fp32 = engine.fp32 if engine is not None else emulated.fp32
    # An engine whose FP32 misses is told from its baselines; what is held is new here.
    if decided.verdict.passed or (engine is not None and not case.held_low):
        return None
    of_held = case.held_low and fp32.verdict.passed
    return Diagnosis(
        _of_held(case, decided, emulated) if of_held else Cause.NOT_PRECISION,
        "Even with every layer pinned"
        f"{f' but the {len(case.held_low)} that --lower holds' if case.held_low else ''} the "
        f"requirement is missed ({times(decided.score)}): pinning cannot help."
        f"{blame_lowered(case, fp32)}",
    )


def _each_alone(
    case: Case,
    bench: Bench,
    emulated: Baselines,
    unseen: Unseen | None,
    suspicion: Mapping[str, float],
    heavy: frozenset[str],
) -> Sensitivity:
    """What each layer does alone, of those for which there is time: the most suspicious first.

    Beyond the given inputs what overflows by itself, or by a constant as the ``heavy`` ones do, is
    pinned meanwhile, for the others' effects to be seen.
    """
    ranked_on = _ranked_on(case, bench, unseen)
    seconds = emulated.probe_seconds(len(case.samples))
    # By the clock a busy machine's rows would not fit: of 279 layers 95 were measured where there
    # is time for all of them, and all were pinned where 6 are enough.
    usual = min(seconds, bench.usual_seconds)
    budget_s = time_allowed(len(case.names) * len(ranked_on) * usual * _ROW)
    budget_s = min(budget_s, max(0.0, _SHARE_OF_TIME * bench.time.left_s))
    lowered = case.base
    if unseen is not None:
        finite = emulated.layers["introduced_finite"].astype(bool)
        overflowing = heavy.union(str(n) for n in emulated.layers.loc[~finite, "layer"])
        lowered = lowered.with_pins(overflowing.intersection(case.names))
    return measure_sensitivity(case, bench, suspicion, ranked_on, lowered, budget_s, seconds)


def _of_held(case: Case, decided: ProbeResult, emulated: Baselines) -> Cause:
    """What layers that ``--lower`` holds do, where all others are pinned and FP32 itself passes."""
    layers = emulated.layers
    finite = layers.loc[layers["layer"].isin(case.held_low), "introduced_finite"].astype(bool)
    over = decided.verdict is Verdict.NON_FINITE or not finite.all()
    return Cause.OVERFLOW if over else Cause.ROUNDING


_WORST = " on the worst of the inputs and draws measured"


def find_cause(
    case: Case,
    bench: Bench,
    emulated: Baselines,
    engine: EngineBaselines | None,
    unseen: Unseen | None,
) -> Triage | Diagnosis:
    """The cause with what the search needs; a bare diagnosis where pinning cannot help.

    Args:
        case: the model, the inputs and the requirements.
        bench: what measures each layer alone.
        emulated: the emulators' baselines.
        engine: the engine's, None where the emulator judges.
        unseen: what everything lowered shows beyond the given inputs, None where only these count.
    """
    bench.observer.station("triage")
    base = case.base
    if engine is not None:
        base = base.with_pins_in(engine.pin_precision)
    pinned = bench.prober.probe(base.with_pins(case.names))
    missed = _missed_with_all_pins(case, pinned, emulated, engine)
    if missed is not None:
        return missed
    suspicion = suspicion_of(emulated.layers)
    heavy = frozenset(f.where for f in case.findings if f.kind == "weight-overflow")
    sensitivity = _each_alone(case, bench, emulated, unseen, suspicion, heavy)
    limit = _first_limit(emulated.lowered, pinned, engine)
    lowered = emulated.lowered
    if unseen is not None and unseen.lowered.score > lowered.score:
        lowered = unseen.lowered
    diagnosis = diagnose_reduced(
        lowered.under(limit),
        emulated.layers,
        sensitivity.under(limit),
        lambda pins: bench.prober.probe(base.with_pins(pins)).under(limit),
        case.settings.precision,
        heavy,
        _WORST if unseen is not None else "",
        layers=len(case.names),
        alone=_alone_on_all(case, bench, emulated, base, limit),
        together=set_size(case) > 1,
    )
    if emulated.lowered.verdict.passed and engine is None and unseen is not None:
        others = _others(unseen, set_size(case))
        said = f"{diagnosis.sentence} The given inputs pass, but {others}."
        diagnosis = replace(diagnosis, sentence=said)
    strength = sensitivity.strength
    # What was too many to measure stands behind what was, by the error it introduces.
    ranking = sorted(
        case.names, key=lambda n: (-strength.get(n, -1.0), -suspicion.get(n, -math.inf))
    )
    return Triage(diagnosis, base, pinned, sensitivity, limit, tuple(ranking), unseen)


def _alone_on_all(
    case: Case, bench: Bench, emulated: Baselines, base: PrecisionPlan, limit: float
) -> Callable[[str], ProbeResult] | None:
    """What a layer does alone on the given inputs together; None where each of them must meet the
    requirement itself, and where together they do, so that what is missed is on draws.
    """
    each = set_size(case) == 1 and case.settings.share_of_given >= 1.0
    if each or emulated.lowered.verdict.passed:
        return None
    names = case.held_low.union(case.names)
    return lambda name: bench.prober.probe(base.with_pins(names - {name})).under(limit)


def _others(unseen: Unseen, size: int) -> str:
    """What speaks against everything lowered, which the given inputs pass; ``size`` of them are
    judged together.
    """
    against = unseen.refused
    if against is None or not unseen.lowered.verdict.passed:
        return "others like them do not"
    kind = "roundings redrawn" if against.kind == InputKind.REDRAWN else against.kind
    missed = len(against.samples) // size
    return f"{missed} of {against.tested} {kind} {'misses' if missed == 1 else 'miss'} it"


def _ranked_on(case: Case, bench: Bench, unseen: Unseen | None) -> tuple[Sample, ...]:
    """The samples on which each layer alone is measured: the given ones that everything lowered
    does worst on, for where it is hardly noticed no layer's effect is seen, and draws, spread over
    their kinds.
    """
    if unseen is None:
        return case.samples
    count = ranked_count(len(case.layers))
    # From the end: variants disturb more than redrawn copies do.
    others = [*reversed(unseen.samples.variants), *reversed(unseen.samples.redrawn)]
    first = _worst(case, bench, case.samples, max(1, count // 2) if others else count)
    return (*first, *evenly(others, count - len(first)))


def _worst(case: Case, bench: Bench, samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most ``most`` of ``samples`` with the largest scores; of equal ones some, spread."""
    by_score: dict[float, list[Sample]] = {}
    for sample in samples:
        found = bench.prober.known(case.base, sample)
        score = math.inf if found is None or math.isnan(found.score) else found.score
        by_score.setdefault(score, []).append(sample)
    chosen: list[Sample] = []
    for score in sorted(by_score, reverse=True):
        chosen += evenly(by_score[score], most - len(chosen))
    return chosen


def ranked_count(layers: int) -> int:
    """On how many samples of a panel so many layers are measured, each alone."""
    return max(_FEWEST_RANKED, min(_MOST_RANKED, _RANKED_ROWS // max(1, layers)))


def _first_limit(
    lowered: ProbeResult, pinned: ProbeResult, engine: EngineBaselines | None
) -> float:
    """The share of the tolerance to search within at first: 1, unless engine and emulator already
    disagree on the baselines.
    """
    if engine is None:
        return 1.0
    if engine.base.verdict.passed:  # by luck, else nothing would be searched
        return 1.0
    if lowered.verdict.passed and math.isfinite(engine.base.score):
        # The engine misses what the emulator meets.
        floors = (pinned.score, engine.pinned.score)
        return matching_limit(engine.base.score, lowered.score, floors)
    if not pinned.verdict.passed and engine.pinned.score > 0.0:
        # The engine meets what the emulator misses.
        return max(1.0, MARGIN * pinned.score / engine.pinned.score)
    return 1.0
