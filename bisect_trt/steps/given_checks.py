"""Checks of outputs, inputs and requirements by the baselines on the given inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import evenly
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.inputs.samples import ALIKE
from bisect_trt.metrics.arrays import Arrays, flat
from bisect_trt.metrics.decisions import EQUAL, TIE, BoxMatch, choices, gaps, places_of
from bisect_trt.metrics.errors import SHAPE_CHANGED
from bisect_trt.metrics.requirements import Requirement, Requirements, gaps_of, times
from bisect_trt.model.emulated import SWALLOWING
from bisect_trt.model.inputs import input_specs
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

_CHECKED_INPUTS = 4
"""Inputs on which a requirement, a metric or a raised opset is tried."""

_COMPARED_INPUTS = 64
"""Inputs whose outputs are compared for likeness and near ties."""

_MIN_CLASSES = 3
"""An output of fewer values a row decides between no kinds of inputs."""

_ALIKE_CORRELATION = 0.99
"""Outputs that correlate more are nearly the same."""


def _outputs_of(item: Requirement, names: Sequence[str]) -> list[str]:
    """The outputs among ``names`` that a condition is on."""
    return [name for name in names if item.output in (None, name)]


def check_reference(result: Evaluation, requirements: Requirements) -> None:
    """Refuse a reference that nothing can be compared with: every plan would pass.

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
        # Non-finite elements are left out of errors where the reference has them.
        if error.elements and error.ref_nonfinite == error.elements:
            raise BadInputError(
                f"output {name!r} of the FP32 reference is NaN or infinite everywhere, so there is "
                "nothing to compare: look at the model and its inputs, or name the other outputs "
                "in --requirement (OUTPUT:METRIC<=VALUE)"
            )


def check_decisions(problem: Problem, context: Context, fp32: Evaluation) -> None:
    """Refuse conditions that are true for every plan.

    These are a top-K of no more than K values, an argmax of one channel, a cosine of single values.

    Raises:
        BadInputError: names the condition and the outputs.
    """
    for item in problem.requirements.items:
        names = _outputs_of(item, list(fp32.worst))
        if item.metric == "cosine" and all(_is_single(problem, fp32, n) for n in names):
            raise BadInputError(
                f"--requirement {item.text}: nearly always true, for of a single value the cosine "
                "sees the sign alone; ask for max_abs or atol"
            )
        if places := places_of(item.metric):
            samples = evenly(problem.samples, _CHECKED_INPUTS)
            references = [context.references.of(sample) for sample in samples]
            among = {
                name: _most_choices(item.metric, [of[name] for of in references])
                for name in _outputs_of(item, list(references[0]))
            }
            if all(size is not None and size <= places for size in among.values()):
                said = ", ".join(f"{name!r} has {size}" for name, size in among.items())
                raise BadInputError(
                    f"--requirement {item.text}: always true, for it chooses among the values "
                    f"along one axis, of which output {said}; ask for another output or metric"
                )


def _most_choices(metric: str, outputs: Sequence[NDArray[Any]]) -> int | None:
    """The most values that ``metric`` chooses among in one of ``outputs``."""
    found = [choices(metric, array) for array in outputs]
    return max((size for size in found if size is not None), default=None)


def _is_single(problem: Problem, fp32: Evaluation, name: str) -> bool:
    """Whether the output is a single value for inputs of these shapes, whatever they hold."""
    if name not in fp32.worst or fp32.worst[name].elements != len(problem.samples):
        return False
    declared = next(o for o in problem.graph.proto.graph.output if o.name == name).type.tensor_type
    # A dimension that has the name of an input's is one for inputs of these shapes only.
    taken = {dim for spec in input_specs(problem.graph.proto) for dim in spec.shape or ()}
    return declared.HasField("shape") and all(
        dim.dim_value == 1 or dim.dim_param in taken for dim in declared.shape.dim
    )


def check_model(problem: Problem, context: Context, fp32: Evaluation) -> None:
    """Refuse a model that the emulator cannot run in FP32.

    Raises:
        BadInputError: says which opset it was tried at.
    """
    if fp32.worst:
        return
    at_opset, raised = "", context.emulator.capable
    if raised is not problem.graph:
        precision = problem.settings.precision.value
        at_opset = f" at opset {raised.opset}, which {precision} needs"
    raise BadInputError(
        f"{problem.model.name}: cannot be emulated{at_opset}: {fp32.note or fp32.verdict.value}; "
        "export it again with another opset"
    )


