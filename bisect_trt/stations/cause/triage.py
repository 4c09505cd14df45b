"""What kind of problem it is, before anything is searched: a cause and a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pandas as pd

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.holds import InputKind
from bisect_trt.core.names import counted
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.verdict import Verdict
from bisect_trt.graph.inspection.lost_constants import largest_constant, lost_constants
from bisect_trt.graph.inspection.unreached import unreached
from bisect_trt.graph.tensors.operator_rules import MOVES
from bisect_trt.numerics.scores import times
from bisect_trt.probe.result import ProbeResult, meets
from bisect_trt.search.tolerance_share import MARGIN, matching_limit
from bisect_trt.stations.baselines.baselines import Baselines
from bisect_trt.stations.baselines.traced_inputs import misses_within
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.each_alone import (
    layers_seen,
    measure_each_alone,
    nearest_on_all,
)
from bisect_trt.stations.cause.held import blame_lowered
from bisect_trt.stations.cause.reduced_cause import Suspects, diagnose_reduced
from bisect_trt.stations.cause.sensitivity import (
    Sensitivity,
    suspicion_of,
)
from bisect_trt.stations.cause.unseen import Unseen
from bisect_trt.stations.cause.worst_seen import with_pins_there, worst_seen
from bisect_trt.stations.draws.fresh_test import each_must_hold, set_size
from bisect_trt.stations.engine.baselines import EngineBaselines


@dataclass(frozen=True)
class Triage:
    """The cause, and what the search begins with.

    ``base`` is the plan without pins, with the precision that a pin really runs in; ``pinned`` the
    emulated probe of all pins; ``limit`` the share of the tolerance to search within at first;
    ``ranking`` are all layers, most harmful first; ``unseen`` what a robust search begins
    with, None where the given inputs are all; ``layers`` their table, with what was seen to break
    on other inputs.
    """

    diagnosis: Diagnosis
    base: PrecisionPlan
    pinned: ProbeResult
    sensitivity: Sensitivity
    limit: float
    ranking: tuple[str, ...]
    unseen: Unseen | None
    layers: pd.DataFrame


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
        f"{_but_held(case)} the "
        f"requirement is missed ({times(decided.score, decided.verdict)}): pinning cannot help."
        f"{blame_lowered(case, fp32)}",
    )


def _but_held(case: Case) -> str:
    return f" but the {counted(len(case.held_low), 'layer')} of --lower" if case.held_low else ""


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
    sensitivity = measure_each_alone(case, bench, emulated, unseen, suspicion, heavy)
    if unseen is not None and each_must_hold(case):
        sensitivity = nearest_on_all(case, bench, base, sensitivity)
    limit = _first_limit(emulated.lowered, pinned, engine)
    layers = layers_seen(case, bench, emulated, sensitivity)
    diagnosis = diagnose_reduced(
        worst_seen(emulated.lowered, unseen).under(limit),
        layers[~layers["layer"].isin(unreached(case.graph) | case.source_fp32)],
        sensitivity.under(limit),
        lambda pins: with_pins_there(case, bench, base, pins, unseen),
        case.settings.precision,
        _suspects(case, heavy),
        _WORST if unseen is not None else "",
        misses_within=lambda: misses_within(case, bench),
        layers=len(case.names),
        alone=_alone_on_all(case, bench, emulated, base, limit),
        together=set_size(case) > 1 or case.requirements.tells_of_all,
    )
    if engine is not None and not engine.base.worst:
        seen = worst_seen(emulated.lowered, unseen)
        diagnosis = _without_engine(case, diagnosis, engine.base, seen)
    if emulated.lowered.verdict.passed and engine is None and unseen is not None:
        others = _others(unseen, set_size(case))
        passed = f"{_given_that_pass(case, bench)} pass, but {others}"
        said = f"{diagnosis.sentence} {passed}."
        diagnosis = replace(diagnosis, sentence=said)
    ranking = _ranking(case, sensitivity, suspicion, layers)
    return Triage(diagnosis, base, pinned, sensitivity, limit, ranking, unseen, layers)


def _suspects(case: Case, heavy: frozenset[str]) -> Suspects:
    """What the constants of the layers say, in words."""
    graph, precision = case.graph, case.settings.precision
    searched = set(case.names)
    movers: dict[str, list[str]] = {}
    made_by = {tensor: layer.name for layer in case.layers for tensor in layer.outputs}
    for layer in case.layers:
        if layer.op in MOVES and layer.name in searched:
            for tensor in layer.inputs:
                if tensor in made_by:
                    movers.setdefault(made_by[tensor], []).append(layer.name)
    lost = lost_constants(graph, precision)
    return Suspects(
        {name: largest_constant(graph, name) for name in sorted(heavy & searched)},
        {name: its.words(precision) for name, its in lost.items() if name in searched},
        movers,
    )


def _without_engine(
    case: Case, diagnosis: Diagnosis, base: ProbeResult, emulated: ProbeResult
) -> Diagnosis:
    """``diagnosis`` of an engine with everything lowered that could not be had, for a reason that
    names no layer: numbers say nothing of that.
    """
    name = case.settings.precision.value.upper()
    told = f"The {name} engine could not be built or run ({base.verdict}: {base.note})"
    if emulated.score > 1.0:
        return replace(diagnosis, sentence=f"{told}; by emulation: {diagnosis.sentence}")
    return Diagnosis(
        Cause.UNKNOWN,
        f"{told}, and by emulation {name} meets the requirement: pins are found by trial, and what "
        "the engine does not take is among them.",
    )


def _ranking(
    case: Case, sensitivity: Sensitivity, suspicion: Mapping[str, float], layers: pd.DataFrame
) -> tuple[str, ...]:
    """All layers, most harmful first."""
    overflow = layers.loc[~layers["introduced_finite"].astype(bool), "layer"]
    strength = sensitivity.strength
    # Every set needs what breaks alone, be it on other elements, or in another output, than those
    # that are disturbed most; but for what only inputs show that need not hold. (What misses alone
    # by rounding may still hold among others: ranked so, a text model had 403 pins and not 393.)
    # What overflows and is finite again at the outputs misses there too, whatever is lowered.
    needed = sensitivity.breaks | sensitivity.must_pin.intersection(overflow)
    breaks = needed if each_must_hold(case) else frozenset()
    # What was too many to measure stands behind what was, by the error it introduces.
    return tuple(
        sorted(
            case.names,
            key=lambda n: (n not in breaks, -strength.get(n, -1.0), -suspicion.get(n, -math.inf)),
        )
    )


def _alone_on_all(
    case: Case, bench: Bench, emulated: Baselines, base: PrecisionPlan, limit: float
) -> Callable[[str], ProbeResult] | None:
    """What a layer does alone on the given inputs together; None where each of them must meet the
    requirement itself, and where together they do, so that what is missed is on draws.
    """
    of_each = each_must_hold(case) and not case.requirements.tells_of_all
    if of_each or emulated.lowered.verdict.passed:
        return None
    names = case.held_low.union(case.names)
    return lambda name: bench.prober.probe(base.with_pins(names - {name})).under(limit)


def _given_that_pass(case: Case, bench: Bench) -> str:
    """The given inputs, of which a share may miss."""
    known = [bench.prober.known(case.base, sample) for sample in case.samples]
    passed = sum(found is not None and meets(found, 1.0) for found in known)
    if case.requirements.of_sets or passed == len(known):
        return "The given inputs"
    return f"{passed} of {len(known)} given inputs"


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
