"""Each layer's error on the engine, from engines with outputs marked in batches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError, one_line
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.cache import Row, content_key
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.metrics.errors import TensorError, mean_of, tensor_error, worst_of
from bisect_trt.metrics.requirements import times
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.steps.baselines import MOST_TRACED
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

BATCH_BYTES = 1 << 30
TIME_BUDGET_S = 20.0
"""No batch begins that would end after it, by what the last one took for its size."""

OUT_OF_LINE_SHARE = 1e-2
"""Of a layer's range: no rounding of FP32 or TF32 makes an error as large."""

_MARKED = "marked outputs"

Values = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class EngineTable:
    """The layers' errors on the engine, by layer, in network order.

    ``how`` says where they come from. ``marked_score`` is the score of the first marked engine,
    ``unmarked_score`` that of the plain one on the same samples; NaN where nothing was marked.
    ``note`` says why rows are missing, if they are.
    """

    rows: Mapping[str, Mapping[str, Any]]
    how: str
    marked_score: float
    batches: int
    note: str = ""
    unmarked_score: float = math.nan

    def joined(self, table: pd.DataFrame) -> pd.DataFrame:
        """``table`` with the engine's columns."""
        own = pd.DataFrame([{"layer": name, **row} for name, row in self.rows.items()])
        return table.merge(own, on="layer", how="left") if len(own) else table

    @property
    def first_out_of_line(self) -> str | None:
        """The first layer whose error no rounding explains."""
        off = (
            name
            for name, row in self.rows.items()
            if not row["engine_rel_range"] <= OUT_OF_LINE_SHARE
        )
        return next(off, None)

    @property
    def marking_effect_matters(self) -> bool:
        """Whether marking turned the verdict, or moved the score by more than half."""
        low, high = sorted((self.unmarked_score, self.marked_score))
        if math.isnan(low) or math.isnan(high):
            return False
        if low <= 1.0 < high or math.isinf(low) is not math.isinf(high):
            return True
        return math.isfinite(high) and high > 1.5 * max(low, 1e-9) and high > 0.1

    def findings(self) -> list[Finding]:
        """Why rows are missing, if they are, and that marking moved the outputs, if it did."""
        found = [Finding("engine-layers", "", self.note)] if self.note else []
        if self.marking_effect_matters:
            message = (
                "marking all outputs changes this engine's result from "
                f"{times(self.unmarked_score)} to {times(self.marked_score)}: the tables of layers "
                "explain, the unmarked engine decides"
            )
            found.append(Finding("marking-effect", "", message))
        return found


def trace_engine(
    problem: Problem,
    context: Context,
    engine: Evaluator,
    plan: PrecisionPlan,
    layers: pd.DataFrame,
) -> EngineTable | None:
    """The error of every layer in engines; recalled from the cache where it is there."""
    runner = context.opened
    if not isinstance(runner, TensorRTRunner):
        return None
    samples = evenly(problem.samples, MOST_TRACED)
    names = layers["layer"].to_list()
    digests = [sample.digest for sample in samples]
    if len(names) < len(problem.layers):
        digests.append(content_key(names))
    key = engine.key("engine-layers", plan.digest, *digests)
    found = context.cache.recall(key)
    if found is not None:
        return EngineTable(**found[0])
    outputs_of = {layer.name: layer.outputs for layer in problem.layers}
    # Of a layer that could not be computed nothing is known.
    sizes = dict(zip(names, layers["elements"].fillna(0) * 4, strict=True))
    errors: dict[str, list[TensorError]] = {}
    marked_score, count, note, out_of_memory = math.nan, 0, "", False
    now, seconds_per_byte = time.monotonic(), 0.0
    deadline = now + TIME_BUDGET_S
    for batch in _batches(names, sizes):
        began, size = now, sum(sizes[name] for name in batch)
        if count and began + seconds_per_byte * size > deadline:
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
            out_of_memory = failure.machine
            break
        count += 1
        for sample, of_sample in zip(samples, values, strict=True):
            for layer, tensor, exact in context.emulator.exact(sample, problem.settings.precision):
                if tensor in of_sample:
                    errors.setdefault(layer, []).append(tensor_error(exact, of_sample[tensor]))
        now = time.monotonic()
        seconds_per_byte = (now - began) / max(1.0, size)
    known = [engine.known(plan, sample) for sample in samples]
    unmarked = max((k.score for k in known if k is not None), default=math.nan)
    rows = {name: _row(of_layer) for name, of_layer in errors.items()}
    table = EngineTable(rows, _MARKED, marked_score, count, note, unmarked)
    if not out_of_memory:  # else another run may have it
        context.cache.record([Row(key, "layers", vars(table))])
    return table


def _worst_score(
    problem: Problem, context: Context, samples: Sequence[Sample], values: Sequence[Values]
) -> float:
    names = problem.graph.outputs  # a task metric is not shown the marked tensors
    return max(
        problem.requirements.score(context.references.of(s), {n: v[n] for n in names})
        for s, v in zip(samples, values, strict=True)
    )


def _batches(names: Sequence[str], sizes: Mapping[str, float]) -> Iterator[list[str]]:
    """``names`` in order, in parts of at most :data:`BATCH_BYTES`."""
    batch: list[str] = []
    size = 0.0
    for name in names:
        if batch and size + sizes[name] > BATCH_BYTES:
            yield batch
            batch, size = [], 0.0
        batch.append(name)
        size += sizes[name]
    if batch:
        yield batch


def _row(errors: Sequence[TensorError]) -> dict[str, Any]:
    """The numbers of one layer: the worst over the samples, and the mean, which ranks layers."""
    error = worst_of(errors)
    named = ("max_abs", "rmse", "rel_range", "snr_db")
    row = {f"engine_{name}": getattr(error, name) for name in named}
    row |= {"engine_finite": error.finite, "engine_nonfinite": error.nonfinite}
    return row | {"engine_mean_over_samples_rmse": mean_of(errors).rmse}
