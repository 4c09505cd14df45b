"""The scales and the parts that outputs are judged by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bisect_trt.base.display import counted
from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.sample import evenly
from bisect_trt.evaluate.cache import Cache, Row, content_key
from bisect_trt.evaluate.references import References
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.decisions import BoxMatch
from bisect_trt.metrics.scales import Scale, measure_scales
from bisect_trt.steps.problem import Problem
from bisect_trt.version import __version__

_Moments = tuple[float, float, int]
"""The sum, the sum of squares and the number of an output's finite values on one input."""


def with_scales(
    problem: Problem, references: References, cache: Cache
) -> tuple[Problem, list[Finding]]:
    """``problem`` with the scales of its outputs, and findings on them.

    They are measured on the given inputs where a requirement is judged by scale and no saved plan
    has brought them.

    Raises:
        BadInputError: the model cannot be run on an input.
    """
    requirements = problem.requirements
    if requirements.scales or not any(item.by_scale for item in requirements.items):
        return problem, _groups(requirements.scales)
    # A repeated command must not run the model again.
    digests = [sample.digest for sample in problem.samples]
    key = content_key(__version__, problem.model.digest, "scales", problem.judged, digests)
    cached = cache.recall(key)
    if cached is None:
        moments: dict[str, list[_Moments]] = {}
        try:
            references.prepare(problem.samples, lambda: None)
            scales = measure_scales(_outputs(problem, references, moments), _static_axes(problem))
        except RunnerFailedError as error:
            raise BadInputError(str(error)) from error
        as_json = {name: scale.as_json() for name, scale in scales.items()}
        # An output in groups has the RMS of each, so that its offset hides nothing.
        whole = [name for name, scale in scales.items() if scale.axis is None]
        remarks = [remark for name in whole for remark in _remarks(name, moments[name])]
        cache.record_later(Row(key, "scales", {"scales": as_json, "remarks": remarks}))
    else:
        scales = {name: Scale.from_json(s) for name, s in cached[0]["scales"].items()}
        remarks = cached[0]["remarks"]
    found = [Finding(kind, name, message) for kind, name, message in remarks]
    problem = replace(problem, requirements=replace(requirements, scales=scales))
    return problem, [*found, *_groups(scales)]


def _outputs(
    problem: Problem, references: References, moments: dict[str, list[_Moments]]
) -> Iterator[Arrays]:
    """The outputs of each given input; ``moments`` is filled on the way."""
    for sample in problem.samples:
        outputs = references.of(sample)
        for name, array in outputs.items():
            if array.dtype.kind == "f":
                values = array[np.isfinite(array)].astype(np.float64)
                of_sample = (float(values.sum()), float(values @ values), values.size)
                moments.setdefault(name, []).append(of_sample)
        yield outputs


def _remarks(name: str, moments: Sequence[_Moments]) -> list[tuple[str, str, str]]:
    """The kind, the output and the sentence on one that hardly varies."""
    count = max(sum(n for _, _, n in moments), 1)
    mean = sum(total for total, _, _ in moments) / count
    mean_square = sum(squares for _, squares, _ in moments) / count
    rms, deviation = math.sqrt(mean_square), math.sqrt(max(mean_square - mean * mean, 0.0))
    # An error of 1 % of the RMS is a third of such a deviation; below 1e-6 it is a constant.
    if not 1e-6 * rms < deviation < rms / 30.0:
        return []
    message = (
        f"output {name!r} varies by {deviation:.3g} only around {mean:.4g}, and its errors are "
        f"held to 1 % of the latter: ask for what matters, --requirement '{name}:max_abs<=X'"
    )
    return [("offset", name, message)]


def _groups(scales: Mapping[str, Scale]) -> list[Finding]:
    """A finding for each output that is judged group by group."""
    found = []
    for name, scale in scales.items():
        if scale.axis is None:
            continue
        # Without the groups a user cannot know what the tolerance of a score or a box is.
        pairs = zip(scale.groups, scale.rms, strict=True)
        groups = "; ".join(f"{_entries(entries)} (RMS {rms:.3g})" for entries, rms in pairs)
        message = (
            f"output {name!r} mixes {len(scale.groups)} scales along axis {scale.axis}, each "
            f"held to its own RMS: entries {groups}; ask otherwise with a slice, such as "
            f"--requirement '{name}[{':,' * scale.axis}0:1]:max_abs<=X'"
        )
        found.append(Finding("scales", name, message))
    return found


def _static_axes(problem: Problem) -> dict[str, list[bool]]:
    """Whether the model fixes the size of each axis, by output."""
    return {
        value.name: [dim.dim_value > 0 for dim in value.type.tensor_type.shape.dim]
        for value in problem.graph.proto.graph.output
        if value.type.tensor_type.HasField("shape")
    }


def _entries(entries: tuple[int, ...]) -> str:
    """Entry numbers, neighbours as ranges: "0-3, 5"."""
    spans: list[list[int]] = []
    for entry in entries:
        if spans and entry == spans[-1][1] + 1:
            spans[-1][1] = entry
        else:
            spans.append([entry, entry])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    more = len(words) - 4
    shown = ", ".join(words[:4])
    return f"{shown} and {counted(more, 'range')} more" if more > 0 else shown


def check_parts(problem: Problem, references: References) -> None:
    """Refuse empty slices and outputs without detections: every plan would pass.

    Raises:
        BadInputError: names the condition and the output's shape.
    """
    requirements = problem.requirements
    sliced = [item for item in requirements.items if item.part]
    matches = {n: m for n, m in requirements.metrics.items() if isinstance(m, BoxMatch)}
    if not sliced and not matches:
        return
    try:
        outputs = [references.of(sample) for sample in evenly(problem.samples, 8)]
    except RunnerFailedError as error:
        raise BadInputError(str(error)) from error
    for item in sliced:
        arrays = [of_one[n] for of_one in outputs for n in of_one if n == item.output]
        rank = min((array.ndim for array in arrays), default=0)
        if len(item.slices) > rank or not any(array[item.slices].size for array in arrays):
            shape = arrays[0].shape if arrays else ()
            raise BadInputError(
                f"--requirement {item.text!r}: the slice takes nothing of output {item.output!r}, "
                f"which has shape {shape}"
            )
    for name, match in matches.items():
        if not sum(match.count(of_one) for of_one in outputs):
            raise BadInputError(
                f"--requirement {name}: the outputs hold no box with a score above 0 on the given "
                "inputs, so there is nothing to compare: look at the slices, or give other inputs"
            )
