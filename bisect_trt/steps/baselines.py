"""The original in FP32, the plan that reduces everything, and what they show."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.base.display import some_of
from bisect_trt.base.errors import BadInputError, RunnerFailedError, one_line
from bisect_trt.base.outcomes import WRITTEN_OUT, Cause, Diagnosis, Finding, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.cache import Row
from bisect_trt.evaluate.result import Evaluation, meets
from bisect_trt.metrics.arrays import Arrays, largest_finite
from bisect_trt.metrics.decisions import BoxMatch, choices, places_of
from bisect_trt.metrics.errors import SHAPE_CHANGED
from bisect_trt.metrics.requirements import Requirements, times
from bisect_trt.metrics.rounding import LARGEST, SMALLEST_SUBNORMAL, rounded
from bisect_trt.model.emulated import SWALLOWING
from bisect_trt.model.inputs import input_specs
from bisect_trt.model.layers import Layer
from bisect_trt.model.outputs import decided_outputs
from bisect_trt.runners.reference import Reference
from bisect_trt.steps.context import Context
from bisect_trt.steps.given_checks import note_alike, note_few_differ, note_near_ties
from bisect_trt.steps.layer_errors import trace_layers
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.validation_inputs import missed_on

_MOST_CHECKED = 4

_OF_RANGE = ("rel_range", "psnr_db")
"""Metrics of an error beside the range of the reference's values, or of what they are where all are
the same."""


def check_reference(result: Evaluation, requirements: Requirements) -> None:
    """Refuse a reference of which nothing can be compared: every plan would pass.

    Raises:
        BadInputError: names the output.
    """
    looked_at = {item.output for item in requirements.items}
    seen = {n: e for n, e in result.worst.items() if None in looked_at or n in looked_at}
    if seen and not any(error.elements for error in seen.values()):
        raise BadInputError(
            f"output {next(iter(seen))!r} is empty on the given inputs, so there is nothing to "
            "compare: give inputs for which the model answers"
        )
    for name, error in seen.items():
        if error.elements and error.ref_nonfinite == error.elements:
            raise BadInputError(
                f"output {name!r} of the FP32 reference is NaN or infinite everywhere, so there is "
                "nothing to compare: look at the model and its inputs, or name the other outputs "
                "in --requirement (OUTPUT:METRIC<=VALUE)"
            )


def _is_single(problem: Problem, fp32: Evaluation, name: str) -> bool:
    """Whether the output is a single value for inputs of these shapes, whatever they hold: not
    where what is found in them decides.
    """
    if name not in fp32.worst or fp32.worst[name].elements != len(problem.samples):
        return False
    declared = next(o for o in problem.graph.proto.graph.output if o.name == name).type.tensor_type
    taken = {dim for spec in input_specs(problem.graph.proto) for dim in spec.shape or ()}
    dims = declared.shape.dim
    return declared.HasField("shape") and all(
        dim.dim_value == 1 or dim.dim_param in taken for dim in dims
    )


def check_decisions(problem: Problem, context: Context, fp32: Evaluation) -> None:
    """Refuse a top-K of outputs that have no more values than K, an argmax of one channel, and a
    cosine of single values, which sees their signs alone: whatever a plan does is right.

    Raises:
        BadInputError: names the condition and the outputs.
    """
    items = problem.requirements.items
    asked = [item for item in items if places_of(item.metric)]
    cosines = [item for item in items if item.metric == "cosine"]
    looked = evenly(problem.samples, _MOST_CHECKED) if asked else []
    references = [context.references.of(sample) for sample in looked]
    for item in cosines:
        if all(_is_single(problem, fp32, n) for n in fp32.worst if item.output in (None, n)):
            raise BadInputError(
                f"--requirement {item.text}: nearly always true, for of a single value the cosine "
                "sees the sign alone; ask for max_abs or atol"
            )
    for item in (item for item in cosines if item.output is None):
        for name in (n for n in fp32.worst if _is_single(problem, fp32, n)):
            message = (
                f"output {name!r} holds one value, of which the cosine sees the sign alone, so "
                f"{item.text} is not asked of it: add --requirement '{name}:max_abs<=X'"
            )
            context.note(Finding("single-value", name, message))
    for item in asked:
        names = [n for n in references[0] if item.output in (None, n)]
        among = {n: _choices(item.metric, [of[n] for of in references]) for n in names}
        if all(size is not None and size <= places_of(item.metric) for size in among.values()):
            said = ", ".join(f"{name!r} has {size}" for name, size in among.items())
            raise BadInputError(
                f"--requirement {item.text}: always true, for it chooses among the values along "
                f"one axis, of which output {said}; ask for another output or metric"
            )


def _choices(metric: str, outputs: Sequence[NDArray[Any]]) -> int | None:
    """The most values that ``metric`` chooses among in one of ``outputs``."""
    found = [choices(metric, array) for array in outputs]
    return max((size for size in found if size is not None), default=None)


def note_single_values(problem: Problem, context: Context, fp32: Evaluation) -> None:
    """Say that an output of one value has no range that an error could be held against."""
    whole = decided_outputs(problem.graph, problem.names)
    for item in problem.requirements.items:
        if item.metric not in _OF_RANGE:
            continue
        for name in (n for n in fp32.worst if item.output in (None, n)):
            if name not in whole and _is_single(problem, fp32, name):
                message = (
                    f"output {name!r} holds one value, which has no range: {item.metric} is of the "
                    "value itself, and one near zero asks for FP32 everywhere; where that is not "
                    f"meant, ask for an error that may be made: --requirement '{name}:max_abs<=X'"
                )
                context.note(Finding("single-value", name, message))


def check_model(problem: Problem, context: Context, fp32: Evaluation) -> None:
    """Strict FP32 misses: not of the model's making where the emulator cannot run what it writes,
    or where ONNX's converter made another model of it.

    Raises:
        BadInputError: says which opset is asked for.
    """
    graph, raised = problem.graph, context.emulator.capable
    if raised is graph and fp32.worst:
        return
    way = ""
    if raised is not graph:
        way = f" at opset {raised.opset}, which {problem.settings.precision.value} needs"
        samples = evenly(problem.samples, _MOST_CHECKED)
        exact = [context.references.of(sample) for sample in samples]
        try:
            other = Reference(raised)
            score = _together(problem, exact, [other.outputs(sample) for sample in samples])
        except (BadInputError, RunnerFailedError) as error:
            way += f" ({one_line(error, 160)})"
        else:
            if score <= 1.0 and fp32.worst:
                return
            way += f" (ONNX's converter made another model of opset {graph.opset})" * (score > 1.0)
    if fp32.worst:
        raise BadInputError(
            f"{problem.model.name}: computes something else{way}; export it again with that opset"
        )
    raise BadInputError(
        f"{problem.model.name}: cannot be emulated{way}: {fp32.note or fp32.verdict.value}; "
        "export it "
        "again with another opset"
    )


def check_metrics(problem: Problem, context: Context) -> None:
    """Strict FP32 misses: the fault of a metric of the user's where it refuses the reference
    itself.

    Raises:
        BadInputError: names the condition.
    """
    if not problem.requirements.metrics and not problem.requirements.collective:
        return
    samples = evenly(problem.samples, _MOST_CHECKED)
    references = [context.references.of(sample) for sample in samples]
    asked, share = problem.requirements, problem.settings.share_of_given
    for item in asked.items:
        if item.metric not in {*asked.metrics, *asked.collective}:
            continue
        alone = replace(asked, items=(item,))
        values = [alone.judge(outputs, outputs).values for outputs in references]
        told = alone.judge_all(references, references)
        if alone.together(values, share, told) > 1.0:
            worst = max(told or [of_one[0] for of_one in values], key=item.score_of)
            if isinstance(asked.metrics.get(item.metric), BoxMatch):
                raise BadInputError(
                    f"--requirement {item.text!r}: {worst:g} of the reference's boxes match "
                    "themselves: they have no area as they are read; name their layout, such as "
                    "layout=xywh, or their slice"
                )
            raise BadInputError(
                f"--metric {item.metric}: it gives {worst:g} for the reference beside itself, "
                f"which misses {item.text!r}: the metric or the requirement is wrong"
            )


def _together(problem: Problem, references: Sequence[Arrays], found: Sequence[Arrays]) -> float:
    """The score of several inputs' outputs beside the reference's, by all that is asked."""
    asked = problem.requirements
    values = [asked.judge(*pair).values for pair in zip(references, found, strict=True)]
    share = problem.settings.share_of_given
    return asked.together(values, share, asked.judge_all(references, found))


MOST_TRACED = 2
"""Each costs two inferences node by node: the table is made from so many inputs as a rule."""

_MORE = 2
"""Inputs beyond :data:`MOST_TRACED` for layers that leave the range on no other."""

_MOST_ASKED, _ASKED_S, _INFERENCES = 16, 8.0, 3.0
"""Of further inputs no more than these are asked where layers leave the range, nor more than fit
into so many seconds as a rule: node by node it takes about three inferences."""


def traced_inputs(problem: Problem, context: Context) -> list[Sample]:
    """Samples spread over the given ones; among them one with values that are not finite, where
    there is any, and those on which layers leave the precision's range that do not on the others:
    where infinities come from must not be missed, and outputs may hide them (a normalisation that
    divides by infinity gives zeros).
    """

    def is_finite(sample: Sample) -> bool:
        found = context.evaluator.known(problem.base, sample)
        return found is None or math.isfinite(found.score)

    chosen = list(evenly(problem.samples, MOST_TRACED))
    if all(map(is_finite, chosen)):
        broken = next((s for s in problem.samples if not is_finite(s)), None)
        chosen[-1:] = [broken] if broken is not None else chosen[-1:]
    taken = {sample.digest for sample in chosen}
    others = [s for s in problem.samples if s.digest not in taken]
    asked = evenly(others, min(len(others), ranges_asked(problem, context.pace.usual_seconds)))
    beyond = _beyond(problem, context, asked)
    if not any(beyond.values()):
        return chosen
    beyond |= _beyond(problem, context, chosen)
    seen = set().union(*(beyond[s.digest] for s in chosen))
    for _ in range(_MORE):
        most = max(asked, key=lambda s: len(beyond[s.digest] - seen))
        if not beyond[most.digest] - seen:
            break
        chosen.append(most)
        seen |= beyond[most.digest]
    return chosen


def ranges_asked(problem: Problem, usual_seconds: float) -> int:
    """On how many given inputs, beyond those of the table, layers are asked for their range."""
    if problem.settings.precision is not Precision.FP16:
        return 0
    fitting = int(_ASKED_S / (_INFERENCES * usual_seconds))
    return max(0, min(len(problem.samples) - MOST_TRACED, _MOST_ASKED, fitting))


def misses_within(problem: Problem, context: Context) -> bool:
    """Whether everything reduced misses a given input on which no layer exceeds the range."""
    known = [(s, context.evaluator.known(problem.base, s)) for s in problem.samples]
    missed = [s for s, found in known if found is not None and not meets(found, 1.0)]
    beyond = _beyond(problem, context, evenly(missed, _MOST_ASKED))
    return any(not layers for layers in beyond.values())


def _beyond(problem: Problem, context: Context, samples: Sequence[Sample]) -> dict[str, set[str]]:
    """The layers that give finite values beyond the range, by the samples' digests; recalled from
    the cache where it is there.
    """
    precision = problem.settings.precision
    names = set(problem.names)
    found: dict[str, set[str]] = {}
    for number, sample in enumerate(samples):
        key = context.evaluator.key("beyond the range", precision.value, sample.digest)
        known = context.cache.recall(key)
        if known is None:
            context.observer.progress(number, len(samples), f"ranges on {sample.name}")
            exact = context.emulator.exact(sample, precision)
            layers = set[str]()
            with suppress(RunnerFailedError):  # as far as it comes: the table says what it means
                for name, _, values in exact:
                    if _leaves(largest_finite(values), precision):
                        layers.add(name)
            known = sorted(layers), b""
            context.cache.record([Row(key, "beyond", known[0])])
        found[sample.digest] = names.intersection(known[0])
    return found


def _leaves(size: float, precision: Precision) -> bool:
    if size <= LARGEST[precision]:
        return False
    return bool(np.isinf(rounded(np.full(1, size, np.float32), precision)[0]))


_LOG_LARGEST = math.log(LARGEST[Precision.FP16])
_LOG_SMALLEST = math.log(SMALLEST_SUBNORMAL[Precision.FP16] / 2.0)
"""Below it an exponential is rounded to zero."""

_LARGEST_SQUARED = math.sqrt(LARGEST[Precision.FP16])


def holding_stepped(problem: Problem, context: Context, layers: pd.DataFrame) -> Problem | None:
    """``problem`` with the layers held in FP32 of which a step between leaves FP16's range on the
    given inputs; None where there is none. Of one that must stay reduced it is said.
    """
    if problem.settings.precision is not Precision.FP16:
        return None
    held = set[str]()
    for layer, why in _stepped(problem, layers):
        steps = f"TensorRT computes {layer.name} ({layer.op}) in several FP16 steps: {why}"
        if layer.name in problem.kept_reduced:
            said = f"{steps}; --keep-reduced keeps it there, so let an engine judge"
            context.note(Finding(WRITTEN_OUT, layer.name, said, True))
            continue
        held.add(layer.name)
        context.note(Finding("held", layer.name, f"{steps}; it is kept in FP32"))
    if not held:
        return None
    return replace(
        problem, held_pins=problem.held_pins | held, unsupported=problem.unsupported | held
    )


def _stepped(problem: Problem, layers: pd.DataFrame) -> Iterator[tuple[Layer, str]]:
    low = dict(zip(layers["layer"], layers["ref_min"], strict=True))
    high = dict(zip(layers["layer"], layers["ref_max"], strict=True))
    made_by = {tensor: layer.name for layer in problem.layers for tensor in layer.outputs}
    for layer in problem.layers:
        if layer.name in problem.held_pins or layer.name not in low:
            continue
        why = ""
        if layer.op == "LogSoftmax" and low[layer.name] < _LOG_SMALLEST:
            why = f"a probability becomes 0, and its logarithm, {low[layer.name]:.4g} here, -inf"
        elif layer.op in ("ReduceLogSumExp", "ReduceLogSum") and high[layer.name] > _LOG_LARGEST:
            why = f"the sum, of which {high[layer.name]:.4g} is the logarithm, becomes infinite"
        elif layer.op == "LpNormalization":
            largest = _largest_read(problem, layer, made_by, low, high)
            if largest > _LARGEST_SQUARED:
                why = f"the square of {largest:.4g} becomes infinite"
        if why:
            yield layer, why


def _largest_read(
    problem: Problem,
    layer: Layer,
    made_by: Mapping[str, str],
    low: Mapping[str, float],
    high: Mapping[str, float],
) -> float:
    """The largest magnitude of what ``layer`` reads, 0 where nobody knows."""
    tensor = layer.inputs[0]
    maker = made_by.get(tensor)
    if maker is not None and maker in low:
        return max(abs(low[maker]), abs(high[maker]))
    given = problem.samples[0].arrays.get(tensor)
    return float(np.max(np.abs(given), initial=0.0)) if given is not None else 0.0


_FEW_COMPARED = 90.0
"""Per cent of the elements below which the first line says that the others were not compared."""


@dataclass(frozen=True)
class Baselines:
    """``fp32``, ``tf32`` and ``reduced_first`` (all layers reduced) by the first emulator;
    ``second`` the last by the other one, where the first passes it. ``layers`` has a row a layer.

    ``diagnosis`` is there if the baselines settle the case: strict FP32 fails, or nothing does.
    """

    fp32: Evaluation
    tf32: Evaluation
    reduced_first: Evaluation
    second: Evaluation | None
    layers: pd.DataFrame
    findings: tuple[Finding, ...]
    diagnosis: Diagnosis | None

    def evaluation_seconds(self, samples: int) -> float:
        """About what one emulated inference takes, where ``samples`` were given: that of the
        quickest baseline. A single one may have waited for a busy machine, or a lost worker.
        """
        return quickest_s((self.fp32, self.tf32, self.reduced_first), samples)

    @property
    def reduced(self) -> Evaluation:
        """All layers reduced, by the emulator that it is worst on: the score that is shown, and
        that both must pass.
        """
        return _worse(self.reduced_first, self.second)

    def by_label(self) -> dict[str, Evaluation]:
        """The baselines as rows of the outputs table."""
        rows = {r.plan.base.value: r for r in (self.fp32, self.tf32, self.reduced_first)}
        if self.second is not None:
            rows[f"{self.second.plan.base.value}, second emulator"] = self.second
        return rows


def quickest_s(found: Sequence[Evaluation], samples: int) -> float:
    """What an emulated inference takes by the quickest of a few evaluations: the first opens a
    session, and starts a worker.
    """
    return min(result.seconds for result in found) / max(1, samples)


def measure_baselines(problem: Problem, context: Context) -> Baselines:
    """Run the whole network at each precision, then trace the layers."""
    context.observer.step("baselines")
    precision = problem.settings.precision
    plans = [PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.TF32), problem.base]
    fp32, tf32, reduced = (context.evaluator.evaluate(plan) for plan in plans)
    context.pace.took(quickest_s((fp32, tf32, reduced), len(problem.samples)))
    if not fp32.verdict.passed:
        check_metrics(problem, context)
        check_model(problem, context, fp32)
    check_reference(fp32, problem.requirements)
    check_decisions(problem, context, fp32)
    note_single_values(problem, context, fp32)
    note_alike(problem, context)
    findings = context.found(_findings(fp32, tf32, reduced, precision, problem.requirements.rows))
    layers = trace_layers(problem, context, traced_inputs(problem, context))
    if not reduced.verdict.passed:
        note_near_ties(problem, context)
        note_few_differ(problem, context)
    second = None
    if reduced.verdict.passed:
        second = context.second.evaluate(problem.base)
    last = _worse(reduced, second)
    # An engine has a word of its own on everything that strict FP32 does not settle, and that the
    # given inputs pass does not mean that others would.
    settled = not fp32.verdict.passed or (
        context.engine is None and (problem.settings.fitted or not last.verdict.passed)
    )
    where = missed_on(problem, context.evaluator, fp32.plan) + _reduced_already(problem)
    if fp32.verdict is Verdict.NON_FINITE:
        where += _beyond_its_type(problem, context) or _swallowed(problem)
    diagnosis = _diagnose(fp32, tf32, last, precision, where) if settled else None
    return Baselines(fp32, tf32, reduced, second, layers, findings, diagnosis)


def _worse(first: Evaluation, second: Evaluation | None) -> Evaluation:
    """The one with the larger score; the first where the second was not asked."""
    return first if second is None or first.score >= second.score else second


def _findings(
    fp32: Evaluation,
    tf32: Evaluation,
    reduced: Evaluation,
    precision: Precision,
    rows: Collection[str],
) -> list[Finding]:
    found = [
        Finding(
            "shape",
            name,
            f"output {name!r} has another shape in {precision.value.upper()} than in FP32: another "
            "number of detections, say; no error tells that, and it counts as a miss: judge what "
            "is made of it with --metric MODULE:FUNCTION, detections with "
            "box_match(boxes,scores)",
            True,
        )
        for name, error in reduced.worst.items()
        if error.nonfinite == SHAPE_CHANGED and name not in rows
    ]
    for name, error in fp32.worst.items():
        if not error.elements:
            message = f"output {name!r} is empty on the given inputs: nothing of it was compared"
            found.append(Finding("reference", name, message, True))
        if error.ref_nonfinite:
            share = 100.0 * (1.0 - error.ref_nonfinite / max(1, error.elements))
            message = (
                f"output {name!r} of the FP32 reference holds {error.ref_nonfinite} NaN or "
                f"infinite values: the errors are those of the other {share:.3g} % of its elements"
            )
            found.append(Finding("reference", name, message, share < _FEW_COMPARED))
    spoilt = fp32.verdict.passed and not tf32.verdict.passed
    if precision is not Precision.TF32 and spoilt:
        message = (
            f"TF32 alone misses the requirement ({times(tf32.score, tf32.verdict)}): turn it off "
            "in the engine, pins cannot cure it."
        )
        found.append(Finding("tf32", "", message))
    return found


def nothing_to_pin(reduced: Evaluation, precision: Precision) -> Diagnosis:
    """The case is settled: the reduced precision is good enough as it is."""
    held = len(reduced.plan.pinned)
    but = f" but what is held in FP32 (layers: {held})" if held else ""
    return Diagnosis(
        Cause.NONE,
        f"Everything{but} in {precision.value.upper()} meets the requirement "
        f"({times(reduced.score)}); nothing {'else ' if held else ''}needs to be pinned.",
    )


def _reduced_already(problem: Problem) -> str:
    """What strict FP32 may miss by where the source itself is reduced."""
    told = [f.message for f in problem.findings if f.kind == "already-reduced" and f.weighty]
    return f" But {told[0]}." if told else ""


def _beyond_its_type(problem: Problem, context: Context) -> str:
    """Where an output reaches what its type in the source cannot hold."""
    for name, limit in problem.requirements.limits.items():
        largest = max(
            float(np.abs(context.references.of(s)[name]).max(initial=0.0)) for s in problem.samples
        )
        if largest >= limit:
            return (
                f" Output {name!r} reaches {largest:.3g}, which its type in the source, FP16, "
                "cannot hold: declare that output FLOAT."
            )
    return ""


def _swallowed(problem: Problem) -> str:
    """Where the reference itself may hold NaN that its kernels hide."""
    nodes = zip(problem.graph.proto.graph.node, problem.graph.names, strict=True)
    names = [name for node, name in nodes if node.op_type in SWALLOWING]
    if not names:
        return ""
    return (
        f" FP32 itself may feed NaN or infinite values to {some_of(names, 2)}: ONNX Runtime's "
        "kernel makes numbers of them, which an engine does not."
    )


def _diagnose(
    fp32: Evaluation, tf32: Evaluation, reduced: Evaluation, precision: Precision, where: str
) -> Diagnosis | None:
    """What the whole-network runs already settle; None if the reduced precision is to blame.
    ``where`` says on which inputs FP32 misses.
    """
    if not fp32.verdict.passed:
        return Diagnosis(
            Cause.NOT_PRECISION,
            "Strict FP32 already misses the requirement "
            f"({times(fp32.score, fp32.verdict)}): not a precision problem, and no pin can help. "
            "The model is random or ill-conditioned, the runner computes it differently, or the "
            f"requirement asks for more than FP32 gives.{where}",
        )
    if reduced.verdict.passed:
        return nothing_to_pin(reduced, precision)
    return tf32_to_blame(tf32) if precision is Precision.TF32 else None


def tf32_to_blame(tf32: Evaluation) -> Diagnosis:
    """The case is settled: TF32 was asked for and misses what strict FP32 meets."""
    return Diagnosis(
        Cause.TF32,
        f"TF32 misses the requirement ({times(tf32.score, tf32.verdict)}) and strict FP32 meets "
        "it. TF32 is a switch of the whole engine that no pin can cure: turn it off "
        "(clear_flag(BuilderFlag.TF32), trtexec --noTF32).",
    )
