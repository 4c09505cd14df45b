"""Proves that a graph computes in FP32 what another does, by running both on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from onnx.reference import ReferenceEvaluator

from bisect_trt.base.errors import RunnerFailedError, one_line
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.inputs.perturbations import has_two_values
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.tensor_types import in_double
from bisect_trt.runners.concurrency import side_by_side
from bisect_trt.runners.reference import Reference, outputs_of

RANGED_INPUTS = 4
"""Given inputs that ranges, noise and headroom are measured on."""

MAX_CHANGE = 1e-5
"""What FP32 may change, of an output's largest value, where its own noise is not larger."""

NOISE_FACTOR = 2.0
"""One measurement of FP32's noise bounds the next within this factor."""

SCALES = (2.0, 1e-2, 1e-4)
"""Factors on the inputs at which FP32 must give the same: ranges and epsilons show there."""


@dataclass(frozen=True)
class Change:
    """What an edit changes of FP32's outputs.

    ``share`` is the largest change of an output over its largest value, ``where`` the input that
    shows it. ``noise`` is what another order of FP32's sums changes.
    """

    share: float
    noise: float
    where: str

    @property
    def is_exact(self) -> bool:
        """Whether it is no more than FP32's rounding."""
        return self.share <= max(MAX_CHANGE, NOISE_FACTOR * self.noise)


def probes_of(given: Sequence[Sample], perturbed: Sequence[Sample]) -> Iterator[Sample]:
    """The inputs of the FP32 proof: given, perturbed, scaled, with masks all on and all off."""
    yield from given
    yield from perturbed
    for sample in evenly(given, RANGED_INPUTS):
        yield from (scaled(sample, factor) for factor in SCALES)
        yield from _masked(sample)


def fp32_change(
    original: Graph,
    edited: Graph,
    samples: Iterable[Sample],
    threads: int = 0,
    before_each: Callable[[], None] = lambda: None,
) -> Change:
    """What ``edited`` changes of the FP32 outputs of ``original``, the worst of ``samples``.

    FP32's noise is measured on the first few of them.

    Samples that the original does not take are left out, as are those on which ``edited`` is the
    nearer to double precision. One that only ``edited`` does not take is an infinite change.
    """
    stream = iter(samples)
    first = list(islice(stream, RANGED_INPUTS))
    exactly = Reference(original, threads=threads)
    noise = _noise(original, exactly, first, threads)
    # Opened after the noise is known: each session holds the weights.
    newly = Reference(edited, threads=threads)
    share, where = 0.0, ""

    def both(sample: Sample) -> tuple[Sample, Arrays | None, Arrays | RunnerFailedError]:
        before_each()
        try:
            exact = exactly.outputs(sample)
        except RunnerFailedError as error:
            return sample, None, error
        try:
            return sample, exact, newly.outputs(sample)
        except RunnerFailedError as error:
            return sample, exact, error

    for sample, exact, candidate in side_by_side(both, chain(first, stream), exactly.at_once):
        if exact is None:
            continue
        if isinstance(candidate, RunnerFailedError):
            return Change(math.inf, noise, f"{sample.name} ({one_line(candidate)})")
        moved = max(_moved(exact[n], candidate[n]) for n in exact)
        if moved > max(MAX_CHANGE, share) and _is_nearer(original, sample, exact, candidate):
            continue
        if moved > share:
            share, where = moved, sample.name
    exactly.release()
    newly.release()
    return Change(share, noise, where)


def _noise(graph: Graph, reference: Reference, samples: Sequence[Sample], threads: int) -> float:
    """The most that another order of FP32's sums changes of ``samples``' outputs."""
    exact = list(taken_by(reference, samples))  # the others are left out of the proof too
    reference.release()
    noise = 0.0
    for sample, outputs in exact:
        written = with_unique_names(graph.taking(sample.arrays).proto)
        other = outputs_of(written, sample.arrays, sample.name, threads)
        noise = max(noise, *(_moved(outputs[n], other[n]) for n in outputs))
    return noise


def taken_by(reference: Reference, samples: Iterable[Sample]) -> Iterator[tuple[Sample, Arrays]]:
    """The samples that a graph takes in FP32, with its outputs."""
    for sample in samples:
        with suppress(RunnerFailedError):
            yield sample, reference.outputs(sample)


def _is_nearer(original: Graph, sample: Sample, exact: Arrays, candidate: Arrays) -> bool:
    """Whether ``candidate`` is nearer to the original in double precision than ``exact`` is."""
    try:
        true = ReferenceEvaluator(in_double(original.taking(sample.arrays).proto)).run(
            None,
            {
                name: array.astype(np.float64) if array.dtype == np.float32 else array
                for name, array in sample.arrays.items()
            },
        )
    except Exception:  # an operator that ONNX's evaluator lacks, or not in double precision
        return False
    names = [o.name for o in original.proto.graph.output]
    return all(
        _moved(array, candidate[name]) <= max(_moved(array, exact[name]), MAX_CHANGE)
        for name, array in zip(names, map(np.asarray, true), strict=True)
    )


def _is_mask(array: np.ndarray) -> bool:
    """Whether an input holds exactly two different values."""
    return array.size > 1 and bool(array.min() != array.max()) and has_two_values(array)


def scaled(sample: Sample, factor: float) -> Sample:
    """``sample`` with its float inputs ``factor`` times as large; masks of two values stay."""
    arrays = {
        name: np.asarray(array * array.dtype.type(factor))
        if array.dtype.kind == "f" and not _is_mask(array)
        else array
        for name, array in sample.arrays.items()
    }
    return Sample(f"{sample.name} times {factor:g}", arrays, True)


def _masked(sample: Sample) -> Iterator[Sample]:
    """``sample`` with each input of two values all low, then all high."""
    for name, array in sample.arrays.items():
        if not _is_mask(array):
            continue
        for value in (array.min(), array.max()):
            arrays = {**sample.arrays, name: np.full_like(array, value)}
            yield Sample(f"{sample.name}, {name} all {value}", arrays, True)


def _moved(exact: np.ndarray, candidate: np.ndarray) -> float:
    """The largest difference over the largest value, where the original is finite."""
    if exact.dtype.kind != "f":
        return 0.0 if np.array_equal(exact, candidate) else math.inf
    finite = np.isfinite(exact)
    if exact.shape != candidate.shape or not np.isfinite(candidate[finite]).all():
        return math.inf
    if np.isnan(candidate[~np.isnan(exact)]).any():  # an infinity may become a number, not NaN
        return math.inf
    size = float(np.abs(exact[finite]).max(initial=0.0))
    error = float(np.abs(exact[finite].astype(np.float64) - candidate[finite]).max(initial=0.0))
    return error / size if size else float(error > 0.0) and math.inf
