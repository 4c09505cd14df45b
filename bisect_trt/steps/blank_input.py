"""Whether the answer has numbers on an input of zeros: silence, a black frame, padding.

An epsilon that FP16 rounds to 0 does no harm to given inputs that are never 0. On one that is, 0 is
divided by 0.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import all_finite
from bisect_trt.steps.context import Context
from bisect_trt.steps.fp32_proof import scaled
from bisect_trt.steps.problem import Problem


def note_blank(problem: Problem, context: Context, answer: PrecisionPlan) -> None:
    """Note the layer that gives no number on an input of zeros though FP32 has one."""
    blank = replace(scaled(problem.samples[0], 0.0), name="zeros")
    if not any(array.dtype.kind == "f" for array in blank.arrays.values()):
        return
    parts, layer = [answer.digest, blank.digest], ""
    with suppress(RunnerFailedError):  # the model does not take zeros
        layer = context.recalled("blank", parts, lambda: _first_lost(context, blank, answer))
    if layer:
        message = (
            f"an input of zeros gives no number: {layer} is the first layer without one, and FP32 "
            "has one there; if such inputs occur, give one with --input"
        )
        context.note(Finding("blank-input", layer, message, weighty=True))


def _first_lost(context: Context, blank: Sample, answer: PrecisionPlan) -> str:
    """The first layer that loses its numbers, where an output does; '' where none does."""
    exact = context.references.of(blank)
    (reduced,) = context.emulator.outputs(answer, [blank])
    if all(map(all_finite, reduced.values())) or not all(map(all_finite, exact.values())):
        return ""
    traced = context.emulator.trace(blank, answer)
    lost = (v.layer for v in traced if all_finite(v.reference) and not all_finite(v.accumulated))
    return next(lost, "")
