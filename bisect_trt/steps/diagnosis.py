"""The cause: why the numbers are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import Cause, CauseFound, Diagnosis, InputKind, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.requirements import times
from bisect_trt.metrics.rounding import LARGEST, SMALLEST_SUBNORMAL
from bisect_trt.model.lost_constants import largest_constant, lost_constants
from bisect_trt.model.outputs import unreached
from bisect_trt.search.minimise import SCALED_MARGIN, matching_limit
from bisect_trt.steps.baselines import Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.engine_baselines import EngineBaselines
from bisect_trt.steps.failing_inputs import (
    UnseenInputs,
    measure_each_alone,
    with_pins_there,
    worst_seen,
)
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.sensitivity import Sensitivity, suspicion_of
from bisect_trt.steps.validation_inputs import each_must_hold, set_size

MAX_NAMED = 4
"""The most layers that a sentence names."""

MAX_EVALUATED = 16
"""The most layers that are reduced alone on all given inputs."""


@dataclass(frozen=True)
class Suspects:
    """Layers that the precision cannot hold the constants of, each with words on the number.

    ``heavy``: a constant is beyond the range; ``lost``: little is left of one. ``readers`` are the
    layers that read what a layer gives.
    """

    heavy: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    readers: Mapping[str, frozenset[str]] = field(default_factory=dict)


def diagnose_reduced(
    base: Evaluation,
    table: pd.DataFrame,
    sensitivity: Sensitivity,
    pinned: Callable[[frozenset[str]], tuple[float, float]],
    precision: Precision,
    suspects: Suspects,
    where: str = "",
    *,
    layers: int,
    alone: Callable[[str], Evaluation] | None = None,
    together: bool = False,
) -> Diagnosis:
    """Overflow, underflow, rounding in a few layers, or accumulation over many, as measured.

    ``pinned``: the scores of everything reduced, and of everything but these layers.
    ``alone``: evaluates a layer reduced alone, where the scores of single inputs do not decide.
    """
    # An end of the range is the cause where the layers that leave it account for half of the error;
    # rounding, where a layer misses the requirement alone; else the error accumulates.
    name = precision.value.upper()
    ends = _Ends(table, suspects, precision)
    found, left = _beyond_an_end(ends, pinned, sensitivity.must_pin)
    # What else is wrong shows in the layers reduced alone, which cost nothing more where each input
    # decides for itself.
    if found and (left <= 1.0 or together or alone is not None):
        return Diagnosis.of(found)
    scores = sensitivity.scores
    if together and alone is None and (sensitivity.must_pin or not scores):
        return Diagnosis(
            Cause.UNKNOWN,
            f"Whether few layers make the {name} error, or many, was not measured: what is asked "
            "of several inputs together cannot be asked of each of them.",
        )
    in_order = [str(n) for n in table["layer"]]
    guilty = {n: scores[n] for n in in_order if n in sensitivity.must_pin}
    guilty = dict(sorted(guilty.items(), key=lambda one: -one[1]))
    evaluated = 0
    if alone is not None:
        suspected = list(guilty)
        if not scores:
            strength = sensitivity.strength
            measured = (n for n in in_order if n in strength)
            suspected = sorted(measured, key=lambda n: -strength[n])
        guilty = _guilty(suspected[:MAX_EVALUATED], alone)
        evaluated = MAX_EVALUATED if len(suspected) > MAX_EVALUATED else 0
    if found:
        return Diagnosis.of(_with_more(found, ends, guilty, where))
    if guilty:
        return Diagnosis.of(_missing_alone(ends, guilty, where if alone is None else ""))
    return _spread(name, base, sensitivity, layers, evaluated, where)


def _guilty(suspected: Sequence[str], alone: Callable[[str], Evaluation]) -> dict[str, float]:
    """The scores of layers that miss alone, no more than a sentence names."""
    guilty: dict[str, float] = {}
    for name in suspected:
        score = alone(name).score
        if not score <= 1.0:
            guilty[name] = score
        if len(guilty) == MAX_NAMED:
            break
    return guilty


def _with_more(
    found: Sequence[CauseFound], ends: _Ends, guilty: Mapping[str, float], on: str
) -> list[CauseFound]:
    """``found``, and why other layers miss the requirement alone."""
    names = {cause.name for cause in found}
    named = frozenset(ends.over) if Cause.OVERFLOW in names else frozenset()
    if Cause.UNDERFLOW in names:
        named |= ends.under_and_readers()
    others = {n: score for n, score in guilty.items() if n not in named}
    more = {cause.name: cause for cause in _missing_alone(ends, others, on)}
    joined = [
        ends.cause(one.name, [*one.layers, *more.pop(one.name).layers]) if one.name in more else one
        for one in found
    ]
    return [*joined, *more.values()]


def _missing_alone(ends: _Ends, guilty: Mapping[str, float], on: str) -> list[CauseFound]:
    """Why layers miss the requirement alone: by leaving the range or by rounding."""
    found: list[CauseFound] = []
    left = dict(guilty)
    for cause, beyond in (
        (Cause.OVERFLOW, frozenset(ends.over)),
        (Cause.UNDERFLOW, ends.under_and_readers()),
    ):
        if named := [n for n in left if n in beyond]:
            found.append(ends.cause(cause, named))
            left = {n: score for n, score in left.items() if n not in beyond}
    if broken := [n for n, score in left.items() if math.isinf(score)]:
        # The table is made from a few inputs, and these layers leave the range on others.
        found.append(ends.cause(Cause.OVERFLOW, broken))
        left = {n: score for n, score in left.items() if n not in broken}
    if left:
        sentence = (
            f"{ends.precision.value.upper()} rounding in {_named(list(left))} alone misses the "
            f"requirement ({times(max(left.values()))}{on})."
        )
        found.append(CauseFound(Cause.ROUNDING, tuple(left), sentence))
    # The cause of the layer that misses most comes first.
    order = list(guilty)
    return sorted(found, key=lambda one: min(order.index(n) for n in one.layers))


class _Ends:
    """Layers whose values leave the range of ``precision``: ``over`` or ``under`` it."""

    def __init__(self, table: pd.DataFrame, suspects: Suspects, precision: Precision) -> None:
        self.precision = precision
        self._suspects = suspects
        rows = table.set_index("layer")
        names = [str(n) for n in rows.index]
        overflowing = {str(n) for n in rows.index[rows["overflows"].astype(bool)]}
        divided = {str(n) for n in rows.index[rows["underflows"].astype(bool)]}
        # A constant beyond the range gives infinities too where all values are in range.
        self.divides = divided - set(suspects.heavy)
        self.over = [n for n in names if n in overflowing or n in suspects.heavy]
        self._size = rows[["ref_min", "ref_max"]].abs().max(axis=1).fillna(0.0)
        self._tiny = self._lose_bits()
        lost = divided | set(suspects.lost) | self._tiny
        self.under = [n for n in names if n in lost and n not in self.over]

    def _lose_bits(self) -> frozenset[str]:
        """The layers whose every value loses bits by its size."""
        if self.precision not in SMALLEST_SUBNORMAL:
            return frozenset()
        # Values of at most 50 of the smallest steps are rounded by one in a hundred or more.
        few_bits = (self._size > 0.0) & (self._size <= 50.0 * SMALLEST_SUBNORMAL[self.precision])
        return frozenset(str(n) for n in self._size.index[few_bits])

    def under_and_readers(self) -> frozenset[str]:
        """The layers under the range, and those that read them: a reduced one rounds them anew."""
        readers = self._suspects.readers
        found = frozenset(self.under).union(*(readers.get(n, ()) for n in self.under))
        return found.difference(self.over)

    def cause(self, cause: Cause, layers: Sequence[str]) -> CauseFound:
        """``cause`` in ``layers``, with the number that matters."""
        sentence = self._overflow(layers) if cause is Cause.OVERFLOW else self._underflow(layers)
        return CauseFound(cause, tuple(layers), sentence)

    def _overflow(self, layers: Sequence[str]) -> str:
        name, largest = self.precision.value.upper(), f"{LARGEST[self.precision]:,.6g}"
        heavy = next((self._suspects.heavy[n] for n in layers if n in self._suspects.heavy), "")
        size = self._size
        largest_of = max(layers, key=lambda n: size.get(n, 0.0))
        if heavy:
            why = f"{heavy} exceeds {name}'s {largest}"
        elif size.get(largest_of, 0.0) > LARGEST[self.precision]:
            why = f"values of {largest_of} reach {size[largest_of]:.3g}, beyond {name}'s {largest}"
        else:
            why = f"values or constants beyond {name}'s {largest} become infinite there"
        return f"{name} overflows in {_named(layers)}: {why}."

    def _underflow(self, layers: Sequence[str]) -> str:
        name = self.precision.value.upper()
        lost = [self._suspects.lost[n] for n in layers if n in self._suspects.lost]
        tiny = next((n for n in layers if n in self._tiny), None)
        if lost:
            why = "; ".join(lost[:2])
        elif tiny is not None:
            why = f"values of {tiny} are {self._size[tiny]:.3g} at most and lose their bits"
        else:
            why = "small values become zero there, and what divides by them is lost"
        return f"{name} underflows in {_named(layers)}: {why}."


def _beyond_an_end(
    ends: _Ends,
    pinned: Callable[[frozenset[str]], tuple[float, float]],
    guilty: frozenset[str],
) -> tuple[list[CauseFound], float]:
    """Overflow and underflow, the larger first, where each makes half of the error.

    With them the score without any of their layers.
    """
    if not ends.over and not ends.under:
        return [], math.inf
    over, under = frozenset(ends.over), ends.under_and_readers()
    # Four runs tell the ends apart: with nothing pinned, one end pinned, the other, and both.
    before, neither = pinned(over | under)
    if math.isnan(before) or before <= 1.0:
        return [], neither
    without_over = pinned(over)[1] if over and under else (neither if over else before)
    without_under = pinned(under)[1] if over and under else (neither if under else before)
    found: list[tuple[float, CauseFound]] = []
    if over and _accounts_for(without_under, neither):
        named = sorted(ends.over, key=lambda n: n not in guilty)
        found.append((without_under, ends.cause(Cause.OVERFLOW, named)))
    if under and _accounts_for(without_over, neither):
        # Many layers hold small values that matter to nothing.
        named = [n for n in ends.under if n in guilty or n in ends.divides] or ends.under
        found.append((without_over, ends.cause(Cause.UNDERFLOW, named)))
    return [cause for _, cause in sorted(found, key=lambda one: -one[0])], neither


def _accounts_for(left: float, neither: float) -> bool:
    """Whether the error goes, or is halved at least, from what is ``left`` without these pins."""
    cured = math.isinf(left) and math.isfinite(neither)
    return cured or (1.0 < left < math.inf and neither <= left / 2.0)


def _spread(
    name: str, base: Evaluation, sensitivity: Sensitivity, layers: int, evaluated: int, where: str
) -> Diagnosis:
    """The diagnosis where no measured layer, or none of ``evaluated`` suspects, misses alone."""
    score = "" if base.verdict.passed else f" ({times(base.score, base.verdict)}{where})"
    count = len(sensitivity.sensitivities)
    if count < min(layers, 8):  # of so few it is not said that the error is spread over many
        return Diagnosis(
            Cause.UNKNOWN,
            f"The {name} error{score} is that of a few layers or of many: there was time to "
            f"measure {count} of {layers} alone.",
        )
    samples = len(sensitivity.samples)
    on = f", on the {samples} inputs and copies where each was run alone" if where else ""
    which = f"{count}{f' of {layers}' if count < layers else ''} measured layers"
    if evaluated:
        which, on = f"{evaluated} layers that do most to one input", ""
    return Diagnosis(
        Cause.ACCUMULATION,
        f"The {name} error accumulates{score}: none of the {which} misses the requirement alone"
        f"{on}.",
    )


def _named(layers: Sequence[str]) -> str:
    shown, more = ", ".join(layers[:MAX_NAMED]), len(layers) - MAX_NAMED
    if more <= 0:
        return shown
    return f"{shown} and {more} more layers" if more > 1 else f"{shown} and one more layer"


@dataclass(frozen=True)
class Triage:
    """The cause, and what the search begins with.

    ``base``: the plan without pins, with the precision that a pin really runs in.
    ``pinned``: the emulated evaluation of all pins.
    ``limit``: the share of the tolerance to search within at first.
    ``ranking``: all layers, most harmful first; ``broken`` are those that every set needs.
    ``unseen``: None where the search is judged on the given inputs only.
    """

    diagnosis: Diagnosis
    base: PrecisionPlan
    pinned: Evaluation
    sensitivity: Sensitivity
    limit: float
    ranking: tuple[str, ...]
    broken: frozenset[str]
    unseen: UnseenInputs | None


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
    limit = _first_limit(emulated.reduced, pinned, engine)
    layers = emulated.layers
    worst = worst_seen(emulated.reduced, unseen)
    diagnosis = diagnose_reduced(
        worst.under(limit),
        layers[~layers["layer"].isin(unreached(problem.graph) | problem.source_fp32)],
        sensitivity.under(limit),
        lambda pins: with_pins_there(problem, context, base, pins, unseen),
        problem.settings.precision,
        _suspects(problem, heavy),
        " on the worst of the inputs and copies measured" if unseen is not None else "",
        layers=len(problem.names),
        alone=_alone_on_all(problem, context, emulated, base, limit),
        together=set_size(problem) > 1 or problem.requirements.tells_of_all,
    )
    if engine is not None and not engine.base.worst:
        diagnosis = _without_engine(problem, diagnosis, engine.base, worst)
    if emulated.reduced.verdict.passed and engine is None and unseen is not None:
        but = f"The given inputs pass, but {_others(problem, unseen)}."
        diagnosis = replace(diagnosis, sentence=f"{diagnosis.sentence} {but}")
    broken = _broken(problem, sensitivity, layers)
    ranking = _ranking(problem, sensitivity, suspicion, broken)
    return Triage(diagnosis, base, pinned, sensitivity, limit, ranking, broken, unseen)


def _missed_with_all_pins(
    problem: Problem, pinned: Evaluation, emulated: Baselines, engine: EngineBaselines | None
) -> Diagnosis | None:
    """The diagnosis where the requirement is missed with every layer pinned."""
    decided = engine.pinned if engine is not None else pinned
    fp32 = engine.fp32 if engine is not None else emulated.fp32
    # That an engine's FP32 misses was found in its baselines.
    if decided.verdict.passed or (engine is not None and not problem.kept_reduced):
        return None
    cause, but, cure = Cause.NOT_PRECISION, "", ""
    if problem.kept_reduced:
        but = f" but the {counted(len(problem.kept_reduced), 'layer')} of --keep-reduced"
        if fp32.verdict.passed:
            layers = emulated.layers.set_index("layer")["introduced_finite"].astype(bool)
            finite = layers[layers.index.isin(problem.kept_reduced)].all()
            overflows = decided.verdict is Verdict.NON_FINITE or not finite
            cause = Cause.OVERFLOW if overflows else Cause.ROUNDING
            cure = (
                " With what --keep-reduced holds pinned too the requirement is met "
                f"({times(fp32.score)})."
            )
    return Diagnosis(
        cause,
        f"Even with every layer pinned{but} the requirement is missed "
        f"({times(decided.score, decided.verdict)}): pinning cannot help.{cure}",
    )


def _suspects(problem: Problem, heavy: frozenset[str]) -> Suspects:
    graph, precision = problem.graph, problem.settings.precision
    searched = set(problem.names)
    lost = lost_constants(graph, precision)
    return Suspects(
        {name: largest_constant(graph, name) for name in sorted(heavy & searched)},
        {name: found.words(precision) for name, found in lost.items() if name in searched},
        _readers(problem),
    )


def _readers(problem: Problem) -> dict[str, frozenset[str]]:
    """The searched layers that read what each of them gives."""
    searched = set(problem.names)
    layers = [layer for layer in problem.layers if layer.name in searched]
    by_tensor: dict[str, list[str]] = {}
    for layer in layers:
        for tensor in layer.inputs:
            by_tensor.setdefault(tensor, []).append(layer.name)
    return {
        layer.name: frozenset(name for o in layer.outputs for name in by_tensor.get(o, ()))
        for layer in layers
    }


def _without_engine(
    problem: Problem, diagnosis: Diagnosis, base: Evaluation, emulated: Evaluation
) -> Diagnosis:
    """``diagnosis`` where the reduced engine could not be built or run, for no layer's sake."""
    name = problem.settings.precision.value.upper()
    failed = f"The {name} engine could not be built or run ({base.verdict}: {base.note})"
    if emulated.score > 1.0:
        return replace(diagnosis, sentence=f"{failed}; by emulation: {diagnosis.sentence}")
    return Diagnosis(
        Cause.UNKNOWN,
        f"{failed}, and by emulation {name} meets the requirement: pins are found by trial, and "
        "what the engine does not take is among them.",
    )


