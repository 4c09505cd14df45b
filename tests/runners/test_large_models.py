"""A copy of many weights is held by one session at a time."""

from __future__ import annotations

from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.runners import second_emulator
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.ort_session import reference_session, run_all
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.second_emulator import WholeModelRunner
from tests.conftest import Sessions, alive
from tests.runners.test_switched import layers, network, sample

PLAN = PrecisionPlan(Precision.FP16)


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    """A product with a weight of 64 kB, which stays in its file."""
    weight = np.random.default_rng(0).standard_normal((128, 128), np.float32)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 128]) for n in "xy"]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    made = helper.make_graph(
        nodes, "g", values[:1], values[1:], [numpy_helper.from_array(weight, "w")]
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(made, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
    return Graph(load_model(tmp_path / "m.onnx").proto)


@pytest.mark.parametrize(("many", "together"), [(1 << 40, 2), (1, 1)])
def test_many_weights_are_held_in_turn(
    graph: Graph,
    many: int,
    together: int,
    sessions_opened: Sessions,
) -> None:
    """The reference uses the weights where they lie: only the second emulator has a copy."""
    sample = Sample("s", {"x": np.linspace(-1, 1, 128, dtype=np.float32)[None]})
    reference = Reference(graph, large_bytes=many)
    second = WholeModelRunner(graph, large_bytes=many)

    def answers() -> tuple[NDArray[Any], NDArray[Any]]:
        exact = reference.outputs(sample)["y"]
        return exact, next(iter(second.outputs(PLAN, [sample])))["y"]

    first = answers()
    assert alive(sessions_opened) == together
    # A session that was closed gives the same when it is opened again.
    assert all(np.array_equal(*pair) for pair in zip(first, answers(), strict=True))
    assert alive(sessions_opened) == together
    assert len(sessions_opened) == (2 if together == 2 else 3)
    assert not np.array_equal(*first)


def test_many_threads_open_what_one_does(
    sessions_opened: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bisect_trt.runners.concurrency.thread_count", lambda *_: 8)
    runner = EmulatedRunner(network())
    several = [sample(seed) for seed in range(9)]
    list(runner.outputs(PLAN, several))
    opened_once = len(sessions_opened)
    list(runner.outputs(PLAN.with_pins(frozenset(layers()[::2])), several))
    assert len(sessions_opened) == opened_once == 1


def test_no_session_is_opened_while_one_of_the_model_s_other_form_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bisect_trt.runners.concurrency.thread_count", lambda *_: 4)
    graph = Graph(
        onnx.parser.parse_model("""
            <ir_version: 8, opset_import: ["" : 17]>
            g (int64[4] ids) => (float[4, 2] y)
            <float[4, 2] table = {0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5}> {
                e = Gather(table, ids)
                y = Mul(e, e)
            }
        """)
    )
    (lookup,) = graph.lookups
    ids = Sample("ids", {"ids": np.arange(4)})
    moved = Sample("moved", {"ids": np.arange(4), lookup.source: np.ones((4, 2), np.float32)})
    runner = WholeModelRunner(graph)
    running: set[int] = set()

    def run(session: ort.InferenceSession, arrays: Arrays, name: str) -> Any:
        key = get_ident()
        running.add(key)
        try:
            return run_all(session, arrays, name)
        finally:
            running.discard(key)

    def opening(*given: Any, **named: Any) -> ort.InferenceSession:
        assert not running
        return reference_session(*given, **named)

    monkeypatch.setattr(second_emulator, "run_all", run)
    monkeypatch.setattr(second_emulator, "reference_session", opening)
    found = list(runner.outputs(PLAN, [ids] * 6 + [moved] * 6 + [ids] * 2))
    alone = [next(iter(runner.outputs(PLAN, [s])))["y"] for s in (ids, moved)]
    for answer, expected in zip(found, [0] * 6 + [1] * 6 + [0] * 2, strict=True):
        assert np.array_equal(answer["y"], alone[expected])
