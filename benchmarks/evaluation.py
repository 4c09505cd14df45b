"""An evaluation by the emulator from a model's beginning against a plain inference, by the ways to
switch roundings that were tried, and what a layer alone takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from benchmarks.common import DETECTOR, RECOGNISER, SHARED, detector_input, load, medians
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers, to_emulated
from bisect_trt.runners.emulator import EmulatedRunner


def session(model: onnx.ModelProto, *, optimise: bool) -> ort.InferenceSession:
    """A session over a whole model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def measure(path: Path, inputs: Path) -> list[tuple[str, float]]:
    """(way, median seconds) for plain inference, three ways to run a new plan, pins varied from
    call to call, and a layer's effect.
    """
    model, feed = onnx.load(path), load(inputs)
    layers = [layer.name for layer in list_layers(model)]
    runner, sample = EmulatedRunner(model), Sample("s", feed)
    plain, counter = session(model, optimise=True), itertools.count()
    random = np.random.default_rng(0)

    def plan() -> PrecisionPlan:
        return PrecisionPlan(
            "fp16", random.choice(layers, next(counter) % len(layers), replace=False).tolist()
        )

    ways: dict[str, Callable[[], object]] = {
        "plain FP32 inference": lambda: plain.run(None, feed),
        "evaluation: one session, roundings switched by inputs (in use)": lambda: list(
            runner.outputs(plan(), [sample])
        ),
        "evaluation: rebuild model and session": lambda: session(
            to_emulated(model, plan()), optimise=False
        ).run(None, feed),
    }
    (sensitivities,) = medians(
        lambda: list(runner.sensitivities(sample, Precision.FP16, layers)), rounds=5
    )
    alone = "one layer reduced, from the cut before it on (in use); mean of all layers"
    return [*zip(ways, medians(*ways.values()), strict=True), (alone, sensitivities / len(layers))]


def report() -> list[str]:
    """The table, with the limit of the first evaluation row: 3."""
    lines = ["## An evaluation against a plain inference (limit for the way in use: 3)", ""]
    lines += ["| model | way | median ms | times plain |", "| --- | --- | --- | --- |"]
    cases = [(DETECTOR, detector_input())]
    if (SHARED / "ocr_rec.npz").exists():
        cases.append((RECOGNISER, SHARED / "ocr_rec.npz"))
    for path, inputs in cases:
        rows = measure(path, inputs)
        for way, seconds in rows:
            lines.append(
                f"| {path.stem} | {way} | {seconds * 1e3:.1f} | {seconds / rows[0][1]:.2f} |"
            )
    return lines
