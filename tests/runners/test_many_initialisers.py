"""A session over a model of many initialisers keeps them: opened in a quarter of the time, and no
answer is another, whatever the model is made of.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.runners import ort_session
from bisect_trt.runners.ort_session import reference_session, session_as_written
from bisect_trt.runners.second_emulator import WholeModelRunner
from tests.graph.node_models import cases, feed_of

EVERY = 7
"""Of ONNX's operator models each seventh is opened: all of them were once, by hand."""


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any count is many."""
    monkeypatch.setattr(ort_session, "_MANY_INITIALISERS", 0)


def answers(model: onnx.ModelProto, feed: dict[str, Any]) -> list[list[Any]] | None:
    """Of both kinds of session; None where ONNX Runtime has no kernel."""
    try:
        return [
            session.run(None, feed)
            for session in (reference_session(model), session_as_written(model, "m"))
        ]
    except Exception:
        return None


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_equal(found, expected)


def as_constants(model: onnx.ModelProto, feed: dict[str, Any]) -> onnx.ModelProto:
    """``model`` whose inputs behind the first are initialisers, where they are tensors."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for value in list(made.graph.input)[1:]:
        if isinstance(feed[value.name], np.ndarray):
            made.graph.initializer.append(numpy_helper.from_array(feed[value.name], value.name))
            made.graph.input.remove(value)
    return made


def test_each_operator_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = 0
    for problem in list(cases().values())[::EVERY]:
        given = feed_of(problem)
        model = as_constants(problem.model, given)
        taken = {value.name for value in model.graph.input}
        feed = {name: value for name, value in given.items() if name in taken}
        monkeypatch.setattr(ort_session, "_MANY_INITIALISERS", 1 << 60)
        expected = answers(model, feed)
        monkeypatch.setattr(ort_session, "_MANY_INITIALISERS", 0)
        found = answers(model, feed)
        if expected is None:
            assert found is None, problem.name
            continue
        if "random" not in problem.name and "bernoulli" not in problem.name:
            assert_same(found, expected)
        opened += 1
    assert opened > 150


def linear(folder: Path | None) -> Graph:
    """A product, an addition and a body that reads a weight from around it; with the weights in a
    file in ``folder`` where it is given.
    """
    random = np.random.default_rng(0)
    inits = [
        numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w", (64, 64)), ("b", (64,)))
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 64])
    bodies = [
        helper.make_graph([helper.make_node(kind, ["s", "w"], ["y"])], kind, [], [y])
        for kind in ("MatMul", "Gemm")
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], "product"),
        helper.make_node("Add", ["p", "b"], ["s"], "sum"),
        helper.make_node("If", ["c"], ["y"], "if", then_branch=bodies[0], else_branch=bodies[1]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 64]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    made = helper.make_graph(nodes, "g", inputs, [y], inits)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if folder is None:
        return Graph(model)
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return Graph(load_model(path).proto)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_weights_in_a_file_and_those_of_bodies(
    many: None, tmp_path: Path, in_file: bool, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = linear(tmp_path if in_file else None)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    feed = {"x": np.ones((2, 64), np.float32), "c": np.array(True)}
    found = reference_session(graph.proto, shares_weights=shares).run(None, feed)
    monkeypatch.undo()
    assert_same(found, reference_session(graph.proto, shares_weights=shares).run(None, feed))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("in_file", [False, True])
def test_rounded_weights(tmp_path: Path, in_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = linear(tmp_path if in_file else None)
    sample = Sample("s", {"x": np.ones((2, 64), np.float32), "c": np.array(False)})
    plan = PrecisionPlan(Precision.FP16, frozenset({"sum"}), Precision.FP32)
    (expected,) = WholeModelRunner(graph).outputs(plan, [sample])
    monkeypatch.setattr(ort_session, "_MANY_INITIALISERS", 0)
    (found,) = WholeModelRunner(graph).outputs(plan, [sample])
    assert_same(found["y"], expected["y"])


def test_what_would_be_written_is_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded weights would be written as well, and of 2 GB ONNX Runtime refuses the model."""
    written: list[str] = []
    plain = ort_session.ort.InferenceSession

    def seen(content: bytes, options: Any, **named: Any) -> Any:
        written.append(options.optimized_model_filepath)
        return plain(content, options, **named)

    monkeypatch.setattr(ort_session.ort, "InferenceSession", seen)
    monkeypatch.setattr(ort_session, "_MANY_INITIALISERS", 2)
    graph = linear(tmp_path)
    sample = Sample("s", {"x": np.ones((2, 64), np.float32), "c": np.array(False)})
    for most in (64 << 20, 10_000):  # the weight takes 16,384 bytes
        monkeypatch.setattr(ort_session, "MOST_SENT", most)
        list(WholeModelRunner(graph).outputs(PrecisionPlan(Precision.FP16), [sample]))
    assert written == [os.devnull, ""]


def test_what_cannot_be_loaded_is_refused_the_same(many: None) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "mine" : 1]>
        g (float[2] x) => (float[2] y) { y = mine.Unknown(x) }
    """)
    with pytest.raises(BadInputError, match="cannot load"):
        reference_session(model)
