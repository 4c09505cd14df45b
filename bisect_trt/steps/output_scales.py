"""What outputs are judged by: their scales and their parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bisect_trt.base.display import counted, some_of
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

_CHECKED_INPUTS = 8

_OFFSET_RATIO = 30.0
"""An output whose deviation is a smaller part of its RMS is held to a third of it, or to more."""

_CONSTANT_SHARE = 1e-6
"""An output that varies by less of its RMS is constant."""

_QUIET_RATIO = 100.0
"""An input whose output is so much smaller than that of all inputs is quiet."""

_Moments = tuple[str, float, float, int]
"""Of an output: the sample, the sum, the sum of squares and the number of its finite values."""


def with_scales(
    problem: Problem, references: References, cache: Cache
) -> tuple[Problem, list[Finding]]:
    """``problem`` with the scales of its outputs, and what a reader should know of them.

    They are recalled or measured on the given inputs where a requirement is judged by scale and no
    saved plan has brought them.

    Raises:
        BadInputError: the model cannot be run on an input.
    """
    asked = problem.requirements
    if asked.scales or not any(item.by_scale for item in asked.items):
        return problem, _groups(asked.scales)
    digests = [sample.digest for sample in problem.samples]
    key = content_key(__version__, problem.model.digest, "scales", problem.judged, digests)
    known = cache.recall(key)
    if known is None:
        moments: dict[str, list[_Moments]] = {}
        try:
            references.prepare(problem.samples, lambda: None)
            scales = measure_scales(_outputs(problem, references, moments), _static_axes(problem))
        except RunnerFailedError as error:
            raise BadInputError(str(error)) from error
        as_json = {name: scale.as_json() for name, scale in scales.items()}
        whole = [name for name, scale in scales.items() if scale.axis is None]
        remarks = [remark for name in whole for remark in _remarks(name, moments[name])]
        cache.record_later(Row(key, "scales", {"scales": as_json, "remarks": remarks}))
    else:
        scales = {name: Scale.from_json(s) for name, s in known[0]["scales"].items()}
        remarks = known[0]["remarks"]
    found = [Finding(kind, name, message) for kind, name, message in remarks]
    problem = replace(problem, requirements=replace(asked, scales=scales))
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
                of_sample = (sample.name, float(values.sum()), float(values @ values), values.size)
                moments.setdefault(name, []).append(of_sample)
        yield outputs


def _remarks(name: str, moments: Sequence[_Moments]) -> list[tuple[str, str, str]]:
    """An output that hardly varies, and quiet inputs: kind, output and sentence of each."""
    count = max(sum(n for _, _, _, n in moments), 1)
    mean = sum(total for _, total, _, _ in moments) / count
    mean_square = sum(squares for _, _, squares, _ in moments) / count
    rms, deviation = math.sqrt(mean_square), math.sqrt(max(mean_square - mean * mean, 0.0))
    found = []
    if _CONSTANT_SHARE * rms < deviation < rms / _OFFSET_RATIO:
        message = (
            f"output {name!r} varies by {deviation:.3g} only around {mean:.4g}, and its errors are "
            f"held to 1 % of the latter: ask for what matters, --requirement '{name}:max_abs<=X'"
        )
        found.append(("offset", name, message))
    of_samples = [(sample, math.sqrt(squares / max(n, 1))) for sample, _, squares, n in moments]
    quiet = [(sample, own) for sample, own in of_samples if 0.0 < own < rms / _QUIET_RATIO]
    if quiet:
        whose = some_of([repr(sample) for sample, _ in quiet])
        message = (
            f"output {name!r} is quiet on {whose} (RMS {quiet[0][1]:.3g}, of all inputs "
            f"{rms:.3g}) and held to its own RMS there: ask for max_abs, or leave it out, if that "
            "alone misses"
        )
        found.append(("quiet", name, message))
    return found


def _groups(scales: Mapping[str, Scale]) -> list[Finding]:
    """A finding for each output that is judged group by group."""
    found = []
    for name, scale in scales.items():
        if scale.axis is None:
            continue
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
    """By output, whether the model fixes the size of each axis."""
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
    said = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    more = len(said) - 4
    shown = ", ".join(said[:4])
    return f"{shown} and {counted(more, 'range')} more" if more > 0 else shown


def check_parts(problem: Problem, references: References) -> None:
    """Refuse a slice that takes nothing and detections of which there are none: every plan would
    pass.

    Raises:
        BadInputError: names the condition and the output's shape.
    """
    asked = problem.requirements
    sliced = [item for item in asked.items if item.part]
    matches = {n: m for n, m in asked.metrics.items() if isinstance(m, BoxMatch)}
    if not sliced and not matches:
        return
    try:
        outputs = [references.of(sample) for sample in evenly(problem.samples, _CHECKED_INPUTS)]
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
