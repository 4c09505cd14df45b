"""Runs the whole network at each precision by emulation, and traces its layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import WRITTEN_OUT, Cause, Diagnosis, Finding, Verdict
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.arrays import largest_finite
from bisect_trt.metrics.requirements import times
from bisect_trt.metrics.rounding import LARGEST, SMALLEST_SUBNORMAL, rounded
from bisect_trt.model.layers import Layer
from bisect_trt.steps.context import Context
from bisect_trt.steps.given_checks import (
    baseline_findings,
    check_decisions,
    check_metrics,
    check_model,
    check_reference,
    note_alike,
    note_few_differ,
    note_near_ties,
    why_not_finite,
)
from bisect_trt.steps.layer_errors import trace_layers
from bisect_trt.steps.open_runners import baseline_plans
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.validation_inputs import missed_on

MOST_TRACED = 2
"""How many inputs the table of layers is made from as a rule: each costs two node-by-node runs."""

_RANGE_INPUTS = 16
"""The most inputs on which layers are searched that leave the range."""


@dataclass(frozen=True)
class Baselines:
    """The whole network's evaluations by the first emulator, and a row for each of its ``layers``.

    All layers are reduced in ``reduced_first`` and in ``second``, the second emulator's evaluation,
    which is made where the first one passes. ``diagnosis`` is there if the baselines settle the
    case: strict FP32 fails, or nothing does.
    """

    fp32: Evaluation
    tf32: Evaluation
    reduced_first: Evaluation
    second: Evaluation | None
    layers: pd.DataFrame
    diagnosis: Diagnosis | None

    def evaluation_seconds(self, samples: int) -> float:
        """What one emulated inference takes, where ``samples`` were given."""
        return quickest_s((self.fp32, self.tf32, self.reduced_first), samples)

    @property
    def reduced(self) -> Evaluation:
        """All layers reduced, by the emulator with the larger score: both must pass it."""
        return _worse(self.reduced_first, self.second)

    def by_label(self) -> dict[str, Evaluation]:
        """The baselines as rows of the outputs table."""
        rows = {r.plan.base.value: r for r in (self.fp32, self.tf32, self.reduced_first)}
        if self.second is not None:
            rows[f"{self.second.plan.base.value}, second emulator"] = self.second
        return rows


def quickest_s(found: Sequence[Evaluation], samples: int) -> float:
    """What an emulated inference takes, from the quickest of a few evaluations."""
    return min(result.seconds for result in found) / max(1, samples)


def measure_baselines(problem: Problem, context: Context) -> Baselines:
    """Run the whole network at each precision, then trace the layers."""
    context.observer.step("baselines")
    precision = problem.settings.precision
    fp32, tf32, reduced = (context.evaluator.evaluate(plan) for plan in baseline_plans(problem))
    context.pace.took(quickest_s((fp32, tf32, reduced), len(problem.samples)))
    if not fp32.verdict.passed:
        check_metrics(problem, context)
        check_model(problem, context, fp32)
    check_reference(fp32, problem.requirements)
    check_decisions(problem, context, fp32)
    note_alike(problem, context)
    context.note(*baseline_findings(problem, fp32, tf32, reduced))
    layers = trace_layers(problem, context, traced_inputs(problem, context))
    second = None
    if reduced.verdict.passed:
        second = context.second.evaluate(problem.base)
    else:
        note_near_ties(problem, context)
        note_few_differ(problem, context)
    last = _worse(reduced, second)
    diagnosis = None
    if not fp32.verdict.passed:
        diagnosis = _fp32_misses(problem, context, fp32)
    # An engine decides whatever strict FP32 does not settle. And passing given inputs settles
    # nothing where unseen ones must pass too.
    elif context.engine is None and last.verdict.passed and problem.settings.fitted:
        diagnosis = nothing_to_pin(last, precision)
    elif context.engine is None and not last.verdict.passed and precision is Precision.TF32:
        diagnosis = tf32_to_blame(tf32)
    return Baselines(fp32, tf32, reduced, second, layers, diagnosis)


def _worse(first: Evaluation, second: Evaluation | None) -> Evaluation:
    """The evaluation with the larger score; the first where there is no second."""
    return first if second is None or first.score >= second.score else second


def _fp32_misses(problem: Problem, context: Context, fp32: Evaluation) -> Diagnosis:
    where = missed_on(problem, context.evaluator, fp32.plan)
    if fp32.verdict is Verdict.NON_FINITE:
        where += why_not_finite(problem, context)
    raised = context.emulator.capable
    if raised is not problem.graph:
        where += (
            f" It was raised to opset {raised.opset}, which {problem.settings.precision.value} "
            "needs: export it with that opset, in case ONNX's converter has changed it."
        )
    return Diagnosis(
        Cause.NOT_PRECISION,
        "Strict FP32 already misses the requirement "
        f"({times(fp32.score, fp32.verdict)}): not a precision problem, and keeping "
        "layers in FP32 cannot help. "
        "The model is random or ill-conditioned, the runner computes it differently, or the "
        f"requirement asks for more than FP32 gives.{where}",
    )


def nothing_to_pin(reduced: Evaluation, precision: Precision, where: str = "") -> Diagnosis:
    """The diagnosis that the reduced precision meets the requirement as it is."""
    pinned = len(reduced.plan.pinned)
    but = f" but what is held in FP32 (layers: {pinned})" if pinned else ""
    return Diagnosis(
        Cause.NONE,
        f"Everything{but} in {precision.value.upper()} meets the requirement{where} "
        f"({times(reduced.score)}); no {'other ' if pinned else ''}layer needs FP32.",
    )


def tf32_to_blame(tf32: Evaluation, where: str = "") -> Diagnosis:
    """The diagnosis that TF32 misses the requirement, and strict FP32 meets it."""
    return Diagnosis(
        Cause.TF32,
        f"TF32 misses the requirement{where} ({times(tf32.score, tf32.verdict)}) and strict FP32 "
        "meets it. TF32 is too imprecise; disable it for the whole engine "
        "(clear_flag(BuilderFlag.TF32), trtexec --noTF32).",
    )


def traced_inputs(problem: Problem, context: Context) -> list[Sample]:
    """The given inputs that the table of layers is made from.

    They are spread over the given ones. One on which everything reduced is not finite is among
    them, and those on which further layers leave the range.
    """

    def is_finite(sample: Sample) -> bool:
        found = context.evaluator.known(problem.base, sample)
        return found is None or math.isfinite(found.score)

    chosen = list(evenly(problem.samples, MOST_TRACED))
    if all(map(is_finite, chosen)):
        broken = next((s for s in problem.samples if not is_finite(s)), None)
        chosen[-1:] = [broken] if broken is not None else chosen[-1:]
    return [*chosen, *_leaving_range(problem, context, chosen)]


def _leaving_range(
    problem: Problem, context: Context, chosen: Sequence[Sample]
) -> Iterator[Sample]:
    """At most two further inputs on which layers leave the range that do not on ``chosen``."""
    # Outputs may hide an infinity: a normalisation that divides by it gives zeros.
    digests = {sample.digest for sample in chosen}
    others = [s for s in problem.samples if s.digest not in digests]
    # A node-by-node run takes about three inferences; all together may take 8 s.
    affordable = int(8.0 / (3.0 * context.pace.usual_seconds))
    candidates = evenly(others, min(len(others), _RANGE_INPUTS, affordable))
    beyond = _beyond_range(problem, context, candidates)
    if not any(beyond.values()):
        return
    seen = set[str]().union(*_beyond_range(problem, context, chosen).values())
    for _ in range(2):
        most = max(candidates, key=lambda s: len(beyond[s.digest] - seen))
        if not beyond[most.digest] - seen:
            return
        yield most
        seen |= beyond[most.digest]


def _beyond_range(
    problem: Problem, context: Context, samples: Sequence[Sample]
) -> dict[str, set[str]]:
    """By sample's digest, the layers whose finite FP32 values exceed the reduced range."""
    precision = problem.settings.precision
    found: dict[str, set[str]] = {}
    for number, sample in enumerate(samples):

        def beyond(sample: Sample = sample, number: int = number) -> list[str]:
            context.observer.progress(number, len(samples), f"ranges on {sample.name}")
            layers = set[str]()
            with suppress(RunnerFailedError):  # the table of layers says what failed
                for name, _, values in context.emulator.exact(sample, precision):
                    if _leaves_range(largest_finite(values), precision):
                        layers.add(name)
            return sorted(layers)

        parts = (precision.value, sample.digest)
        names = context.recalled("beyond the range", parts, beyond)
        found[sample.digest] = set(problem.names).intersection(names)
    return found


