"""Weights rounded to fit on engines: ``python -m benchmarks.engines.weights [NAME ...]``. Needs a
GPU and TensorRT.

PP-OCRv4 det with its BatchNorm folded, fitted on eight pages, and ViT-S of one batch of 32 photos,
fitted on one: nearest and fitted, as FP16, with all but matrix layers in FP32, and of det with its
depthwise convolutions in FP32 too. Judged on unseen pages and photos one by one, beside what the
emulator says of the same; timed at a batch. ``--no-engine`` leaves the emulator's columns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from threadpoolctl import threadpool_limits

from benchmarks.common import machine
from benchmarks.models.weight_cases import MODELS, Model, photos, tolerance
from benchmarks.weights import (
    FITTED_FROM,
    FP16,
    as_a_run_fits,
    cells,
    other_layers,
    print_head,
)
from bisect_trt.base.limits import thread_count
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.tensorrt.runner import TensorRTRunner

BATCH = (32, 3, 224, 224)
"""The shape of ViT-S's export, since one of any number of images does not build."""


def _vit_small() -> Model:
    """The atol is that of the median photo in plain FP16, of benchmarks/results/weights.md."""
    from benchmarks.models.exported import export

    with tempfile.TemporaryDirectory() as folder:
        proto = onnx.load(export("ViT-S", Path(folder), BATCH))
    return Model("ViT-S", proto, Graph(proto), partial(photos, BATCH), 1.4e-3)


@dataclass(frozen=True)
class Timed:
    """A model, how many inputs its weights are fitted on, and the shape at which it is timed."""

    make: Callable[[], Model]
    inputs: int
    shape: tuple[int, ...]


TIMED = {
    "det": Timed(MODELS["det"], 8, (8, 3, 736, 1280)),
    "ViT-S": Timed(_vit_small, 1, BATCH),
}
"""The models."""


def one_by_one(batches: Sequence[Arrays]) -> list[Arrays]:
    """The outputs of each image, which are the rows of an output's first axis."""
    return [
        {name: array[row : row + 1] for name, array in batch.items()}
        for batch in batches
        for row in range(len(next(iter(batch.values()))))
    ]


def on_engine(graph: Graph, plan: PrecisionPlan, samples: list[Sample]) -> list[Arrays]:
    """The outputs of an engine."""
    runner = TensorRTRunner(graph, samples, repeats=2)
    try:
        return list(runner.outputs(plan, samples))
    finally:
        runner.close()


def latency(graph: Graph, plan: PrecisionPlan, samples: list[Sample]) -> str:
    """The time of an inference in ms."""
    runner = TensorRTRunner(graph, samples, repeats=5)
    try:
        next(iter(runner.outputs(plan, samples)))
        found = runner.facts(plan).get("latency_ms")
    finally:
        runner.close()
    return f"{found:.3f}" if found is not None else ""


def rows(timed: Timed, unseen: int, threads: int, *, engine: bool) -> Iterator[list[str]]:
    """The rows of a model, and FP32's time."""
    model = timed.make()
    inputs = model.samples(range(FITTED_FROM, FITTED_FROM + timed.inputs))
    (array,) = inputs[0].arrays.values()
    atol, samples = tolerance(model, threads), model.samples(range(unseen // len(array)))
    fitted = as_a_run_fits(model, inputs, atol, threads)
    runner = EmulatedRunner(model.graph, FP16, threads=threads)
    exact = one_by_one(list(runner.outputs(PrecisionPlan(Precision.FP32), samples)))
    (name,) = samples[0].arrays
    batch = np.concatenate([sample.arrays[name] for sample in samples])
    large = [Sample("large", {name: np.resize(batch, timed.shape)})]
    kept = {"none": frozenset[str](), "all but matrix layers": other_layers(model.graph)}
    dense = other_layers(model.graph, dense=True)
    if dense != kept["all but matrix layers"]:
        kept["all but dense matrix layers"] = dense
    for what, pinned in kept.items():
        for how, graph in (("nearest", model.graph), ("fitted", fitted.graph)):
            plan = PrecisionPlan(FP16, pinned)
            runner = EmulatedRunner(graph, FP16, threads=threads)
            found = one_by_one(list(runner.outputs(plan, samples)))
            emulated = cells(exact, found, atol, model.rtol)
            runner.release()
            line = [f"{model.name} ({atol:g}, {model.rtol:g})", how, what, *emulated]
            if engine:
                found = one_by_one(on_engine(graph, plan, samples))
                line += cells(exact, found, atol, model.rtol)
                line.append(latency(graph, plan, large))
            yield line
    if engine:
        time = latency(model.graph, PrecisionPlan(Precision.FP32), large)
        yield [model.name, "FP32", "all", *[""] * 6, time]


COLUMNS = (
    *("model (atol, rtol)", "weights", "in FP32"),
    *("emulator: SNR in dB", "score", "hold", "engine: SNR in dB", "score", "hold", "ms"),
)


def main() -> None:
    """Prints the table, a row as soon as it is there."""
    parser = argparse.ArgumentParser(description="Weights rounded to fit on engines.")
    parser.add_argument("names", nargs="*", choices=[*TIMED, []], help="default: all")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--unseen", type=int, default=64)
    parser.add_argument("--no-engine", action="store_true", help="the emulator's columns alone")
    asked = parser.parse_args()
    print(machine())
    print_head(COLUMNS)
    with threadpool_limits(thread_count(asked.threads), "blas"):
        for name in asked.names or TIMED:
            for row in rows(TIMED[name], asked.unseen, asked.threads, engine=not asked.no_engine):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
