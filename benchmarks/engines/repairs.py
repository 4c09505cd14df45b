"""Repaired models on engines: ``python -m benchmarks.engines.repairs``. Needs a GPU and TensorRT.

Each model that a repair edits is built three times: FP16 as it is, FP16 repaired, FP32. SNR against
ONNX Runtime's FP32 of the original, and the median time of an inference.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.common import machine
from benchmarks.models.large_models import vit_small
from benchmarks.repairs import Model, models, repaired
from bisect_trt.base.errors import BisectError, one_line
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.model.graph import Graph
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from fixtures.cases.nafnet import nafnet
from tests.models import DETECTOR, page

INPUTS = 3
"""Inputs of each model that go through an engine."""


def large() -> Iterator[tuple[Model, list[dict[str, Any]]]]:
    """Models with inputs that take a millisecond and more; they are repaired on small ones."""
    if DETECTOR.exists():
        x = np.resize(page(), (8, 3, 736, 1280)).astype(np.float32)
        small = [{"x": page()}]
        yield Model("PP-OCRv4 det, 8x3x736x1280", onnx.load(DETECTOR), small), [{"x": x}]
    case = nafnet()
    proto = onnx.ModelProto()
    proto.CopyFrom(case.model)
    for value in (*proto.graph.input, *proto.graph.output):
        for axis in (0, 2, 3):
            value.type.tensor_type.shape.dim[axis].dim_param = f"axis{axis}"
    image = np.resize(case.inputs["image"], (8, 3, 256, 256))
    yield Model("NAFNet, 8x3x256x256", proto, [case.inputs]), [{"image": image}]
    vit, inputs = vit_small(side=896, residual=8000.0)
    yield Model("ViT-S at 896, residual times 8,000", vit, [inputs]), [inputs]


def measured(
    runner: TensorRTRunner, precision: Precision, samples: list[Sample], reference: Reference
) -> tuple[str, float]:
    """The lowest SNR in dB over inputs and outputs, and the time of an inference in ms."""
    plan, worst = PrecisionPlan(precision), math.inf
    try:
        for sample, outputs in zip(samples, runner.outputs(plan, samples), strict=True):
            for name, exact in reference.outputs(sample).items():
                error = tensor_error(exact, outputs[name])
                worst = min(worst, error.snr_db if error.finite else -math.inf)
    except BisectError as error:
        return one_line(error, 60), math.nan
    latency = float(runner.facts(plan).get("latency_ms", math.nan))
    return ("not finite" if worst == -math.inf else f"{worst:.1f}"), latency


def row(model: Model, inputs: Sequence[Mapping[str, Any]]) -> str | None:
    """A row of the table, on ``inputs``; None where nothing was repaired."""
    with tempfile.TemporaryDirectory() as name:
        made = repaired(model, Path(name) / "repair")
    if made.model is None:
        return None
    samples = [Sample(f"{n}", x) for n, x in enumerate(inputs[:INPUTS])]
    reference = Reference(Graph(model.proto))
    cells = [model.name]
    engines = (
        (model.proto, Precision.FP16),
        (made.model, Precision.FP16),
        (model.proto, Precision.FP32),
    )
    for proto, precision in engines:
        runner = TensorRTRunner(Graph(proto), samples, repeats=5)
        try:
            shown, latency = measured(runner, precision, samples, reference)
        finally:
            runner.close()
        cells += [shown, f"{latency:.3f}"]
    rules = ", ".join(dict.fromkeys(r.rule for r in made.facts.rows))
    return f"| {' | '.join([*cells, rules])} |"


def main() -> None:
    """Prints the table, a row as soon as it is there."""
    print(machine())
    columns = ["model", "FP16, dB", "ms", "repaired, dB", "ms", "FP32, dB", "ms", "rules"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for model, inputs in (*((m, m.inputs) for m in models()), *large()):
        if sys.argv[1:] and model.name not in sys.argv[1:]:
            continue
        found = row(model, inputs)
        if found is not None:
            print(found, flush=True)


if __name__ == "__main__":
    main()
