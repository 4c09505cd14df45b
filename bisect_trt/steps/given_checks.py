"""What the baselines on the given inputs tell: answers of which nothing can be compared, which end
the run, and findings about outputs, inputs and requirements.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import BadInputError, RunnerFailedError, one_line
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
from bisect_trt.model.outputs import decided_outputs
from bisect_trt.runners.reference import Reference
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

_CHECKED_INPUTS = 4
_COMPARED_INPUTS = 64
"""Inputs whose outputs are looked at for likeness and near ties."""

_OF_RANGE = ("rel_range", "psnr_db")
"""Metrics of an error beside the range of the reference's values, or of what they are where all are
the same."""

_FEW_COMPARED_PERCENT = 90.0
"""Below it the first line says that the other elements were not compared."""

_MIN_CLASSES = 3
"""An output of fewer values a row decides between no kinds of inputs."""

_ALIKE_CORRELATION = 0.99
_CORRELATED_VALUES = 1 << 16
_CORRELATED_INPUTS = 8

_NEAR_TIE_OF_RMS = 1e-2
"""What 40 dB leave to the error."""

_FEW_DIFFER_SHARE = 0.95
"""The share of an output's elements that stay: a mask or a map of classes, no single answer."""


def _looked_at(item: Requirement, names: Sequence[str]) -> list[str]:
    """The outputs among ``names`` that a condition is on."""
    return [name for name in names if item.output in (None, name)]


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


