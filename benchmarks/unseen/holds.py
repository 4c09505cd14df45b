"""How far a copy must be moved for its roundings to fall anew, and no farther.

``python -m benchmarks.unseen.validation`` prints a row for each model and amount;
``benchmarks/results/perturbations.md`` keeps the newest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.common import DETECTOR, MODELS, RECOGNISER, SHARED, load, machine
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.perturbations import perturbed, perturbed_lookups
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.reference import Lookups
from fixtures.encoders import encoder_decomposed
from fixtures.models import residual
from fixtures.tokens import sentence, token_encoder

AMOUNTS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_COPIES = 4


def table(
    name: str,
    model: onnx.ModelProto,
    inputs: Arrays,
    pins: frozenset[str],
    move: Callable[[Arrays, np.random.Generator, float], Arrays] = perturbed,
) -> list[str]:
    """A row for each amount.

    Args:
        name: of the model.
        model: an FP32 one.
        inputs: one sample.
        pins: the layers that overflow: what they do to FP16 is not a rounding.
        move: makes a copy.
    """
    runner = EmulatedRunner(model)
    plans = (PrecisionPlan("fp32"), PrecisionPlan("fp16").with_pins(pins))

    def run(arrays: Arrays) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        sample = Sample("s", arrays)
        exact, reduced = (
            np.concatenate([o.ravel() for o in next(iter(runner.outputs(p, [sample]))).values()])
            for p in plans
        )
        return exact.astype(np.float64), reduced.astype(np.float64) - exact

    exact, error = run(inputs)
    rows = []
    for amount in AMOUNTS:
        moved, alike, largest = [], [], []
        for copy in range(_COPIES):
            other, other_error = run(move(inputs, np.random.default_rng(copy), amount))
            moved.append((other - exact).std() / exact.std())
            alike.append(float(np.corrcoef(error, other_error)[0, 1]))
            largest.append(np.abs(other_error).max() / np.abs(error).max())
        rows.append(
            f"| {name} | {amount:.0e} | {np.mean(moved):.1e} | {np.mean(alike):.3f} "
            f"| {min(largest):.2f} to {max(largest):.2f} |"
        )
    return rows


def main() -> None:
    """Print the table."""
    print(f"# How far copies are moved\n\n`python -m benchmarks.unseen.holds`, {machine()}\n")
    print("| model | amount | FP32 output moves | errors correlate | largest error, relative |")
    print("| --- | --- | --- | --- | --- |")
    residual_, encoder = residual(), encoder_decomposed()
    rows = table("residual", residual_.model, residual_.inputs, frozenset())
    rows += table("encoder", encoder.model, encoder.inputs, encoder.pins)
    tokens = token_encoder()
    given = Sample("s", sentence(0))
    whole = {**given.arrays, **Lookups(Graph(tokens)).of(given)}
    rows += table("token ids", tokens, whole, frozenset(), perturbed_lookups)
    detector = load_model(DETECTOR).proto
    rows += table(
        "det, demo's page",
        detector,
        load(MODELS / "page.npz"),
        frozenset({"p2o.BatchNormalization.1"}),
    )
    if SHARED.exists():
        recogniser = load_model(RECOGNISER).proto
        rows += table("rec, shared line", recogniser, load(SHARED / "ocr_rec.npz"), frozenset())
    print("\n".join(rows))


if __name__ == "__main__":
    main()