def _leaves_range(size: float, precision: Precision) -> bool:
    if size <= LARGEST[precision]:
        return False
    return bool(np.isinf(rounded(np.full(1, size, np.float32), precision)[0]))


def holding_stepped(problem: Problem, context: Context, layers: pd.DataFrame) -> Problem | None:
    """``problem`` with the layers held whose inner steps leave FP16's range; None without any.

    The emulator computes such an operator in FP32 as a whole. Where ``--keep-reduced`` names the
    layer, a finding says that emulation cannot judge it.
    """
    if problem.settings.precision is not Precision.FP16:
        return None
    held = set[str]()
    for layer, why in _stepped(problem, layers):
        steps = f"TensorRT computes {layer.name} ({layer.op}) in several FP16 steps: {why}"
        if layer.name in problem.kept_reduced:
            message = f"{steps}; --keep-reduced keeps it there, so let an engine judge"
            context.note(Finding(WRITTEN_OUT, layer.name, message, True))
            continue
        held.add(layer.name)
        context.note(Finding("held", layer.name, f"{steps}; it is kept in FP32"))
    return problem.holding(held) if held else None


def _stepped(problem: Problem, layers: pd.DataFrame) -> Iterator[tuple[Layer, str]]:
    """The layers with a step that overflows, or underflows, in FP16, and what becomes of it."""
    largest_value = LARGEST[Precision.FP16]
    # Half of the smallest subnormal is rounded to zero, and an exponential below it.
    smallest_log = math.log(SMALLEST_SUBNORMAL[Precision.FP16] / 2.0)
    ranges = {
        row["layer"]: (row["ref_min"], row["ref_max"])
        for row in layers[["layer", "ref_min", "ref_max"]].to_dict("records")
    }
    made_by = {tensor: layer.name for layer in problem.layers for tensor in layer.outputs}
    for layer in problem.layers:
        if layer.name in problem.held_pins or layer.name not in ranges:
            continue
        low, high = ranges[layer.name]
        if layer.op == "LogSoftmax" and low < smallest_log:
            yield layer, f"a probability becomes 0, and its logarithm, {low:.4g} here, -inf"
        elif layer.op in ("ReduceLogSumExp", "ReduceLogSum") and high > math.log(largest_value):
            yield layer, f"the sum, of which {high:.4g} is the logarithm, becomes infinite"
        elif layer.op == "LpNormalization":
            read = layer.inputs[0]
            given = problem.samples[0].arrays.get(read, np.zeros(0))
            of_input = (given.min(initial=0.0), given.max(initial=0.0))
            largest = float(np.abs(ranges.get(made_by.get(read, ""), of_input)).max())
            if largest > math.sqrt(largest_value):
                yield layer, f"the square of {largest:.4g} becomes infinite"
