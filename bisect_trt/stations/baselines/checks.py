"""What the baselines show to be the user's to mend: the model, the metric or the requirement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError, RunnerFailedError, one_line
from bisect_trt.core.finding import Finding
from bisect_trt.core.sample import evenly
from bisect_trt.graph.model.decided import decided_outputs
from bisect_trt.graph.model.inputs import input_specs
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.requirements.boxes import BoxMatch
from bisect_trt.numerics.requirements.decisions import choices, places_of
from bisect_trt.numerics.requirements.requirements import Requirements
from bisect_trt.probe.result import ProbeResult
from bisect_trt.runners.ort.reference import Reference
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case

_MOST_CHECKED = 4

_OF_RANGE = ("rel_range", "psnr_db")
"""Metrics of an error beside the range of the reference's values, or of what they are where all are
the same."""


def check_reference(result: ProbeResult, requirements: Requirements) -> None:
    """Refuse a reference of which nothing can be compared: every plan would pass.

    Args:
        result: any plan's beside it.
        requirements: they say which outputs are looked at.

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


def _is_single(case: Case, fp32: ProbeResult, name: str) -> bool:
    """Whether the output is a single value for inputs of these shapes, whatever they hold: not
    where what is found in them decides.
    """
    if name not in fp32.worst or fp32.worst[name].elements != len(case.samples):
        return False
    declared = next(o for o in case.graph.proto.graph.output if o.name == name).type.tensor_type
    taken = {dim for spec in input_specs(case.graph.proto) for dim in spec.shape or ()}
    dims = declared.shape.dim
    return declared.HasField("shape") and all(
        dim.dim_value == 1 or dim.dim_param in taken for dim in dims
    )


def check_decisions(case: Case, bench: Bench, fp32: ProbeResult) -> None:
    """Refuse a top-K of outputs that have no more values than K, an argmax of one channel, and a
    cosine of single values, which sees their signs alone: whatever a plan does is right.

    Args:
        case: says what is asked.
        bench: has the references.
        fp32: any plan's result, which counts the outputs' elements.

    Raises:
        BadInputError: names the condition and the outputs.
    """
    items = case.requirements.items
    asked = [item for item in items if places_of(item.metric)]
    cosines = [item for item in items if item.metric == "cosine"]
    looked = evenly(case.samples, _MOST_CHECKED) if asked else []
    references = [bench.references.of(sample) for sample in looked]
    for item in cosines:
        if all(_is_single(case, fp32, n) for n in fp32.worst if item.output in (None, n)):
            raise BadInputError(
                f"--requirement {item.text}: nearly always true, for of a single value the cosine "
                "sees the sign alone; ask for max_abs or atol"
            )
    for item in (item for item in cosines if item.output is None):
        for name in (n for n in fp32.worst if _is_single(case, fp32, n)):
            message = (
                f"output {name!r} holds one value, of which the cosine sees the sign alone, so "
                f"{item.text} is not asked of it: add --requirement '{name}:max_abs<=X'"
            )
            bench.note(Finding("single-value", name, message))
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


def note_single_values(case: Case, bench: Bench, fp32: ProbeResult) -> None:
    """Say that an output of one value has no range that an error could be held against.

    Args:
        case: says what is asked.
        bench: keeps what is said.
        fp32: any plan's result, which counts the outputs' elements.
    """
    whole = decided_outputs(case.graph, case.names)
    for item in case.requirements.items:
        if item.metric not in _OF_RANGE:
            continue
        for name in (n for n in fp32.worst if item.output in (None, n)):
            if name not in whole and _is_single(case, fp32, name):
                message = (
                    f"output {name!r} holds one value, which has no range: {item.metric} is of the "
                    "value itself, and one near zero asks for FP32 everywhere; where that is not "
                    f"meant, ask for an error that may be made: --requirement '{name}:max_abs<=X'"
                )
                bench.note(Finding("single-value", name, message))


def check_model(case: Case, bench: Bench, fp32: ProbeResult) -> None:
    """Strict FP32 misses: not of the model's making where the emulator cannot run what it writes,
    or where ONNX's converter made another model of it.

    Args:
        case: the model as it was given.
        bench: whose emulator runs it.
        fp32: what strict FP32 showed.

    Raises:
        BadInputError: says which opset is asked for.
    """
    graph, raised = case.graph, bench.emulator.capable
    if raised is graph and fp32.worst:
        return
    way = ""
    if raised is not graph:
        way = f" at opset {raised.opset}, which {case.settings.precision.value} needs"
        samples = evenly(case.samples, _MOST_CHECKED)
        exact = [bench.references.of(sample) for sample in samples]
        try:
            other = Reference(raised)
            score = _together(case, exact, [other.outputs(sample) for sample in samples])
        except (BadInputError, RunnerFailedError) as error:
            way += f" ({one_line(error, 160)})"
        else:
            if score <= 1.0 and fp32.worst:
                return
            way += f" (ONNX's converter made another model of opset {graph.opset})" * (score > 1.0)
    if fp32.worst:
        raise BadInputError(
            f"{case.model.name}: computes something else{way}; export it again with that opset"
        )
    raise BadInputError(
        f"{case.model.name}: cannot be emulated{way}: {fp32.note or fp32.verdict.value}; export it "
        "again with another opset"
    )


def check_metrics(case: Case, bench: Bench) -> None:
    """Strict FP32 misses: the fault of a metric of the user's where it refuses the reference
    itself.

    Raises:
        BadInputError: names the condition.
    """
    if not case.requirements.metrics and not case.requirements.collective:
        return
    samples = evenly(case.samples, _MOST_CHECKED)
    references = [bench.references.of(sample) for sample in samples]
    asked, share = case.requirements, case.settings.share_of_given
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


def _together(case: Case, references: Sequence[Arrays], found: Sequence[Arrays]) -> float:
    """The score of several inputs' outputs beside the reference's, by all that is asked."""
    asked = case.requirements
    values = [asked.judge(*pair).values for pair in zip(references, found, strict=True)]
    share = case.settings.share_of_given
    return asked.together(values, share, asked.judge_all(references, found))