def _broken(problem: Problem, sensitivity: Sensitivity, layers: pd.DataFrame) -> frozenset[str]:
    """The layers that every set needs: those that leave the range and break the outputs alone."""
    # Even on elements that are not disturbed most, unless inputs may miss. What overflows and is
    # finite again at the outputs breaks too; what misses by rounding may hold in a set.
    if not each_must_hold(problem):
        return frozenset()
    overflow = layers.loc[~layers["introduced_finite"].astype(bool), "layer"]
    return sensitivity.breaks | sensitivity.must_pin.intersection(overflow)


def _ranking(
    problem: Problem,
    sensitivity: Sensitivity,
    suspicion: Mapping[str, float],
    broken: frozenset[str],
) -> tuple[str, ...]:
    """All layers, most harmful first."""
    strength = sensitivity.strength

    def place(name: str) -> tuple[bool, float, float]:
        # Layers that were not measured stand behind, by the error that they introduce.
        return name not in broken, -strength.get(name, -1.0), -suspicion.get(name, -math.inf)

    return tuple(sorted(problem.names, key=place))


def _alone_on_all(
    problem: Problem, context: Context, emulated: Baselines, base: PrecisionPlan, limit: float
) -> Callable[[str], Evaluation] | None:
    """An evaluation of one reduced layer on the given inputs; None where each must hold itself."""
    # Nor does it help where all of them pass, and copies miss.
    of_each = each_must_hold(problem) and not problem.requirements.tells_of_all
    if of_each or emulated.reduced.verdict.passed:
        return None
    names = problem.kept_reduced.union(problem.names)
    return lambda name: context.evaluator.evaluate(base.with_pins(names - {name})).under(limit)


def _others(problem: Problem, unseen: UnseenInputs) -> str:
    """The words for what speaks against everything reduced, which the given inputs pass."""
    refusal = unseen.refused
    if refusal is None or not unseen.reduced.verdict.passed:
        return "others like them do not"
    kind = "roundings perturbed" if refusal.kind == InputKind.PERTURBED else refusal.kind
    missed = len(refusal.samples) // set_size(problem)
    return f"{missed} of {refusal.tested} {kind} {'misses' if missed == 1 else 'miss'} it"


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