def check_metrics(problem: Problem, context: Context) -> None:
    """Refuse a metric that the reference itself misses.

    Raises:
        BadInputError: names the condition.
    """
    requirements, share = problem.requirements, problem.settings.share_of_given
    if not requirements.metrics and not requirements.collective:
        return
    samples = evenly(problem.samples, _CHECKED_INPUTS)
    references = [context.references.of(sample) for sample in samples]
    for item in requirements.items:
        if item.metric not in {*requirements.metrics, *requirements.collective}:
            continue
        # Beside itself the reference has no error, whatever precision makes of it.
        alone = replace(requirements, items=(item,))
        values = [alone.judge(outputs, outputs).values for outputs in references]
        of_all = alone.judge_all(references, references)
        if alone.together(values, share, of_all) <= 1.0:
            continue
        worst = max(of_all or [of_one[0] for of_one in values], key=item.score_of)
        if isinstance(requirements.metrics.get(item.metric), BoxMatch):
            raise BadInputError(
                f"--requirement {item.text!r}: {worst:g} of the reference's boxes match "
                "themselves: they have no area as they are read; name their layout, such as "
                "layout=xywh, or their slice"
            )
        raise BadInputError(
            f"--metric {item.metric}: it gives {worst:g} for the reference beside itself, "
            f"which misses {item.text!r}: the metric or the requirement is wrong"
        )


def baseline_findings(
    problem: Problem, fp32: Evaluation, tf32: Evaluation, reduced: Evaluation
) -> list[Finding]:
    """Findings on outputs that cannot be compared, and on TF32 that alone misses."""
    found, precision = [], problem.settings.precision
    for name, error in reduced.worst.items():
        if error.nonfinite == SHAPE_CHANGED and name not in problem.requirements.rows:
            message = (
                f"output {name!r} has another shape in {precision.value.upper()} than in FP32: "
                "another number of detections, say; no error tells that, and it counts as a miss: "
                "judge what is made of it with --metric MODULE:FUNCTION, detections with "
                "box_match(boxes,scores)"
            )
            found.append(Finding("shape", name, message, True))
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
            found.append(Finding("reference", name, message, share < 90.0))
    if precision is not Precision.TF32 and fp32.verdict.passed and not tf32.verdict.passed:
        message = (
            f"TF32 alone misses the requirement ({times(tf32.score, tf32.verdict)}): disable it "
            "for the whole engine (trtexec --noTF32)."
        )
        found.append(Finding("tf32", "", message))
    return found


def why_not_finite(problem: Problem, context: Context) -> str:
    """A sentence on why FP32 is not finite; empty where nothing explains it."""
    for name, limit in problem.requirements.limits.items():
        largest = max(
            float(np.abs(context.references.of(s)[name]).max(initial=0.0)) for s in problem.samples
        )
        if largest >= limit:
            return (
                f" Output {name!r} reaches {largest:.3g}, which its type in the source, FP16, "
                "cannot hold: declare that output FLOAT."
            )
    nodes = zip(problem.graph.proto.graph.node, problem.graph.names, strict=True)
    names = [name for node, name in nodes if node.op_type in SWALLOWING]
    if not names:
        return ""
    return (
        f" FP32 itself may feed NaN or infinite values to {some_of(names, 2)}: ONNX Runtime's "
        "kernel makes numbers of them, which an engine does not."
    )


def note_alike(problem: Problem, context: Context) -> None:
    """Note that all given inputs are of one class, or have nearly the same outputs."""
    if len(problem.samples) < 2:
        return
    samples = problem.samples[:_COMPARED_INPUTS]

    def found() -> list[tuple[str, str]]:
        return _alike_outputs(problem, [context.references.of(sample) for sample in samples])

    digests = [sample.digest for sample in problem.samples]
    for where, message in context.recalled("alike", digests, found):
        context.note(Finding(ALIKE, where, message))


def _alike_outputs(problem: Problem, references: Sequence[Arrays]) -> list[tuple[str, str]]:
    """Outputs that are alike over the inputs, each with a sentence."""
    count, model, found = len(problem.samples), problem.graph.proto, []
    for name, first in references[0].items():
        outputs = [reference[name] for reference in references]
        if all(np.array_equal(a, first) for a in outputs):
            continue  # depends on no input, as anchors do
        chosen = _top_class(outputs) if _are_classes(model, name, outputs) else None
        if chosen is not None:
            message = (
                f"all {count} inputs are class {chosen} of {first.shape[-1]} by output {name!r}: "
                "inputs of other classes are not covered"
            )
            found.append((name, message))
        elif _nearly_same(outputs):
            message = (
                f"output {name!r} is nearly the same for all {count} inputs (correlation above "
                f"{_ALIKE_CORRELATION:g}): other kinds of inputs are not covered"
            )
            found.append((name, message))
    return found


def _top_class(outputs: Sequence[NDArray[Any]]) -> int | None:
    """The class that every input is of; None where they differ, or the outputs choose none."""
    rows = [a.reshape(-1, a.shape[-1]) for a in outputs if a.ndim in (1, 2) and a.dtype.kind == "f"]
    if len(rows) < len(outputs) or any(r.shape[1] < _MIN_CLASSES or len(r) != 1 for r in rows):
        return None
    chosen = {int(np.argmax(row)) for row in rows}
    return chosen.pop() if len(chosen) == 1 else None


