"""Measures each layer's error on the engine, by marking layers as outputs in batches."""

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
"""The most bytes of tensors that are marked in one engine."""

Values = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class EngineTable:
    """The layers' errors on the engine, by layer, in network order.

    ``how`` says how they were measured, ``note`` why rows are missing. ``marked_score`` is the
    score of the first marked engine, ``unmarked_score`` that of the plain one on the same samples;
    NaN where there is none.
    """

    rows: Mapping[str, Mapping[str, Any]]
    how: str
    marked_score: float
    batches: int
    note: str = ""
    unmarked_score: float = math.nan

    def joined(self, table: pd.DataFrame) -> pd.DataFrame:
        """``table`` with the engine's columns."""
        columns = pd.DataFrame([{"layer": name, **row} for name, row in self.rows.items()])
        return table.merge(columns, on="layer", how="left") if len(columns) else table

    @property
    def first_out_of_line(self) -> str | None:
        """The first layer whose error no rounding explains."""
        # No rounding of FP32 or TF32 moves a layer by a hundredth of its range.
        rows = self.rows.items()
        return next((name for name, row in rows if not row["engine_rel_range"] <= 1e-2), None)

    @property
    def marking_effect_matters(self) -> bool:
        """Whether marking changed the verdict, or made the score larger by more than half."""
        low, high = sorted((self.unmarked_score, self.marked_score))
        if math.isnan(low) or math.isnan(high):
            return False
        if low <= 1.0 < high or math.isinf(low) is not math.isinf(high):
            return True
        return math.isfinite(high) and high > 1.5 * max(low, 1e-9) and high > 0.1

    def findings(self) -> list[Finding]:
        """Findings on missing rows, and on outputs that marking changed."""
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
    """The errors of ``layers`` on ``plan``'s engine; None if it is not TensorRT's."""
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
    # The size of a layer that could not be computed is unknown.
    sizes = dict(zip(names, layers["elements"].fillna(0) * 4, strict=True))
    marking = _Marking(problem, context, runner, plan, samples)
    marking.run(sizes)
    evaluations = [engine.known(plan, sample) for sample in samples]
    table = EngineTable(
        rows={name: _row(of_layer) for name, of_layer in marking.errors.items()},
        how="marked outputs",
        marked_score=marking.score,
        batches=marking.batches,
        note=marking.note,
        unmarked_score=max((e.score for e in evaluations if e is not None), default=math.nan),
    )
    if not marking.out_of_memory:  # another run may have more
        context.cache.record([Row(key, "layers", vars(table))])
    return table


class _Marking:
    """Builds engines with marked layers, and collects the ``errors`` of these on each sample."""

    def __init__(
        self,
        problem: Problem,
        context: Context,
        runner: TensorRTRunner,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
    ) -> None:
        self._problem, self._context = problem, context
        self._runner, self._plan, self._samples = runner, plan, samples
        self.errors: dict[str, list[TensorError]] = {}
        self.score, self.batches = math.nan, 0
        self.note, self.out_of_memory = "", False

    def run(self, sizes: Mapping[str, float]) -> None:
        """Mark layers of ``sizes`` bytes in batches, for about 20 s."""
        now, seconds_per_byte = time.monotonic(), 0.0
        deadline = now + 20.0
        for batch in _batches(sizes):
            began, size = now, sum(sizes[name] for name in batch)
            if self.batches and began + seconds_per_byte * size > deadline:
                self.note = (
                    f"{len(self.errors):,} of {len(sizes):,} layers, those up to {batch[0]!r}, "
                    "were compared on the engine in the time that this may take"
                )
                return
            try:
                self._mark(batch)
            except RunnerFailedError as failure:
                self.note = f"layers from {batch[0]!r} on could not be marked: {one_line(failure)}"
                self.out_of_memory = failure.machine
                return
            now = time.monotonic()
            seconds_per_byte = (now - began) / max(1.0, size)

    def _mark(self, batch: Sequence[str]) -> None:
        """Run an engine that also gives the outputs of the layers in ``batch``.

        Raises:
            RunnerFailedError: it cannot be built or run.
        """
        marked = set(batch)
        tensors = [t for x in self._problem.layers if x.name in marked for t in x.outputs]
        values = self._runner.marked(self._plan, self._samples, tensors)
        if not self.batches:
            self.score = _worst_score(self._problem, self._context, self._samples, values)
        self.batches += 1
        precision = self._problem.settings.precision
        for sample, of_sample in zip(self._samples, values, strict=True):
            for layer, tensor, exact in self._context.emulator.exact(sample, precision):
                if tensor in of_sample:
                    error = tensor_error(exact, of_sample[tensor])
                    self.errors.setdefault(layer, []).append(error)


def _worst_score(
    problem: Problem, context: Context, samples: Sequence[Sample], values: Sequence[Values]
) -> float:
    names = problem.graph.outputs  # a user's metric must not see the marked tensors
    return max(
        problem.requirements.score(context.references.of(s), {n: v[n] for n in names})
        for s, v in zip(samples, values, strict=True)
    )


def _batches(sizes: Mapping[str, float]) -> Iterator[list[str]]:
    """The names in order, in lists of at most :data:`BATCH_BYTES`."""
    batch: list[str] = []
    total = 0.0
    for name, size in sizes.items():
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0.0
        batch.append(name)
        total += size
    if batch:
        yield batch


def _row(errors: Sequence[TensorError]) -> dict[str, Any]:
    """The columns of one layer: its worst errors, and the mean, which ranks layers."""
    error = worst_of(errors)
    metrics = ("max_abs", "rmse", "rel_range", "snr_db")
    row = {f"engine_{name}": getattr(error, name) for name in metrics}
    row |= {"engine_finite": error.finite, "engine_nonfinite": error.nonfinite}
    return row | {"engine_mean_over_samples_rmse": mean_of(errors).rmse}
