"""Why the numbers are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import Cause, CauseFound, Diagnosis, InputKind, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation, meets
from bisect_trt.metrics.requirements import times
from bisect_trt.metrics.rounding import LARGEST, SMALLEST_SUBNORMAL
from bisect_trt.model.lost_constants import largest_constant, lost_constants
from bisect_trt.model.outputs import unreached
from bisect_trt.model.precision_rules import MOVES
from bisect_trt.search.minimise import SCALED_MARGIN, matching_limit
from bisect_trt.steps.baselines import Baselines, misses_within
from bisect_trt.steps.context import Context
from bisect_trt.steps.engine_baselines import EngineBaselines
from bisect_trt.steps.failing_inputs import (
    UnseenInputs,
    blame_reduced,
    layers_seen,
    measure_each_alone,
    nearest_on_all,
    with_pins_there,
    worst_seen,
)
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.sensitivity import Sensitivity, suspicion_of
from bisect_trt.steps.validation_inputs import each_must_hold, set_size

_SHOWN = 4
_MAX_EVALUATED = 16

_TINY_STEPS = 50.0
"""Smallest subnormals: values no larger are known to one in a hundred at best."""

_SPREAD_LAYERS = 8
"""Of fewer layers that were measured alone it is not said that the error is spread over many."""


@dataclass(frozen=True)
class Suspects:
    """What the model says of its layers.

    ``heavy`` maps those with a constant beyond the range, and ``lost`` those with one that the
    precision hardly holds, to words with the number; ``movers`` maps a layer to those that read
    what it gives and only move it.
    """

    heavy: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    movers: Mapping[str, Sequence[str]] = field(default_factory=dict)


def diagnose_reduced(
    base: Evaluation,
    table: pd.DataFrame,
    sensitivity: Sensitivity,
    pinned: Callable[[frozenset[str]], tuple[float, float]],
    precision: Precision,
    suspects: Suspects,
    where: str = "",
    *,
    misses_within: Callable[[], bool] = lambda: False,
    layers: int,
    alone: Callable[[str], Evaluation] | None = None,
    together: bool = False,
) -> Diagnosis:
    """Overflow, underflow, rounding in a few layers, or accumulation over many, as measured.

    Overflow and underflow are causes if the layers that leave that end of the range account for
    half of the error that the other's leave; rounding, if some layer misses the requirement alone;
    else the error accumulates. Unknown where too few layers were measured to tell.
    """
    name = precision.value.upper()
    ends = _Ends(table, suspects, precision)
    found = _beyond_an_end(ends, pinned, sensitivity.must_pin, misses_within)
    if found:
        return Diagnosis.of(found)
    scores = sensitivity.scores
    in_order = [str(n) for n in table["layer"]]
    missed = sensitivity.must_pin
    guilty_first = sorted((n for n in in_order if n in missed), key=lambda n: -scores[n])
    if together and alone is None and (guilty_first or not scores):
        return Diagnosis(
            Cause.UNKNOWN,
            f"Whether few layers make the {name} error, or many, was not measured: what is asked "
            "of several inputs together cannot be asked of each of them.",
        )
    if not guilty_first and not scores:
        strength = sensitivity.strength
        guilty_first = sorted((n for n in in_order if n in strength), key=lambda n: -strength[n])
    asked = guilty_first[:_MAX_EVALUATED] if alone is not None else []
    guilty = _guilty(
        {n: scores[n] for n in guilty_first} if alone is None else _evaluated(asked, alone)
    )
    if guilty:
        on = where if alone is None else ""
        return _rounding(ends, guilty, on)
    evaluated = len(asked) if len(asked) < len(guilty_first) else 0
    return _spread(name, base, table, sensitivity, layers, evaluated, where)


def _rounding(ends: _Ends, guilty: Mapping[str, float], on: str) -> Diagnosis:
    """Layers that miss the requirement alone; what leaves the range among them is no rounding."""
    first = next(iter(guilty))
    beyond = ((Cause.OVERFLOW, ends.over), (Cause.UNDERFLOW, ends.under))
    found = [
        ends.cause(cause, [n for n in guilty if n in those])
        for cause, those in beyond
        if first in those
    ]
    if not found:
        sentence = (
            f"{ends.precision.value.upper()} rounding in {_named(list(guilty))} alone misses the "
            f"requirement ({times(max(guilty.values()))}{on})."
        )
        found = [CauseFound(Cause.ROUNDING, tuple(guilty), sentence)]
    return Diagnosis.of(found)


class _Ends:
    """Layers whose values leave the range of ``precision``, ``over`` or ``under`` it."""

    def __init__(self, table: pd.DataFrame, suspects: Suspects, precision: Precision) -> None:
        self.precision = precision
        self._suspects = suspects
        self._rows = table.set_index("layer")
        names = [str(n) for n in self._rows.index]
        beyond = {str(n) for n in self._rows.index[self._rows["overflows"].astype(bool)]}
        divides = {str(n) for n in self._rows.index[self._rows["underflows"].astype(bool)]}
        self.divides = divides - set(suspects.heavy)
        self.over = [n for n in names if n in beyond or n in suspects.heavy]
        tiny = self._tiny()
        lost = self._with_movers(divides | set(suspects.lost) | tiny)
        self.under = [n for n in names if n in lost and n not in self.over]
        # Loud inputs break them at the one end, quiet ones at the other: no pins tell these apart.
        self.both = [n for n in names if n in divides & beyond]
        self.lost = [n for n in names if n in suspects.lost]

    def _with_movers(self, layers: Set[str]) -> set[str]:
        """``layers`` and those that only move on what they give: rounded there, it is as lost."""
        found, left = set(layers), list(layers)
        while left:
            new = set(self._suspects.movers.get(left.pop(), ())) - found
            found |= new
            left += new
        return found

    def _tiny(self) -> frozenset[str]:
        """The layers whose every value loses bits by its size."""
        if self.precision not in SMALLEST_SUBNORMAL:
            return frozenset()
        size = self._size()
        few_bits = (size > 0.0) & (size <= _TINY_STEPS * SMALLEST_SUBNORMAL[self.precision])
        return frozenset(str(n) for n in self._rows.index[few_bits])

    def _size(self) -> pd.Series[float]:
        """The largest magnitude that each layer gives in FP32."""
        found = self._rows[["ref_min", "ref_max"]].abs().max(axis=1)
        return found.fillna(0.0)

    def cause(self, cause: Cause, layers: Sequence[str]) -> CauseFound:
        """``cause`` in ``layers``, with the number that matters."""
        said = self._overflow(layers) if cause is Cause.OVERFLOW else self._underflow(layers)
        return CauseFound(cause, tuple(layers), said)

    def _overflow(self, layers: Sequence[str]) -> str:
        name, largest = self.precision.value.upper(), f"{LARGEST[self.precision]:,.6g}"
        held = next((self._suspects.heavy[n] for n in layers if n in self._suspects.heavy), "")
        size = self._size()
        largest_of = max(layers, key=lambda n: size.get(n, 0.0))
        if held:
            why = f"{held} exceeds {name}'s {largest}"
        elif size.get(largest_of, 0.0) > LARGEST[self.precision]:
            why = f"values of {largest_of} reach {size[largest_of]:.3g}, beyond {name}'s {largest}"
        else:
            why = f"values or constants beyond {name}'s {largest} become infinite there"
        return f"{name} overflows in {_named(layers)}: {why}."

    def _underflow(self, layers: Sequence[str]) -> str:
        name, size = self.precision.value.upper(), self._size()
        held = [self._suspects.lost[n] for n in layers if n in self._suspects.lost]
        tiny = [n for n in layers if n in self._tiny()]
        if held:
            why = "; ".join(held[:2])
        elif tiny:
            why = f"values of {tiny[0]} are {size[tiny[0]]:.3g} at most and lose their bits"
        else:
            why = "small values become zero there, and what divides by them is lost"
        return f"{name} underflows in {_named(layers)}: {why}."


def _beyond_an_end(
    ends: _Ends,
    pinned: Callable[[frozenset[str]], tuple[float, float]],
    guilty: frozenset[str],
    misses_within: Callable[[], bool],
) -> list[CauseFound]:
    """Overflow and underflow, where they make half of the error left without the other.

    The larger comes first. Layers that are ``guilty`` of a miss alone are named first, and where
    there are such, they alone are named of underflow.
    """
    if not ends.over and not ends.under:
        return []
    over, under = frozenset(ends.over), frozenset(ends.under)
    before, neither = pinned(over | under)
    if math.isnan(before) or before <= 1.0:
        return []
    without_over = pinned(over)[1] if over and under else (neither if over else before)
    without_under = pinned(under)[1] if over and under else (neither if under else before)
    found: list[tuple[float, CauseFound]] = []
    if over and _accounts_for(without_under, neither):
        named = sorted(ends.over, key=lambda n: n not in guilty)
        found.append((without_under, ends.cause(Cause.OVERFLOW, named)))
    if under and _accounts_for(without_over, neither):
        named = [n for n in ends.under if n in guilty or n in ends.divides] or ends.under
        found.append((without_over, ends.cause(Cause.UNDERFLOW, named)))
    if (ends.both or ends.lost) and [its.name for _, its in found] == [Cause.OVERFLOW]:
        also = [*ends.both, *(ends.lost if ends.both or misses_within() else [])]
        if also:
            found.append((0.0, ends.cause(Cause.UNDERFLOW, list(dict.fromkeys(also)))))
    return [cause for _, cause in sorted(found, key=lambda one: -one[0])]


def _accounts_for(left: float, neither: float) -> bool:
    """Whether the error goes, or is halved at least, from what is ``left`` without these pins."""
    cured = math.isinf(left) and math.isfinite(neither)
    return cured or (1.0 < left < math.inf and neither <= left / 2.0)


def _breaks_first(table: pd.DataFrame) -> str | None:
    """The first layer whose values are not finite with everything reduced, but are alone.

    Small errors may meet in it, as zeros in a quotient.
    """
    if "finite" not in table:
        return None
    broken = table[~table["finite"].astype(bool) & table["ref_max"].notna()]  # and was computed
    if broken.empty or not broken["introduced_finite"].iloc[0]:
        return None
    return str(broken["layer"].iloc[0])


def _spread(
    name: str,
    base: Evaluation,
    table: pd.DataFrame,
    sensitivity: Sensitivity,
    every: int,
    evaluated: int,
    where: str,
) -> Diagnosis:
    """What is said where no layer of ``every`` that was measured misses the requirement alone.

    Or none of the first ``evaluated`` on all given inputs, where not all suspects were asked.
    """
    seen = "" if base.verdict.passed else f" ({times(base.score, base.verdict)}{where})"
    begins = _breaks_first(table) if math.isinf(base.score) else None
    more = f" What is not finite begins in {begins!r}." if begins is not None else ""
    count = len(sensitivity.sensitivities)
    if count < min(every, _SPREAD_LAYERS):
        return Diagnosis(
            Cause.UNKNOWN,
            f"The {name} error{seen} is that of a few layers or of many: there was time to measure "
            f"{count} of {every} alone.{more}",
        )
    samples = len(sensitivity.samples)
    on = f", on the {samples} inputs and copies where each was run alone" if where else ""
    which = f"{count}{f' of {every}' if count < every else ''} measured layers"
    if evaluated:
        which, on = f"{evaluated} layers that do most to one input", ""
    return Diagnosis(
        Cause.ACCUMULATION,
        f"The {name} error accumulates{seen}: none of the {which} misses the requirement alone"
        f"{on}.{more}",
    )


def _evaluated(suspects: Sequence[str], alone: Callable[[str], Evaluation]) -> dict[str, float]:
    """What each of ``suspects`` scores by itself, until as many miss as are named."""
    found: dict[str, float] = {}
    for name in suspects:
        found[name] = alone(name).score
        if len(_guilty(found)) == _SHOWN:
            break
    return found


def _guilty(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: score for name, score in scores.items() if not score <= 1.0}


def _named(layers: Sequence[str]) -> str:
    shown, more = ", ".join(layers[:_SHOWN]), len(layers) - _SHOWN
    if more <= 0:
        return shown
    return f"{shown} and {more} more layers" if more > 1 else f"{shown} and one more layer"


@dataclass(frozen=True)
class Triage:
    """The cause, and what the search begins with.

    ``base`` is the plan without pins, with the precision that a pin really runs in; ``pinned`` the
    emulated evaluation of all pins; ``limit`` the share of the tolerance to search within at first;
    ``ranking`` are all layers, most harmful first; ``unseen`` is None where the given inputs are
    all; ``layers`` is their table, with what breaks on other inputs.
    """

    diagnosis: Diagnosis
    base: PrecisionPlan
    pinned: Evaluation
    sensitivity: Sensitivity
    limit: float
    ranking: tuple[str, ...]
    unseen: UnseenInputs | None
    layers: pd.DataFrame


def _missed_with_all_pins(
    problem: Problem, pinned: Evaluation, emulated: Baselines, engine: EngineBaselines | None
) -> Diagnosis | None:
    """That pinning cannot help, where the requirement is missed with every layer pinned."""
    decided = engine.pinned if engine is not None else pinned
    fp32 = engine.fp32 if engine is not None else emulated.fp32
    # An engine whose FP32 misses is told from its baselines; what is held is new here.
    if decided.verdict.passed or (engine is not None and not problem.kept_reduced):
        return None
    of_held = problem.kept_reduced and fp32.verdict.passed
    return Diagnosis(
        _of_held(problem, decided, emulated) if of_held else Cause.NOT_PRECISION,
        "Even with every layer pinned"
        f"{_but_held(problem)} the "
        f"requirement is missed ({times(decided.score, decided.verdict)}): pinning cannot help."
        f"{blame_reduced(problem, fp32)}",
    )


def _but_held(problem: Problem) -> str:
    return (
        f" but the {counted(len(problem.kept_reduced), 'layer')} of --keep-reduced"
        if problem.kept_reduced
        else ""
    )


def _of_held(problem: Problem, decided: Evaluation, emulated: Baselines) -> Cause:
    """What layers that ``--keep-reduced`` holds do, where FP32 itself passes."""
    layers = emulated.layers
    finite = layers.loc[layers["layer"].isin(problem.kept_reduced), "introduced_finite"].astype(
        bool
    )
    over = decided.verdict is Verdict.NON_FINITE or not finite.all()
    return Cause.OVERFLOW if over else Cause.ROUNDING


_WORST = " on the worst of the inputs and copies measured"


def find_cause(
    problem: Problem,
    context: Context,
    emulated: Baselines,
    engine: EngineBaselines | None,
    unseen: UnseenInputs | None,
) -> Triage | Diagnosis:
    """The cause with what the search needs; a bare diagnosis where pinning cannot help."""
    context.observer.step("triage")
    base = problem.base
    if engine is not None:
        base = base.with_pins_in(engine.pin_precision)
    pinned = context.evaluator.evaluate(base.with_pins(problem.names))
    missed = _missed_with_all_pins(problem, pinned, emulated, engine)
    if missed is not None:
        return missed
    suspicion = suspicion_of(emulated.layers)
    heavy = frozenset(f.where for f in problem.findings if f.kind == "weight-overflow")
    sensitivity = measure_each_alone(problem, context, emulated, unseen, suspicion, heavy)
    if unseen is not None and each_must_hold(problem):
        sensitivity = nearest_on_all(problem, context, base, sensitivity)
    limit = _first_limit(emulated.reduced, pinned, engine)
    layers = layers_seen(problem, context, emulated, sensitivity)
    diagnosis = diagnose_reduced(
        worst_seen(emulated.reduced, unseen).under(limit),
        layers[~layers["layer"].isin(unreached(problem.graph) | problem.source_fp32)],
        sensitivity.under(limit),
        lambda pins: with_pins_there(problem, context, base, pins, unseen),
        problem.settings.precision,
        _suspects(problem, heavy),
        _WORST if unseen is not None else "",
        misses_within=lambda: misses_within(problem, context),
        layers=len(problem.names),
        alone=_alone_on_all(problem, context, emulated, base, limit),
        together=set_size(problem) > 1 or problem.requirements.tells_of_all,
    )
    if engine is not None and not engine.base.worst:
        seen = worst_seen(emulated.reduced, unseen)
        diagnosis = _without_engine(problem, diagnosis, engine.base, seen)
    if emulated.reduced.verdict.passed and engine is None and unseen is not None:
        others = _others(unseen, set_size(problem))
        passed = f"{_given_that_pass(problem, context)} pass, but {others}"
        said = f"{diagnosis.sentence} {passed}."
        diagnosis = replace(diagnosis, sentence=said)
    ranking = _ranking(problem, sensitivity, suspicion, layers)
    return Triage(diagnosis, base, pinned, sensitivity, limit, ranking, unseen, layers)


def _suspects(problem: Problem, heavy: frozenset[str]) -> Suspects:
    """What the constants of the layers say, in words."""
    graph, precision = problem.graph, problem.settings.precision
    searched = set(problem.names)
    movers: dict[str, list[str]] = {}
    made_by = {tensor: layer.name for layer in problem.layers for tensor in layer.outputs}
    for layer in problem.layers:
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
    problem: Problem, diagnosis: Diagnosis, base: Evaluation, emulated: Evaluation
) -> Diagnosis:
    """``diagnosis`` where the reduced engine could not be built or run, for no layer's sake."""
    name = problem.settings.precision.value.upper()
    told = f"The {name} engine could not be built or run ({base.verdict}: {base.note})"
    if emulated.score > 1.0:
        return replace(diagnosis, sentence=f"{told}; by emulation: {diagnosis.sentence}")
    return Diagnosis(
        Cause.UNKNOWN,
        f"{told}, and by emulation {name} meets the requirement: pins are found by trial, and what "
        "the engine does not take is among them.",
    )