def _are_classes(model: onnx.ModelProto, name: str, outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether an output's values are those of classes: an embedding has a largest value too."""
    # Exporters write the classes' names under these keys.
    keys = {entry.key for entry in model.metadata_props}
    named = keys & {"names", "classes", "labels"}
    if named or re.search("class|label|logit|prob|score", name, re.IGNORECASE):
        return True
    return all(a.size and a.min() >= 0.0 and abs(float(a.sum()) - 1.0) < 1e-3 for a in outputs)


def _nearly_same(outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether every output correlates with the first."""
    shapes = {a.shape for a in outputs}
    if len(shapes) > 1 or outputs[0].dtype.kind != "f" or outputs[0].size < _MIN_CLASSES:
        return False
    step = -(-outputs[0].size // (1 << 16))  # some values of some outputs stand for all
    values = [flat(a)[::step].astype(np.float64) for a in outputs[:8]]
    if not all(np.isfinite(v).all() and np.ptp(v) > 0.0 for v in values):
        return False
    return bool((np.atleast_2d(np.corrcoef(values))[0] > _ALIKE_CORRELATION).all())


def note_near_ties(problem: Problem, context: Context) -> None:
    """Note the inputs whose decisions are nearly ties, and how many ties are not counted."""
    if not any(places_of(i.metric) or i.metric == EQUAL for i in problem.requirements.items):
        return
    samples = problem.samples[:_COMPARED_INPUTS]

    def least_gaps() -> list[tuple[float, int, int]]:
        return [_least_gap(problem, context.references.of(sample)) for sample in samples]

    digests = [sample.digest for sample in samples]
    found = context.recalled("near ties", digests, least_gaps)
    ties, decisions = sum(t for _, t, _ in found), sum(n for _, _, n in found)
    if ties:
        message = (
            f"{counted(ties, 'decision')} of {decisions:,} on the given inputs "
            f"{'is a tie' if ties == 1 else 'are ties'} within FP32's own noise, not counted "
            "whatever a plan makes of it"
        )
        context.note(Finding("ties", "", message))
    order = np.argsort([gap for gap, _, _ in found], kind="stable")
    near = [int(i) for i in order if TIE < found[i][0] < 1e-2]  # an error of 40 dB is as large
    if near:
        names = some_of([f"{samples[i].name} ({100 * found[i][0]:.2g} %)" for i in near], 3)
        message = (
            f"near ties: the two best candidates differ by less than 1 % of the output's RMS on "
            f"{names}; such inputs ask for most of the layers, and a share of them may be let miss "
            "(@mean, --allow-misses)"
        )
        context.note(Finding("near-tie", samples[near[0]].name, message))


def _least_gap(problem: Problem, reference: Arrays) -> tuple[float, int, int]:
    """The smallest gap of a decision that is no tie, and the numbers of ties and of decisions."""
    of_each = [np.ravel(g) for g in _decided_gaps(problem, reference)]
    if not of_each:
        return float("inf"), 0, 0
    found = np.concatenate(of_each)
    real = found[found > TIE]
    return float(real.min(initial=np.inf)), int(np.count_nonzero(found <= TIE)), int(found.size)


def _decided_gaps(problem: Problem, reference: Arrays) -> Iterator[NDArray[Any]]:
    """The gaps between the two best candidates of each decision that a condition is on."""
    of_decisions = gaps_of(reference)
    for item in problem.requirements.items:
        for name in _outputs_of(item, list(reference)):
            output = reference[name]
            if item.metric == EQUAL and name in of_decisions:
                yield of_decisions[name]
            elif places_of(item.metric) and output.dtype.kind == "f" and output.ndim:
                channels = item.metric == "argmax" and output.ndim >= 4
                yield gaps(output, 1 if channels else -1)


def note_few_differ(problem: Problem, context: Context) -> None:
    """Note outputs of which few integers or truth values differ, though all must be equal."""
    found = [context.evaluator.known(problem.base, sample) for sample in problem.samples]
    for place, item in enumerate(problem.requirements.items):
        if item.metric != EQUAL or item.limit < 1.0:
            continue
        shares = [f.values[place] for f in found if f is not None and f.values]
        least = min(shares, default=1.0)
        # Of a mask or a map of classes few elements differ; a single answer is right or wrong.
        if 0.95 <= least < 1.0:
            limit = np.floor(1e3 * (1.0 - 2.0 * (1.0 - least))) / 1e3
            condition = f"{item.output}:equal>={limit:g}" if item.output else f"equal>={limit:g}"
            message = (
                f"of output {item.output!r} {100.0 * (1.0 - least):.2g} % of the elements differ "
                f"with everything reduced: where that may be, ask for --requirement '{condition}'"
            )
            context.note(Finding("few-differ", item.output or "", message))
