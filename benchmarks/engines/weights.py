"""Weights rounded to fit on engines: ``python -m benchmarks.engines.weights``. Needs a GPU and
TensorRT.

PP-OCRv4 det with its BatchNorm folded: nearest and fitted on eight pages, as FP16 and with all but
matrix layers in FP32. Judged on unseen pages against ONNX Runtime's FP32; timed at 8x3x736x1280.
"""

from __future__ import annotations

import numpy as np

from benchmarks.common import machine
from benchmarks.weights import FP16, models
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.repair.matrices import MATRIX
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.steps.fit_weights import fit_weights
from tests.repair.graphs import snr_db

UNSEEN = 64
"""Pages that the weights are judged on."""

LARGE = (8, 3, 736, 1280)
"""The shape at which engines are timed."""


def main() -> None:
    """Prints the table, a row as soon as it is there."""
    print(machine())
    det = next(iter(models()))
    fitted = fit_weights(det.graph, det.samples(range(1000, 1008)), FP16)
    others = frozenset(n.name for n in det.graph.layers_at(FP16) if n.op not in MATRIX)
    unseen = det.samples(range(UNSEEN))
    reference = Reference(det.graph)
    exact = [reference.outputs(sample) for sample in unseen]
    (name,) = unseen[0].arrays
    large = [Sample("large", {name: np.resize(unseen[0].arrays[name], LARGE)})]
    columns = ("weights", "in FP32", "SNR, dB: worst, median", "hold", "worst", "ms")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for what, pinned in (("none", frozenset[str]()), ("all but matrix layers", others)):
        for how, graph in (("nearest", det.graph), ("fitted", fitted.graph)):
            plan, ratios, scores = PrecisionPlan(FP16, pinned), list[float](), list[float]()
            runner = TensorRTRunner(graph, unseen, repeats=2)
            for true, found in zip(exact, runner.outputs(plan, unseen), strict=True):
                for output, values in true.items():
                    ratios.append(snr_db(values, found[output]))
                    tolerance = det.atol + det.rtol * np.abs(values)
                    scores.append(float((np.abs(values - found[output]) / tolerance).max()))
            runner.close()
            cells = [how, what, f"{min(ratios):.1f}, {np.median(ratios):.1f}"]
            cells += [f"{sum(s <= 1.0 for s in scores)} of {len(scores)}", f"{max(scores):.2f}"]
            print(f"| {' | '.join([*cells, latency(graph, plan, large)])} |", flush=True)
    fp32 = PrecisionPlan(Precision.FP32)
    print(f"| FP32 | all | | | | {latency(det.graph, fp32, large)} |")


def latency(graph: Graph, plan: PrecisionPlan, samples: list[Sample]) -> str:
    """The time of an inference in ms."""
    runner = TensorRTRunner(graph, samples, repeats=5)
    next(iter(runner.outputs(plan, samples)))
    found = runner.facts(plan).get("latency_ms")
    runner.close()
    return f"{found:.3f}" if found is not None else ""


if __name__ == "__main__":
    main()
