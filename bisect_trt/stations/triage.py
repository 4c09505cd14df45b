"""What kind of problem it is, before anything is searched: a cause and a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample, evenly
from bisect_trt.core.verdict import Verdict
from bisect_trt.numerics.requirements import times
from bisect_trt.probe.result import ProbeResult
from bisect_trt.search.tolerance_share import MARGIN, matching_limit
from bisect_trt.stations.baselines import Baselines
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case
from bisect_trt.stations.drawn import REDRAWN
from bisect_trt.stations.engine_baselines import EngineBaselines
from bisect_trt.stations.fresh_test import set_size
from bisect_trt.stations.held import blame_lowered
from bisect_trt.stations.sensitivity import (
    Sensitivity,
    measure_sensitivity,
    suspicion_of,
    time_allowed,
)
from bisect_trt.stations.unseen import Unseen

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
    precision = case.settings.precision
    base = case.base
    if engine is not None:
        base = base.with_pins_in(engine.pin_precision)
    pinned = bench.prober.probe(base.with_pins(case.names))
    decided = engine.pinned if engine is not None else pinned
    fp32 = engine.fp32 if engine is not None else emulated.fp32
    # An engine whose FP32 misses is told from its baselines; what is held is new here.
    if not decided.verdict.passed and (engine is None or case.held_low):
        return Diagnosis(
            _of_held(case, decided, emulated)
            if case.held_low and fp32.verdict.passed
            else Cause.NOT_PRECISION,
            "Even with every layer pinned"
            f"{f' but the {len(case.held_low)} that --lower holds' if case.held_low else ''} the "
            f"requirement is missed ({times(decided.score)}): pinning cannot help."
            f"{blame_lowered(case, fp32)}",
        )
    suspicion = suspicion_of(emulated.layers)
    ranked_on = _ranked_on(case, bench, unseen)
    seconds = emulated.probe_seconds(len(case.samples))
    budget_s = time_allowed(len(case.names) * len(ranked_on) * seconds * _ROW)
    budget_s = min(budget_s, max(0.0, _SHARE_OF_TIME * bench.time.left_s))
    heavy = frozenset(f.where for f in case.findings if f.kind == "weight-overflow")
    lowered_plan = case.base
    if unseen is not None:
        finite = emulated.layers["introduced_finite"].astype(bool)
        overflowing = heavy.union(str(n) for n in emulated.layers.loc[~finite, "layer"])
        lowered_plan = lowered_plan.with_pins(overflowing.intersection(case.names))
    sensitivity = measure_sensitivity(
        case, bench, suspicion, ranked_on, lowered_plan, budget_s, seconds
    )
    limit = _first_limit(emulated.lowered, pinned, engine)
    lowered = emulated.lowered
    if unseen is not None and unseen.lowered.score > lowered.score:
        lowered = unseen.lowered
    diagnosis = diagnose_reduced(
        lowered.under(limit),
        emulated.layers,
        sensitivity.under(limit),
        lambda pins: bench.prober.probe(base.with_pins(pins)).under(limit),
        precision,
        heavy,
        _WORST if unseen is not None else "",
    )
    if emulated.lowered.verdict.passed and engine is None and unseen is not None:
        others = _others(unseen, set_size(case))
        luck = f"{diagnosis.sentence} The given inputs pass by luck: {others}."
        diagnosis = replace(diagnosis, sentence=luck)
    strength = sensitivity.strength
    # What was too many to measure stands behind what was, by the error it introduces.
    ranking = sorted(
        case.names, key=lambda n: (-strength.get(n, -1.0), -suspicion.get(n, -math.inf))
    )
    return Triage(diagnosis, base, pinned, sensitivity, limit, tuple(ranking), unseen)


def _others(unseen: Unseen, size: int) -> str:
    """What speaks against everything lowered, which the given inputs pass; ``size`` of them are
    judged together.
    """
    against = unseen.refused
    if against is None or not unseen.lowered.verdict.passed:
        return "others like them do not"
    kind = "roundings redrawn" if against.kind == REDRAWN else against.kind
    missed = len(against.samples) // size
    return f"{missed} of {against.tested} {kind} miss the requirement"


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


def diagnose_reduced(
    base: ProbeResult,
    table: pd.DataFrame,
    sensitivity: Sensitivity,
    probe: Callable[[frozenset[str]], ProbeResult],
    precision: Precision,
    overflowing_weights: frozenset[str] = frozenset(),
    where: str = "",
) -> Diagnosis:
    """Overflow, rounding in a few layers, or accumulation over many: told apart by measured
    effects.

    Overflow is the cause if the layers that turn finite inputs into infinities, or hold a constant
    that does not fit, account for at least half of the error (one probe); rounding, if some layer
    misses the requirement alone; else no single layer does, and the error accumulates.

    Args:
        base: the probe of everything lowered.
        table: a row a layer, with ``introduced_finite`` and ``underflows``.
        sensitivity: what each layer does alone.
        probe: the result of a set of pins.
        precision: for the sentence.
        overflowing_weights: layers with a constant that does not fit.
        where: what the scores are the worst of, where these are not the given inputs alone.
    """
    name = precision.value.upper()
    overflows = ~table["introduced_finite"].astype(bool) | table["layer"].isin(overflowing_weights)
    not_finite = tuple(str(n) for n in table.loc[overflows, "layer"])
    if not_finite:
        without = probe(frozenset(not_finite))
        if without.score <= base.score / 2.0 or (
            math.isinf(base.score) and math.isfinite(without.score)
        ):
            under = frozenset(table.loc[table["underflows"].astype(bool), "layer"])
            return _not_finite(name, not_finite, under - overflowing_weights)
    guilty = [n for n in sensitivity.scores if n in sensitivity.must_pin]
    if guilty:
        guilty.sort(key=lambda n: -sensitivity.scores[n])
        return Diagnosis(
            Cause.ROUNDING,
            f"{name} rounding in {_named(guilty)} alone misses the requirement "
            f"({times(sensitivity.scores[guilty[0]])}{where}).",
            True,
            tuple(guilty),
        )
    count = len(sensitivity.scores)
    seen = "" if base.verdict.passed else f" ({times(base.score)}{where})"
    why = f"none of the {count} measured layers misses" if count else "no time to see which misses"
    return Diagnosis(
        Cause.ACCUMULATION,
        f"The {name} error accumulates over many layers{seen}: {why} the requirement alone.",
        True,
    )


def _not_finite(name: str, layers: Sequence[str], underflowing: Container[str]) -> Diagnosis:
    """Layers whose values are not finite: beyond the range, or divided by what became zero."""
    under = tuple(n for n in layers if n in underflowing)
    over = tuple(n for n in layers if n not in underflowing)
    why = f"in {_named(under)}: small values become zero there, and what divides by them is lost"
    if not over:
        return Diagnosis(Cause.ROUNDING, f"{name} underflows {why}.", True, under)
    beside = f" It underflows {why}." if under else ""
    return Diagnosis(
        Cause.OVERFLOW,
        f"{name} overflows in {_named(over)}: values or constants beyond its range become infinite "
        f"there.{beside}",
        True,
        tuple(layers),
    )


def _named(layers: Sequence[str]) -> str:
    shown = ", ".join(layers[:4])
    return f"{shown} and {len(layers) - 4} more layers" if len(layers) > 4 else shown
