"""What rounding weights to fit does: ``python -m benchmarks.weights [NAME ...]``.

FP16 with every weight rounded to the nearest number, and with weights chosen on one and on eight
inputs, alone and with the copies that a run makes of them. Judged on inputs that were not among
them. Everything is emulated.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.common import DETECTOR, RECOGNISER
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.repair.edits import Range, Ranges, Rule, beginning
from bisect_trt.repair.matrices import MATRIX
from bisect_trt.repair.rules import PROPOSE, edited
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.fit_weights import FittedWeights, fit_weights, fitted_weights
from bisect_trt.steps.problem import load
from examples.text_inputs import line, page
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import waves
from tests.repair.graphs import ranges_of, snr_db

FP16 = Precision.FP16
UNSEEN = 40
"""Inputs that the weights are judged on."""

CALIBRATED = (1, 8)
"""Inputs that the weights are chosen on."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """A repaired model, an input for each number, and the tolerance of its outputs."""

    name: str
    graph: Graph
    make: Callable[[int], np.ndarray]
    atol: float
    rtol: float

    def samples(self, numbers: range) -> list[Sample]:
        """The inputs ``numbers``."""
        (name,) = (i.name for i in self.graph.proto.graph.input)
        return [Sample(str(number), {name: self.make(number)}) for number in numbers]


def everything_at_stake(graph: Graph) -> Ranges:
    """Ranges by which every BatchNormalization is folded."""
    large = Range(largest=1.0, median=1.0, smallest=1.0, reach=1e9, positive=True)
    return {name: large for node in graph.proto.graph.node for name in node.output}


def models() -> Iterator[Model]:
    """The models of the table."""
    for name, path, make, atol in (
        ("PP-OCRv4 det", DETECTOR, page, 5e-2),
        ("PP-OCRv4 rec", RECOGNISER, line, 1e-2),
    ):
        folded = edited(beginning(Graph(onnx.load(path))), [Rule.FOLD_BN], everything_at_stake)
        yield Model(name, folded.graph, make, atol, 1e-2)
    encoder = encoder_decomposed()
    repaired = edited(
        beginning(Graph(encoder.model)), tuple(PROPOSE), lambda g: ranges_of(g, [encoder.inputs])
    )
    yield Model(encoder.name, repaired.graph, lambda n: waves(n, 1, 12, 32), 2e-3, 0.0)


def scores(model: Model, exact: Sequence[Arrays], plan: PrecisionPlan, graph: Graph) -> list[Any]:
    """SNR worst and median, score worst and median, and how many of the unseen inputs hold."""
    found = EmulatedRunner(graph, FP16).outputs(plan, model.samples(range(UNSEEN)))
    ratios, missed = list[float](), list[float]()
    for outputs, candidate in zip(exact, found, strict=True):
        for name, reference in outputs.items():
            tolerance = model.atol + model.rtol * np.abs(reference)
            ratios.append(snr_db(reference, candidate[name]))
            missed.append(float((np.abs(reference - candidate[name]) / tolerance).max()))
    return [
        f"{min(ratios):.1f}, {np.median(ratios):.1f}",
        f"{max(missed):.2f}, {np.median(missed):.2f}",
        f"{sum(score <= 1.0 for score in missed)} of {len(missed)}",
    ]


def with_copies(model: Model, samples: Sequence[Sample]) -> FittedWeights:
    """The weights that a run given ``samples`` chooses."""
    with tempfile.TemporaryDirectory() as out:
        settings = Settings(
            model=model.graph.proto,
            inputs=tuple(sample.arrays for sample in samples),
            runner="emulated",
            require=(f"atol={model.atol},rtol={model.rtol}",),
            out=Path(out) / "run",
        )
        problem = load(settings, Observer())
        with open_context(problem, Observer()) as context:
            return fitted_weights(problem, context)


def rows(model: Model) -> Iterator[list[Any]]:
    """The rows of a model: nearest, and by the inputs that the weights are chosen on."""
    layers = model.graph.layers_at(FP16)
    others = frozenset(layer.name for layer in layers if layer.op not in MATRIX)
    runner = EmulatedRunner(model.graph, FP16)
    plain = PrecisionPlan(Precision.FP32)
    exact = list(runner.outputs(plain, model.samples(range(UNSEEN))))
    for count, copies in ((0, False), *((n, c) for n in CALIBRATED for c in (False, True))):
        began, graph, said = time.perf_counter(), model.graph, ["", "", ""]
        if count:
            samples = model.samples(range(1000, 1000 + count))
            fitted = with_copies(model, samples) if copies else fit_weights(graph, samples, FP16)
            graph, kept = fitted.graph, [row for row in fitted.layers if row.kept]
            gains = [row.snr_after - row.snr_before for row in kept] or [0.0]
            said = [
                f"{len(kept)} of {len(fitted.layers)}, {np.median(gains):.1f} dB",
                f"{np.mean([row.moved for row in kept]):.0%}" if kept else "",
                f"{time.perf_counter() - began:.0f}",
            ]
        whole = scores(model, exact, PrecisionPlan(FP16), graph)
        matrix = scores(model, exact, PrecisionPlan(FP16, others), graph)
        name = f"{model.name} ({len(layers)} layers)"
        how = f"fitted, {count}{' and copies' if copies else ''}" if count else "nearest"
        yield [name, how, *whole, *matrix, *said]


COLUMNS = (
    *("model", "weights, inputs", "FP16: SNR in dB", "score", "hold"),
    *("all but matrix layers in FP32: SNR in dB", "score", "hold"),
    *("layers kept, median gain", "moved", "s"),
)


def main() -> None:
    """Prints the table, a row as soon as it is there."""
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{' --- |' * len(COLUMNS)}")
    for model in models():
        if sys.argv[1:] and model.name not in sys.argv[1:]:
            continue
        for row in rows(model):
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
