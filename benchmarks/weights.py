"""What rounding weights to fit does: ``python -m benchmarks.weights [NAME ...]``.

FP16 with every weight rounded to the nearest number, and with weights chosen on 1, 8 and 64 inputs
and the copies that a run makes of them, judged on inputs that were not among them. Everything is
emulated. The tolerance is that of the
median input with nearest weights in FP16 (det and rec: given); the column "at its own atol" has
that of the median with all but matrix layers in FP32. A process of each name runs beside the
others: ``for m in det rec; do python -m benchmarks.weights $m --no-head & done; wait``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.models.weight_cases import MODELS, Model, median_tolerance, scores, tolerance
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.model.graph import Graph
from bisect_trt.repair.matrices import MATRIX
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.fit_weights import FittedWeights, fitted_weights
from bisect_trt.steps.problem import load

FP16 = Precision.FP16
FITTED_FROM = 1_000
"""The number of the first input that weights are chosen on."""


def snr(exact: Arrays, found: Arrays) -> float:
    """The lowest SNR of an input's outputs in dB; -inf where one is not finite."""
    errors = [tensor_error(values, found[name]) for name, values in exact.items()]
    return min(e.snr_db if e.finite else -np.inf for e in errors)


def cells(
    exact: Sequence[Arrays], found: Sequence[Arrays], atol: float, rtol: float
) -> tuple[str, str, str]:
    """SNR worst and median, score worst and median, and how many of the inputs hold."""
    ratios = [snr(e, f) for e, f in zip(exact, found, strict=True)]
    missed = scores(exact, found, atol, rtol)
    return (
        f"{min(ratios):.1f}, {np.median(ratios):.1f}",
        f"{max(missed):.2f}, {np.median(missed):.2f}",
        f"{sum(score <= 1.0 for score in missed)} of {len(missed)}",
    )


def other_layers(graph: Graph, dense: bool = False) -> frozenset[str]:
    """All layers of ``graph`` but matrix ones; with ``dense`` depthwise convolutions too."""
    layers = graph.layers_at(FP16)
    nodes = graph.proto.graph.node
    kept = {layer.name for layer in layers if layer.op in MATRIX}
    if dense:
        kept -= {layer.name for layer in layers if _is_depthwise(graph, nodes[layer.index])}
    return frozenset(layer.name for layer in layers) - kept


def _is_depthwise(graph: Graph, node: Any) -> bool:
    """Whether each channel of a convolution is alone."""
    weight = graph.constants.get(node.input[1]) if node.op_type == "Conv" else None
    return weight is not None and weight.shape[1] == 1 and weight.shape[0] > 1


def rows(model: Model, counts: Sequence[int], unseen: int, threads: int) -> Iterator[list[str]]:
    """The rows of a model: nearest, and by the inputs that the weights are chosen on."""
    others = other_layers(model.graph)
    samples = model.samples(range(min(unseen, model.unseen)))
    atol = tolerance(model, threads)
    strict = median_tolerance(model, PrecisionPlan(FP16, others), threads)
    runner = EmulatedRunner(model.graph, FP16, threads=threads)
    exact = list(runner.outputs(PrecisionPlan(Precision.FP32), samples))
    runner.release()
    for count in counts:
        began, graph, said = time.perf_counter(), model.graph, ("", "", "")
        if count:
            inputs = model.samples(range(FITTED_FROM, FITTED_FROM + count))
            fitted = as_a_run_fits(model, inputs, atol, threads)
            graph, kept = fitted.graph, [row for row in fitted.layers if row.kept]
            gains = [row.snr_after - row.snr_before for row in kept] or [0.0]
            said = (
                f"{len(kept)} of {len(fitted.layers)}, {np.median(gains):.1f} dB",
                f"{np.mean([row.moved for row in kept]):.0%}" if kept else "",
                f"{time.perf_counter() - began:.0f}",
            )
        runner = EmulatedRunner(graph, FP16, threads=threads)
        line = [
            f"{model.name} ({len(model.graph.layers_at(FP16))} layers)",
            f"{atol:g}, {model.rtol:g}",
            f"fitted, {count}" if count else "nearest",
        ]
        for pinned in (frozenset[str](), others):
            found = list(runner.outputs(PrecisionPlan(FP16, pinned), samples))
            line += cells(exact, found, atol, model.rtol)
        runner.release()
        held = sum(s <= 1.0 for s in scores(exact, found, strict, model.rtol))
        yield [*line, f"{held} of {len(exact)} at {strict:g}", *said]


def as_a_run_fits(
    model: Model, samples: Sequence[Sample], atol: float, threads: int
) -> FittedWeights:
    """The weights that a run with these inputs chooses, on their copies too."""
    with tempfile.TemporaryDirectory() as out:
        settings = Settings(
            model=model.graph.proto,
            inputs=tuple(sample.arrays for sample in samples),
            runner="emulated",
            require=(f"atol={atol},rtol={model.rtol}",),
            threads=threads or None,
            out=Path(out) / "run",
        )
        problem = load(settings, Observer())
        with open_context(problem, Observer()) as context:
            return fitted_weights(context.problem, context)


COLUMNS = (
    *("model", "atol, rtol", "weights, inputs", "FP16: SNR in dB", "score", "hold"),
    *("all but matrix layers in FP32: SNR in dB", "score", "hold", "hold at its own atol"),
    *("layers kept, median gain", "moved", "s"),
)


def arguments(about: str) -> argparse.ArgumentParser:
    """What both tables of fitted weights ask for."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--unseen", type=int, default=200)
    parser.add_argument("--no-head", action="store_true", help="rows alone")
    return parser


def print_head(columns: Sequence[str]) -> None:
    """The head of a table."""
    print(f"| {' | '.join(columns)} |")
    print(f"|{' --- |' * len(columns)}", flush=True)


def main() -> None:
    """Prints the table, a row as soon as it is there."""
    parser = arguments("What rounding weights to fit does to errors.")
    parser.add_argument("--counts", default="0,1,8,64")
    asked = parser.parse_args()
    if not asked.no_head:
        print_head(COLUMNS)
    counts = [int(count) for count in asked.counts.split(",")]
    with threadpool_limits(asked.threads, "blas"):
        for name in asked.names or MODELS:
            for row in rows(MODELS[name](), counts, asked.unseen, asked.threads):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
