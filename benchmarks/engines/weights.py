"""Weights rounded to fit on engines: ``python -m benchmarks.engines.weights [NAME ...]``. Needs a
GPU and TensorRT.

PP-OCRv4 det with its BatchNorm folded, and ViT-S: nearest and fitted on eight inputs, as FP16, with
all but matrix layers in FP32, and of det with its depthwise convolutions in FP32 too. Judged on
unseen inputs, beside what the emulator says of the same; timed at a batch. ``--no-engine`` leaves
the emulator's columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.common import machine
from benchmarks.models.weight_cases import MODELS, Model, tolerance
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

BATCHES = {"det": (8, 3, 736, 1280), "ViT-S-batches": (32, 3, 224, 224)}
"""The models, and the shape at which each is timed."""


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


def rows(model: Model, unseen: int, threads: int, *, engine: bool) -> Iterator[list[str]]:
    """The rows of a model, and FP32's time."""
    inputs = model.samples(range(FITTED_FROM, FITTED_FROM + 8))
    atol, samples = tolerance(model, threads), model.samples(range(unseen))
    fitted = as_a_run_fits(model, inputs, atol, threads)
    runner = EmulatedRunner(model.graph, FP16, threads=threads)
    exact = list(runner.outputs(PrecisionPlan(Precision.FP32), samples))
    (name,) = samples[0].arrays
    batch = np.concatenate([sample.arrays[name] for sample in samples[:32]])
    large = [Sample("large", {name: np.resize(batch, BATCHES[model.name])})]
    kept = {"none": frozenset[str](), "all but matrix layers": other_layers(model.graph)}
    dense = other_layers(model.graph, dense=True)
    if dense != kept["all but matrix layers"]:
        kept["all but dense matrix layers"] = dense
    for what, pinned in kept.items():
        for how, graph in (("nearest", model.graph), ("fitted", fitted.graph)):
            plan = PrecisionPlan(FP16, pinned)
            runner = EmulatedRunner(graph, FP16, threads=threads)
            emulated = cells(exact, list(runner.outputs(plan, samples)), atol, model.rtol)
            runner.release()
            line = [f"{model.name} ({atol:g}, {model.rtol:g})", how, what, *emulated]
            if engine:
                line += cells(exact, on_engine(graph, plan, samples), atol, model.rtol)
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
    parser.add_argument("names", nargs="*", choices=[*BATCHES, []], help="default: all")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--unseen", type=int, default=64)
    parser.add_argument("--no-engine", action="store_true", help="the emulator's columns alone")
    asked = parser.parse_args()
    print(machine())
    print_head(COLUMNS)
    with threadpool_limits(thread_count(asked.threads), "blas"):
        for name in asked.names or BATCHES:
            model = MODELS[name]()
            for row in rows(model, asked.unseen, asked.threads, engine=not asked.no_engine):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