def _ranking(
    problem: Problem, sensitivity: Sensitivity, suspicion: Mapping[str, float], layers: pd.DataFrame
) -> tuple[str, ...]:
    """All layers, most harmful first."""
    overflow = layers.loc[~layers["introduced_finite"].astype(bool), "layer"]
    strength = sensitivity.strength
    # Every set needs what breaks alone, be it on other elements, or in another output, than those
    # that are disturbed most; but for what only inputs show that need not hold. What overflows and
    # is finite again at the outputs misses there too. What misses by rounding may hold in a set.
    needed = sensitivity.breaks | sensitivity.must_pin.intersection(overflow)
    breaks = needed if each_must_hold(problem) else frozenset()
    # What was too many to measure stands behind what was, by the error it introduces.
    return tuple(
        sorted(
            problem.names,
            key=lambda n: (n not in breaks, -strength.get(n, -1.0), -suspicion.get(n, -math.inf)),
        )
    )


def _alone_on_all(
    problem: Problem, context: Context, emulated: Baselines, base: PrecisionPlan, limit: float
) -> Callable[[str], Evaluation] | None:
    """What a layer does alone on the given inputs together.

    None where each of them must meet the requirement itself, or all do, and copies do not.
    """
    of_each = each_must_hold(problem) and not problem.requirements.tells_of_all
    if of_each or emulated.reduced.verdict.passed:
        return None
    names = problem.kept_reduced.union(problem.names)
    return lambda name: context.evaluator.evaluate(base.with_pins(names - {name})).under(limit)