def check_decisions(problem: Problem, context: Context, fp32: Evaluation) -> None:
    """Refuse conditions that are true whatever a plan does: a top-K of no more than K values, an
    argmax of one channel, a cosine of single values.

    Raises:
        BadInputError: names the condition and the outputs.
    """
    single = [name for name in fp32.worst if _is_single(problem, fp32, name)]
    for item in problem.requirements.items:
        if item.metric == "cosine":
            names = _looked_at(item, list(fp32.worst))
            if set(names) <= set(single):
                raise BadInputError(
                    f"--requirement {item.text}: nearly always true, for of a single value the "
                    "cosine sees the sign alone; ask for max_abs or atol"
                )
            for name in single if item.output is None else ():
                message = (
                    f"output {name!r} holds one value, of which the cosine sees the sign alone, so "
                    f"{item.text} is not asked of it: add --requirement '{name}:max_abs<=X'"
                )
                context.note(Finding("single-value", name, message))
        if places := places_of(item.metric):
            samples = evenly(problem.samples, _CHECKED_INPUTS)
            references = [context.references.of(sample) for sample in samples]
            among = {
                name: _most_choices(item.metric, [of[name] for of in references])
                for name in _looked_at(item, list(references[0]))
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


def note_single_values(problem: Problem, context: Context, fp32: Evaluation) -> None:
    """Say that an output of one value has no range that an error could be held against."""
    whole = decided_outputs(problem.graph, problem.names)
    for item in problem.requirements.items:
        if item.metric not in _OF_RANGE:
            continue
        for name in _looked_at(item, list(fp32.worst)):
            if name not in whole and _is_single(problem, fp32, name):
                message = (
                    f"output {name!r} holds one value, which has no range: {item.metric} is of the "
                    "value itself, and one near zero asks for FP32 everywhere; where that is not "
                    f"meant, ask for an error that may be made: --requirement '{name}:max_abs<=X'"
                )
                context.note(Finding("single-value", name, message))


def _is_single(problem: Problem, fp32: Evaluation, name: str) -> bool:
    """Whether the output is a single value for inputs of these shapes, whatever they hold."""
    if name not in fp32.worst or fp32.worst[name].elements != len(problem.samples):
        return False
    declared = next(o for o in problem.graph.proto.graph.output if o.name == name).type.tensor_type
    taken = {dim for spec in input_specs(problem.graph.proto) for dim in spec.shape or ()}
    return declared.HasField("shape") and all(
        dim.dim_value == 1 or dim.dim_param in taken for dim in declared.shape.dim
    )


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
        samples = evenly(problem.samples, _CHECKED_INPUTS)
        exact = [context.references.of(sample) for sample in samples]
        try:
            other = Reference(raised, threads=problem.settings.threads or 0)
            found = [other.outputs(sample) for sample in samples]
            asked, share = problem.requirements, problem.settings.share_of_given
            values = [asked.judge(*pair).values for pair in zip(exact, found, strict=True)]
            score = asked.together(values, share, asked.judge_all(exact, found))
        except (BadInputError, RunnerFailedError) as error:
            way += f" ({one_line(error, 160)})"
        else:
            if score <= 1.0 and fp32.worst:
                return
            if score > 1.0:
                way += f" (ONNX's converter made another model of opset {graph.opset})"
    if fp32.worst:
        raise BadInputError(
            f"{problem.model.name}: computes something else{way}; export it again with that opset"
        )
    raise BadInputError(
        f"{problem.model.name}: cannot be emulated{way}: {fp32.note or fp32.verdict.value}; "
        "export it again with another opset"
    )


def check_metrics(problem: Problem, context: Context) -> None:
    """Strict FP32 misses: the fault of a metric of the user's where it refuses the reference
    itself.

    Raises:
        BadInputError: names the condition.
    """
    asked, share = problem.requirements, problem.settings.share_of_given
    if not asked.metrics and not asked.collective:
        return
    samples = evenly(problem.samples, _CHECKED_INPUTS)
    references = [context.references.of(sample) for sample in samples]
    for item in asked.items:
        if item.metric not in {*asked.metrics, *asked.collective}:
            continue
        alone = replace(asked, items=(item,))
        values = [alone.judge(outputs, outputs).values for outputs in references]
        of_all = alone.judge_all(references, references)
        if alone.together(values, share, of_all) <= 1.0:
            continue
        worst = max(of_all or [of_one[0] for of_one in values], key=item.score_of)
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


def baseline_findings(
    problem: Problem, fp32: Evaluation, tf32: Evaluation, reduced: Evaluation
) -> list[Finding]:
    """Outputs of another shape or of values that cannot be compared, and TF32 that alone misses."""
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
            found.append(Finding("reference", name, message, share < _FEW_COMPARED_PERCENT))
    if precision is not Precision.TF32 and fp32.verdict.passed and not tf32.verdict.passed:
        message = (
            f"TF32 alone misses the requirement ({times(tf32.score, tf32.verdict)}): turn it off "
            "in the engine, pins cannot cure it."
        )
        found.append(Finding("tf32", "", message))
    return found


def why_not_finite(problem: Problem, context: Context) -> str:
    """A sentence on FP32 that is not finite: an output beyond its type, or NaN kernels hide."""
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
    """Say of the given inputs that all are of one class, or have nearly the same outputs."""
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
            continue  # of no input: anchors, say
        chosen = _top_class(outputs) if _are_classes(model, name, outputs) else None
        if chosen is not None:
            message = (
                f"all {count} inputs are class {_class_name(model, chosen, first.shape[-1])} by "
                f"output {name!r}: inputs of other classes are not covered"
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
    """The one class that each input has most of; None where they differ, or choose none."""
    rows = [a.reshape(-1, a.shape[-1]) for a in outputs if a.ndim in (1, 2) and a.dtype.kind == "f"]
    if len(rows) < len(outputs) or any(r.shape[1] < _MIN_CLASSES or len(r) != 1 for r in rows):
        return None
    chosen = {int(np.argmax(row)) for row in rows}
    return chosen.pop() if len(chosen) == 1 else None


_CALLED = re.compile("class|label|logit|prob|score", re.IGNORECASE)
_NAMES = ("names", "classes", "labels")
"""Keys under which exporters write the classes' names into a model."""


def _are_classes(model: onnx.ModelProto, name: str, outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether an output's values are classes': an embedding has a largest value too."""
    if _CALLED.search(name) or any(entry.key in _NAMES for entry in model.metadata_props):
        return True
    return all(a.size and a.min() >= 0.0 and abs(float(a.sum()) - 1.0) < 1e-3 for a in outputs)


def _class_name(model: onnx.ModelProto, chosen: int, classes: int) -> str:
    """A class by its number, and by its name where the exporter wrote names into the model."""
    for entry in model.metadata_props:
        if entry.key in _NAMES:
            try:
                names = ast.literal_eval(entry.value)
                return f"{str(names[chosen])!r} ({chosen} of {classes})"
            except (ValueError, SyntaxError, KeyError, IndexError, TypeError):
                continue
    return f"{chosen} of {classes}"


def _nearly_same(outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether every output correlates with the first."""
    shapes = {a.shape for a in outputs}
    if len(shapes) > 1 or outputs[0].dtype.kind != "f" or outputs[0].size < _MIN_CLASSES:
        return False
    step = -(-outputs[0].size // _CORRELATED_VALUES)
    values = [flat(a)[::step].astype(np.float64) for a in outputs[:_CORRELATED_INPUTS]]
    if not all(np.isfinite(v).all() and np.ptp(v) > 0.0 for v in values):
        return False
    return bool((np.atleast_2d(np.corrcoef(values))[0] > _ALIKE_CORRELATION).all())


def note_near_ties(problem: Problem, context: Context) -> None:
    """Name inputs whose decisions are nearly ties, and count the ties that nobody judges."""
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
    near = [int(i) for i in order if TIE < found[i][0] < _NEAR_TIE_OF_RMS]
    if near:
        named = some_of([f"{samples[i].name} ({100 * found[i][0]:.2g} %)" for i in near], 3)
        message = (
            f"near ties: the two best candidates differ by less than 1 % of the output's RMS on "
            f"{named}; such inputs ask for most of the layers, and a share of them may be let miss "
            "(@mean, --allow-misses)"
        )
        context.note(Finding("near-tie", samples[near[0]].name, message))


def _least_gap(problem: Problem, reference: Arrays) -> tuple[float, int, int]:
    """The smallest gap of a decision that is no tie, the ties, and how many decisions there are."""
    every = [np.ravel(g) for g in _gaps_asked(problem, reference)]
    if not every:
        return float("inf"), 0, 0
    found = np.concatenate(every)
    real = found[found > TIE]
    return float(real.min(initial=np.inf)), int(np.count_nonzero(found <= TIE)), int(found.size)


def _gaps_asked(problem: Problem, reference: Arrays) -> Iterator[NDArray[Any]]:
    """The gaps of each decision that is asked about."""
    known = gaps_of(reference)
    for item in problem.requirements.items:
        for name in _looked_at(item, list(reference)):
            output = reference[name]
            if item.metric == EQUAL and name in known:
                yield known[name]
            elif places_of(item.metric) and output.dtype.kind == "f" and output.ndim:
                channels = item.metric == "argmax" and output.ndim >= 4
                yield gaps(output, 1 if channels else -1)


def note_few_differ(problem: Problem, context: Context) -> None:
    """Say where few integers or truth values differ, though all are asked to be equal."""
    found = [context.evaluator.known(problem.base, sample) for sample in problem.samples]
    for place, item in enumerate(problem.requirements.items):
        if item.metric != EQUAL or item.limit < 1.0:
            continue
        shares = [f.values[place] for f in found if f is not None and f.values]
        least = min(shares, default=1.0)
        if _FEW_DIFFER_SHARE <= least < 1.0:
            limit = np.floor(1e3 * (1.0 - 2.0 * (1.0 - least))) / 1e3
            asked = f"{item.output}:equal>={limit:g}" if item.output else f"equal>={limit:g}"
            message = (
                f"of output {item.output!r} {100.0 * (1.0 - least):.2g} % of the elements differ "
                f"with everything reduced: where that may be, ask for --requirement '{asked}'"
            )
            context.note(Finding("few-differ", item.output or "", message))
