"""What outputs are judged by: their scales and their parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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

_NAMED_ENTRIES = 4

_REPRODUCIBLE, _ROUNDING = 30.0, 1e-6
"""An output that varies by less than a thirtieth of its RMS is held to a third of what it varies by
or more; by less than a millionth it is constant."""

_QUIET = 100.0


def with_scales(
    problem: Problem, references: References, cache: Cache
) -> tuple[Problem, list[Finding]]:
    """``problem`` with the scales of its outputs, and what a reader should know of them, where a
    requirement is judged by scale and no saved plan has brought them: recalled from the cache, or
    measured on the given inputs.

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
        sums: dict[str, list[_Sums]] = {}
        try:
            references.prepare(problem.samples, lambda: None)
            scales = measure_scales(_outputs(problem, references, sums), _static_axes(problem))
        except RunnerFailedError as error:
            raise BadInputError(str(error)) from error
        told = {name: scale.as_json() for name, scale in scales.items()}
        remarks = [r for name, scale in scales.items() for r in _remarks(name, scale, sums[name])]
        cache.record_later(Row(key, "scales", {"scales": told, "remarks": remarks}))
    else:
        scales = {name: Scale.from_json(told) for name, told in known[0]["scales"].items()}
        remarks = known[0]["remarks"]
    found = [Finding(kind, name, message) for kind, name, message in remarks]
    problem = replace(problem, requirements=replace(asked, scales=scales))
    return problem, [*found, *_groups(scales)]


@dataclass(frozen=True)
class _Sums:
    """Of an output on one input: the sum, the sum of squares and the number of finite values."""

    sample: str
    total: float
    squares: float
    count: int

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(self.count, 1))


def _remarks(name: str, scale: Scale, sums: Sequence[_Sums]) -> list[tuple[str, str, str]]:
    """An output that hardly varies beside its mean, and inputs that are quiet beside others: the
    kind, the output and the sentence of each.
    """
    count = max(sum(s.count for s in sums), 1)
    mean, squares = sum(s.total for s in sums) / count, sum(s.squares for s in sums) / count
    rms, deviation = math.sqrt(squares), math.sqrt(max(squares - mean * mean, 0.0))
    if scale.axis is not None:
        return []
    found = []
    if _ROUNDING * rms < deviation < rms / _REPRODUCIBLE:
        message = (
            f"output {name!r} varies by {deviation:.3g} only around {mean:.4g}, and its errors are "
            f"held to 1 % of the latter: ask for what matters, --requirement '{name}:max_abs<=X'"
        )
        found.append(("offset", name, message))
    quiet = [s for s in sums if 0.0 < s.rms < rms / _QUIET]
    if quiet:
        whose = some_of([repr(s.sample) for s in quiet], _NAMED_ENTRIES)
        message = (
            f"output {name!r} is quiet on {whose} (RMS {quiet[0].rms:.3g}, of all inputs "
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
        groups = "; ".join(
            f"{_entries(entries)} (RMS {rms:.3g})"
            for entries, rms in zip(scale.groups, scale.rms, strict=True)
        )
        found.append(
            Finding(
                "scales",
                name,
                f"output {name!r} mixes {len(scale.groups)} scales along axis {scale.axis}, each "
                f"held to its own RMS: entries {groups}; ask otherwise with a slice, such as "
                f"--requirement '{name}[{':,' * scale.axis}0:1]:max_abs<=X'",
            )
        )
    return found


def _outputs(
    problem: Problem, references: References, sums: dict[str, list[_Sums]]
) -> Iterator[Arrays]:
    """The outputs of each given input; ``sums`` is filled on the way."""
    for sample in problem.samples:
        outputs = references.of(sample)
        for name, array in outputs.items():
            if array.dtype.kind == "f":
                values = array[np.isfinite(array)].astype(np.float64)
                told = _Sums(
                    sample.name, float(values.sum()), float(values @ values), int(values.size)
                )
                sums.setdefault(name, []).append(told)
        yield outputs


def _static_axes(problem: Problem) -> dict[str, list[bool]]:
    """By output, whether the model fixes the size of each axis; those of unknown rank are left
    out.
    """
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
    more = len(said) - _NAMED_ENTRIES
    shown = ", ".join(said[:_NAMED_ENTRIES])
    return f"{shown} and {counted(more, 'range')} more" if more > 0 else shown


_MOST_CHECKED = 8


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
        outputs = [references.of(sample) for sample in evenly(problem.samples, _MOST_CHECKED)]
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
