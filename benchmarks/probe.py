"""A probe of the emulator against a plain inference, and the ways to switch roundings that were tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from benchmarks.common import DETECTOR, RECOGNISER, SHARED, detector_input, load, medians
from bisect_trt.graph import list_layers, to_emulated
from bisect_trt.precision import PrecisionPlan
from bisect_trt.runners.base import Sample
from bisect_trt.runners.emulated import EmulatedRunner


def session(model: onnx.ModelProto, *, optimise: bool) -> ort.InferenceSession:
    """A session over a whole model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def switchable(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """One graph for all plans: every layer's output goes through an If that rounds it or not, by an input a layer.

    Only the outputs are rounded and weights are left alone, so this is a lower bound of what the way costs.
    """
    new = onnx.ModelProto()
    new.CopyFrom(model)
    layers = {layer.index: layer for layer in list_layers(model)}
    nodes, flags = [], []
    for index, node in enumerate(model.graph.node):
        copy = nodes.append(onnx.NodeProto()) or nodes[-1]
        copy.CopyFrom(node)
        if index not in layers:
            continue
        flag, name, raw = f"flag_{index}", node.output[0], f"{node.output[0]}__raw"
        copy.output[0] = raw
        flags.append(flag)
        new.graph.input.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, []))
        rounded = [
            helper.make_node("Cast", [raw], [f"{name}__h"], to=TensorProto.FLOAT16),
            helper.make_node("Cast", [f"{name}__h"], [f"{name}__r"], to=TensorProto.FLOAT),
        ]
        plain = [helper.make_node("Identity", [raw], [f"{name}__p"])]
        bodies = {
            "then_branch": helper.make_graph(rounded, "r", [], [helper.make_tensor_value_info(f"{name}__r", TensorProto.FLOAT, None)]),
            "else_branch": helper.make_graph(plain, "p", [], [helper.make_tensor_value_info(f"{name}__p", TensorProto.FLOAT, None)]),
        }
        nodes.append(helper.make_node("If", [flag], [name], **bodies))
    del new.graph.node[:]
    new.graph.node.extend(nodes)
    return new, flags


def measure(path: Path, inputs: Path) -> list[tuple[str, float]]:
    """(way, median seconds) for plain inference and three ways to run a new plan, pins varied from call to call."""
    model, feed = onnx.load(path), load(inputs)
    layers = [layer.name for layer in list_layers(model)]
    runner = EmulatedRunner(model, [Sample("s", feed)])
    plain, counter = session(model, optimise=True), itertools.count()
    graph, flags = switchable(model)
    switched = session(graph, optimise=True)
    random = np.random.default_rng(0)

    def plan() -> PrecisionPlan:
        return PrecisionPlan("fp16", random.choice(layers, next(counter) % len(layers), replace=False).tolist())

    ways: dict[str, Callable[[], object]] = {
        "plain FP32 inference": lambda: plain.run(None, feed),
        "probe: pieces, kept sessions (in use)": lambda: list(runner.outputs(plan())),
        "probe: one graph, an If a layer": lambda: switched.run(None, {**feed, **{f: np.array(random.random() < 0.5) for f in flags}}),
        "probe: rebuild model and session": lambda: session(to_emulated(model, plan()), optimise=False).run(None, feed),
    }
    return list(zip(ways, medians(*ways.values()), strict=True))


def report() -> list[str]:
    """The table, with the limit of the first probe row: 3."""
    lines = ["## A probe against a plain inference (limit for the way in use: 3)", ""]
    lines += ["| model | way | median ms | times plain |", "| --- | --- | --- | --- |"]
    cases = [(DETECTOR, detector_input())]
    if (SHARED / "ocr_rec.npz").exists():
        cases.append((RECOGNISER, SHARED / "ocr_rec.npz"))
    for path, inputs in cases:
        rows = measure(path, inputs)
        for way, seconds in rows:
            lines.append(f"| {path.stem} | {way} | {seconds * 1e3:.1f} | {seconds / rows[0][1]:.2f} |")
    return lines