def _given_that_pass(problem: Problem, context: Context) -> str:
    """The given inputs, of which a share may miss."""
    known = [context.evaluator.known(problem.base, sample) for sample in problem.samples]
    passed = sum(found is not None and meets(found, 1.0) for found in known)
    if problem.requirements.of_sets or passed == len(known):
        return "The given inputs"
    return f"{passed} of {len(known)} given inputs"


def _others(unseen: UnseenInputs, size: int) -> str:
    """What speaks against everything reduced, which the given inputs pass."""
    against = unseen.refused
    if against is None or not unseen.reduced.verdict.passed:
        return "others like them do not"
    kind = "roundings perturbed" if against.kind == InputKind.PERTURBED else against.kind
    missed = len(against.samples) // size
    return f"{missed} of {against.tested} {kind} {'misses' if missed == 1 else 'miss'} it"


def _first_limit(reduced: Evaluation, pinned: Evaluation, engine: EngineBaselines | None) -> float:
    """The share of the tolerance to search within: 1, unless engine and emulator disagree."""
    if engine is None or engine.base.verdict.passed:  # by luck, else nothing would be searched
        return 1.0
    if reduced.verdict.passed and math.isfinite(engine.base.score):
        # The engine misses what the emulator meets.
        floors = (pinned.score, engine.pinned.score)
        return matching_limit(engine.base.score, reduced.score, floors)
    if not pinned.verdict.passed and engine.pinned.score > 0.0:
        # The engine meets what the emulator misses.
        return max(1.0, SCALED_MARGIN * pinned.score / engine.pinned.score)
    return 1.0
