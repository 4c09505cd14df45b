"""Layers that ``bisect-trt run`` keeps in FP32 with nearest and with fitted weights:
``python -m benchmarks.fitted_answers [NAME ...] [--ways nearest,fit] [--inputs 8]``.

Every row of the answer is judged on inputs that the search has not seen, emulated. ``det
--matrix-reduced`` with ``--inputs 1`` and ``--inputs 8`` shows whether a plan without a matrix
layer in FP32 suffices.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
from threadpoolctl import threadpool_limits

import bisect_trt
from benchmarks.models.weight_cases import MODELS, Model, scores, tolerance
from benchmarks.weights import FITTED_FROM, FP16, arguments, print_head
from bisect_trt.base.atomic_files import FITTED_MODEL, REPAIRED_MODEL
from bisect_trt.base.errors import BisectError, one_line
from bisect_trt.base.outcomes import FITTED, PLAN, REPAIRED
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.cost import layer_works
from bisect_trt.model.graph import Graph
from bisect_trt.repair.matrices import MATRIX
from bisect_trt.report.choices import Choice
from bisect_trt.runners.emulator import EmulatedRunner


def multiply_adds(graph: Graph, sample: Sample) -> Mapping[str, float]:
    """The multiply-adds of each matrix layer of ``graph`` at the shapes of ``sample``."""
    works = layer_works(graph, sample.shapes, FP16)
    return {work.name: work.multiply_adds for work in works if work.op in MATRIX}


def rows(
    model: Model,
    *,
    way: str,
    inputs: int,
    unseen: int,
    threads: int,
    budget: float,
    keep_reduced: tuple[str, ...] = (),
) -> Iterator[list[str]]:
    """The rows of an answer that pass or miss, the recommended one in bold."""
    atol, began = tolerance(model, threads), time.perf_counter()
    given = model.samples(range(FITTED_FROM, FITTED_FROM + inputs))
    with tempfile.TemporaryDirectory() as name:
        try:
            result = bisect_trt.bisect(
                model.original,
                [sample.arrays for sample in given],
                require=f"atol={atol:g},rtol={model.rtol:g}",
                runner="emulated",
                weights=way,
                threads=threads,
                budget=budget,
                keep_reduced=keep_reduced,
                out=name,
            )
        except BisectError as error:
            yield [model.name, str(inputs), way, one_line(error, 60), *[""] * 6]
            return
        seconds = time.perf_counter() - began
        notes = ["cut short"] * result.out_of_time
        notes += ["not fitted"] * any(f.kind == "not-fitted" for f in result.findings)
        samples = model.samples(range(min(unseen, model.unseen)))
        runner = EmulatedRunner(Graph(model.original), FP16, threads=threads)
        exact = list(runner.outputs(PrecisionPlan(Precision.FP32), samples))
        runner.release()
        for choice in result.choice_rows:
            if not (choice.recommended or choice.name in (PLAN, REPAIRED, FITTED)):
                continue
            graph = _graph_of(choice, model, Path(name))
            work = multiply_adds(graph, given[0])
            reduced = sum(work.values()) - sum(work.get(layer, 0) for layer in choice.pinned)
            runner = EmulatedRunner(graph, FP16, threads=threads)
            found = list(runner.outputs(choice.plan, samples))
            runner.release()
            missed = scores(exact, found, atol, model.rtol)
            yield [
                f"{model.name} ({result.layer_count} layers; {atol:g}, {model.rtol:g})",
                str(inputs),
                way,
                f"**{choice.name}**" if choice.recommended else choice.name,
                str(len(choice.pinned)),
                f"{len(work.keys() & set(choice.pinned))} of {len(work)}",
                f"{reduced / max(1, sum(work.values())):.0%}",
                choice.passes.value,
                f"{sum(score <= 1.0 for score in missed)} of {len(missed)}",
                ", ".join([f"{seconds:.0f}", *notes]),
            ]


def matrix_layers(graph: Graph) -> str:
    """A regular expression that matches the names of all matrix layers."""
    names = [re.escape(layer.name) for layer in graph.layers_at(FP16) if layer.op in MATRIX]
    return f"^({'|'.join(names)})$"


def _graph_of(choice: Choice, model: Model, folder: Path) -> Graph:
    """The graph that the plan of a choice is for."""
    if choice.fitted:
        return Graph(onnx.load(folder / FITTED_MODEL))
    return Graph(onnx.load(folder / REPAIRED_MODEL) if choice.repaired else model.original)


COLUMNS = (
    *("model (atol, rtol)", "inputs", "--weights", "choice", "layers in FP32", "matrix layers"),
    *("multiply-adds in FP16", "passes", "unseen hold", "s"),
)


def main() -> None:
    """Prints the table, a row as soon as it is there."""
    parser = arguments("Layers kept in FP32 with nearest and with fitted weights.")
    parser.add_argument("--ways", default="nearest,fit")
    parser.add_argument("--inputs", type=int, default=8)
    parser.add_argument("--budget", type=float, default=6.0, help="minutes of each search")
    parser.add_argument(
        "--matrix-reduced",
        action="store_true",
        help="fold BatchNormalization first, and keep no matrix layer in FP32",
    )
    asked = parser.parse_args()
    if not asked.no_head:
        print_head(COLUMNS)
    for name in asked.names or MODELS:
        model, keep_reduced = MODELS[name](), tuple[str, ...]()
        if asked.matrix_reduced:
            model = replace(model, original=model.graph.proto)
            keep_reduced = (matrix_layers(model.graph),)
        for way in asked.ways.split(","):
            with threadpool_limits(asked.threads, "blas"):
                for row in rows(
                    model,
                    way=way,
                    inputs=asked.inputs,
                    unseen=asked.unseen,
                    threads=asked.threads,
                    budget=asked.budget,
                    keep_reduced=keep_reduced,
                ):
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
