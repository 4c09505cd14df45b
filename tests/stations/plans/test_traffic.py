"""Memory traffic of plans, counted by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest

from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.settings import Settings
from bisect_trt.steps import tradeoff
from bisect_trt.steps.context import open_context
from bisect_trt.steps.layer_errors import trace_layers
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.tradeoff import relative_bytes


def traced(tmp_path: Path) -> tuple[Problem, pd.DataFrame]:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 8] x) => (float[n, 4] y) <float[8, 4] w = {0}> {
            h = MatMul(x, w)
            y = Relu(h)
        }
    """)
    weight = np.sin(np.arange(32, dtype=np.float32)).reshape(8, 4)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, "w"))
    model.graph.node[0].name, model.graph.node[1].name = "product", "relu"
    inputs = [{"x": np.sin(np.arange(8 * n, dtype=np.float32)).reshape(n, 8)} for n in (1, 3)]
    problem = load(Settings(model, inputs, out=tmp_path), Observer())
    with open_context(problem, Observer()) as context:
        return problem, trace_layers(problem, context, problem.samples)


def test_bytes_are_those_of_what_layers_read_and_write(tmp_path: Path) -> None:
    problem, table = traced(tmp_path)
    # Of two rows in the mean: the product reads 16 and 32 elements and gives 8, Relu 8 and 8.
    product, relu = 16 + 32 + 8, 8 + 8
    every = product + relu
    for pins, expected in (
        ([], 1.0),
        (["relu"], (product + 2 * relu) / every),
        (["product"], (2 * product + relu) / every),
        (["relu", "product"], 2.0),
    ):
        assert relative_bytes(problem, table, PrecisionPlan("fp16", pins)) == pytest.approx(
            expected
        )


def test_nothing_is_said_where_nothing_is_known(tmp_path: Path) -> None:
    problem, table = traced(tmp_path)
    assert math.isnan(relative_bytes(problem, table, PrecisionPlan("tf32")))
    table.loc[1, "elements"] = np.nan
    assert math.isnan(relative_bytes(problem, table, PrecisionPlan("fp16")))


@pytest.mark.parametrize(("slower", "told"), [(3.0, 1.0 + 2.0 * 16 / 72), (0.9, math.nan)])
def test_a_latency_is_told_between_two_that_were_measured(
    tmp_path: Path, slower: float, told: float
) -> None:
    problem, table = traced(tmp_path)
    base = PrecisionPlan("fp16")
    built = {base: 1.0, PrecisionPlan("fp32"): slower}  # all pins are that network
    done = {plan: SimpleNamespace(facts={"latency_ms": ms}) for plan, ms in built.items()}
    asked: Any = (
        problem,
        SimpleNamespace(engine=SimpleNamespace(done=done), plan_for=lambda _, p: p),
    )
    layers: Any = SimpleNamespace(layers=table)
    found = tradeoff._by_moved_bytes(*asked, layers, base, base.with_pins(["relu"]))
    assert found == pytest.approx(told, nan_ok=True)
    without: Any = (problem, SimpleNamespace(engine=None))
    assert math.isnan(tradeoff._by_moved_bytes(*without, layers, base, base))
