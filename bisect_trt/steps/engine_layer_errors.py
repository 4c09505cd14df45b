"""Each layer's error on the engine, from engines with outputs marked in batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError, one_line
from bisect_trt.base.limits import in_order
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.cache import Row, content_key
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.metrics.errors import TensorError, mean_of, tensor_error, worst_of
from bisect_trt.model.shapes import shapes_from
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.steps.baselines import MOST_TRACED
from bisect_trt.steps.context import Context
from bisect_trt.steps.engine_diagnosis import EngineTable
from bisect_trt.steps.problem import Problem

BATCH_BYTES = 1 << 30
TIME_BUDGET_S = 20.0
"""No further batch is begun that would end after it, by what the last one took for its size: each
needs an engine, and every value of the model."""

_APART = 16 << 20
"""Bytes of a tensor from which on no two are compared at a time."""

MARKED = "marked outputs"


def _told_sizes(problem: Problem, samples: Sequence[Sample]) -> dict[str, int]:
    """The bytes of each layer's outputs over ``samples``, where they follow from the inputs'
    shapes.
    """
    sizes = dict.fromkeys((layer.name for layer in problem.layers), 0)
    for sample in samples:
        shapes = shapes_from(problem.graph, sample.shapes)
        for layer in problem.layers:
            for tensor in layer.outputs:
                counts = [c for c in shapes.get(tensor, (None,)) if c is not None]
                if len(counts) < len(shapes.get(tensor, (None,))):
                    sizes.pop(layer.name, None)
                elif layer.name in sizes:
                    sizes[layer.name] += 4 * math.prod(counts)
    return sizes


def trace_engine(
    problem: Problem,
    context: Context,
    engine: Evaluator,
    plan: PrecisionPlan,
    layers: pd.DataFrame,
    ended: Callable[[], bool] | None = None,
) -> EngineTable | None:
    """The error of every layer in engines; recalled from the cache where it is there."""
    runner = context.opened
    if not isinstance(runner, TensorRTRunner):
        return None
    samples = evenly(problem.samples, MOST_TRACED)
    names = layers["layer"].to_list()
    key = _key(problem, engine, plan, names, samples)
    found = context.cache.recall(key)
    if found is not None:
        return EngineTable(**found[0])
    outputs_of = {layer.name: layer.outputs for layer in problem.layers}
    errors: dict[str, list[TensorError]] = {}
    marked_score, count, note, for_want_of_memory = math.nan, 0, "", False
    began = time.monotonic()
    deadline = began + TIME_BUDGET_S
    # Of all samples together; of a layer that could not be computed nothing is known.
    measured = dict(zip(names, layers["elements"].fillna(0) * 4, strict=True))
    sizes, per_byte = measured | _told_sizes(problem, samples), 0.0
    for batch in _batches(names, sizes):
        if ended is not None and ended():
            return None
        size = sum(sizes[name] for name in batch)
        if count and began + per_byte * size > deadline:
            note = (
                f"{len(errors):,} of {len(layers):,} layers, those up to {batch[0]!r}, were "
                "compared on the engine in the time that this may take"
            )
            break
        tensors = [t for layer in batch for t in outputs_of[layer]]
        try:
            values = runner.marked(plan, samples, tensors)
            if not count:
                marked_score = _worst_score(problem, context, samples, values)
        except RunnerFailedError as failure:
            note = f"layers from {batch[0]!r} on could not be marked: {one_line(failure)}"
            for_want_of_memory = failure.machine
            break
        count += 1
        for sample, found_values in zip(samples, values, strict=True):
            for layer, error in _compared(problem, context, sample, found_values):
                if ended is not None and ended():
                    return None
                errors.setdefault(layer, []).append(error)
        now = time.monotonic()
        began, per_byte = now, (now - began) / max(1.0, size)
    rows = {name: _row(found_errors) for name, found_errors in errors.items()}
    known = [engine.known(plan, sample) for sample in samples]
    unmarked = max((k.score for k in known if k is not None), default=math.nan)
    result = EngineTable(rows, MARKED, marked_score, count, note, unmarked)
    if not for_want_of_memory:  # else another time they may be
        context.cache.record([Row(key, "layers", vars(result))])
    return result


def _key(
    problem: Problem,
    engine: Evaluator,
    plan: PrecisionPlan,
    names: Sequence[str],
    samples: Sequence[Sample],
) -> str:
    digests = [sample.digest for sample in samples]
    if len(names) < len(problem.layers):
        digests.append(content_key(list(names)))
    return engine.key("engine-layers", plan.digest, *digests)


def _worst_score(
    problem: Problem,
    context: Context,
    samples: Sequence[Sample],
    values: Sequence[Mapping[str, NDArray[Any]]],
) -> float:
    pairs = zip(samples, values, strict=True)
    names = problem.graph.outputs  # a task metric is not shown the marked tensors
    return max(
        problem.requirements.score(context.references.of(s), {n: v[n] for n in names})
        for s, v in pairs
    )


def _compared(
    problem: Problem, context: Context, sample: Sample, values: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[str, TensorError]]:
    def compared(found: tuple[str, str, NDArray[np.float32]]) -> tuple[str, TensorError]:
        layer, tensor, reference = found
        return layer, tensor_error(reference, values[tensor])

    exact = context.emulator.exact(sample, problem.settings.precision)
    wanted = (found for found in exact if found[1] in values)
    for large, several in groupby(wanted, lambda found: found[2].nbytes > _APART):
        each = map if large else in_order
        yield from each(compared, several)


def _batches(names: Sequence[str], sizes: Mapping[str, float]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0.0
    for name in names:
        needed = sizes[name]
        if batch and size + needed > BATCH_BYTES:
            yield batch
            batch, size = [], 0.0
        batch.append(name)
        size += needed
    if batch:
        yield batch


def _row(errors: Sequence[TensorError]) -> dict[str, Any]:
    """The numbers of one layer, worst over the samples, and the mean error, which ranks layers more
    steadily.
    """
    error = worst_of(errors)
    row = {
        f"engine_{name}": getattr(error, name)
        for name in ("max_abs", "rmse", "rel_range", "snr_db")
    }
    row |= {"engine_finite": error.finite, "engine_nonfinite": error.nonfinite}
    return row | {"engine_mean_over_samples_rmse": mean_of(errors).rmse}
