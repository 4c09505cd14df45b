"""Models as files really are: functions, nodes out of order, spelled-out domains, constants and
external data that are not what they say.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.graph import list_layers
from bisect_trt.model.load import load_model, normalised
from fixtures.encoders import encoder_decomposed
from fixtures.models import ALL
from fixtures.subgraphs import branch
from tests.conftest import run_model, same

F = TensorProto.FLOAT
X = np.sin(np.arange(16, dtype=np.float32)).reshape(4, 4)


def function_model(*, named: bool = True) -> onnx.ModelProto:
    """Two calls of a block, which calls another function twice."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    inner = helper.make_function(
        "my",
        "Squash",
        ["v"],
        ["u"],
        [
            helper.make_node("Mul", ["v", "v"], ["s"], "square" if named else ""),
            helper.make_node("Tanh", ["s"], ["u"], "tanh" if named else ""),
        ],
        opsets[:1],
    )
    outer = helper.make_function(
        "my",
        "Block",
        ["a", "w"],
        ["y"],
        [
            helper.make_node("MatMul", ["a", "w"], ["m"], "matmul" if named else ""),
            helper.make_node("Squash", ["m"], ["k"], "first" if named else "", domain="my"),
            helper.make_node("Squash", ["k"], ["l"], "second" if named else "", domain="my"),
            helper.make_node("Add", ["l", "m"], ["y"], "add" if named else ""),
        ],
        opsets,
    )
    nodes = [
        helper.make_node("Block", ["x", "w0"], ["h"], "one" if named else "", domain="my"),
        helper.make_node("Relu", ["h"], ["r"], "between"),
        helper.make_node("Block", ["r", "w0"], ["out"], "two" if named else "", domain="my"),
    ]
    weight = numpy_helper.from_array(np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4), "w0")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", F, [4, 4])],
        [helper.make_tensor_value_info("out", F, [4, 4])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=opsets, functions=[outer, inner], ir_version=9)


@pytest.mark.parametrize("named", [True, False])
def test_functions_are_written_out_under_their_calls_names(named: bool) -> None:
    model = function_model(named=named)
    plain = load_model(model).proto
    assert not plain.functions
    assert same(run_model(model, {"x": X}), run_model(plain, {"x": X}))
    layers = [layer.name for layer in list_layers(plain)]
    assert len(layers) == 2 * (1 + 2 * 2 + 1) + 1
    if named:
        assert layers[:3] == ["one/matmul", "one/first/square", "one/first/tanh"]
        assert "two/second/tanh" in layers and "between" in layers
    else:
        assert layers[:2] == ["Block_h/MatMul_m", "Block_h/Squash_k/Mul_s"]
        assert all("/" in name for name in layers if name != "between")
    assert len(set(layers)) == len(layers)
    assert model.functions, "the user's own model is left as it was"


def test_functions_of_another_opset_give_no_other_its_name() -> None:
    """ONNX's inliner leaves them, and they were numbered with those that it writes out."""
    model = function_model(named=True)
    inner = model.functions[1]
    inner.opset_import[0].version = 16
    plain = load_model(model).proto
    assert same(run_model(model, {"x": X}), run_model(plain, {"x": X}))
    layers = [layer.name for layer in list_layers(plain)]
    assert {"one/matmul", "two/matmul", "one/add", "two/add", "between"} <= set(layers)
    left = {f.name for f in plain.functions}
    assert ("two/second/tanh" in layers) != (inner.name in left)


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_nodes_out_of_order_are_sorted(make: object, seed: int) -> None:
    fixture = make()  # type: ignore[operator]
    shuffled = onnx.ModelProto()
    shuffled.CopyFrom(fixture.model)
    nodes = list(fixture.model.graph.node)
    Random(seed).shuffle(nodes)
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(nodes)
    before = shuffled.SerializeToString()
    found = normalised(shuffled, "m")
    onnx.checker.check_model(found)
    assert {n.name for n in found.graph.node} == {n.name for n in nodes}
    assert same(run_model(found, fixture.inputs), run_model(fixture.model, fixture.inputs))
    assert shuffled.SerializeToString() == before
    assert normalised(fixture.model, "m") is fixture.model, "nothing to put right"


def test_the_standard_domain_may_be_spelled_out() -> None:
    for fixture in (encoder_decomposed(), branch()):
        spelled = onnx.ModelProto()
        spelled.CopyFrom(fixture.model)
        spelled.opset_import[0].domain = "ai.onnx"
        for node in spelled.graph.node:
            node.domain = "ai.onnx"
        found = normalised(spelled, "m")
        assert found.opset_import[0].domain == "" and len(found.opset_import) == 1
        assert [x.name for x in list_layers(found)] == [x.name for x in list_layers(fixture.model)]
        onnx.checker.check_model(found)


def _spoilt(change: str) -> onnx.ModelProto:
    model = encoder_decomposed().model
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 2)
    if change == "too few bytes":
        tensor.raw_data = tensor.raw_data[:-4]
    elif change == "too many bytes":
        tensor.raw_data = tensor.raw_data + b"\0\0\0\0"
    elif change == "too few values":
        tensor.ClearField("raw_data")
        tensor.float_data.extend([1.0])
    elif change == "no values":
        tensor.ClearField("raw_data")
    elif change == "negative size":
        tensor.dims[0] = -1
    elif change == "unknown type":
        tensor.data_type = 1234
    elif change == "undefined type":
        tensor.data_type = 0
    elif change == "constant node":
        value = helper.make_tensor("c", F, [3], [1.0, 2.0, 3.0])
        value.dims[0] = 4
        model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=value))
    return model


@pytest.mark.parametrize(
    "change",
    [
        "too few bytes",
        "too many bytes",
        "too few values",
        "no values",
        "negative size",
        "unknown type",
        "undefined type",
        "constant node",
    ],
)
def test_constants_that_are_not_what_they_say_are_named(change: str) -> None:
    with pytest.raises(BadInputError, match="constant '") as caught:
        load_model(_spoilt(change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", "-4"),
        ("offset", "99999999999999"),
        ("offset", "4.5"),
        ("offset", "nonsense"),
        ("length", "-1"),
        ("length", "3"),
        ("length", "99999999999999999999"),
        ("location", ""),
        ("location", "../weights.bin"),
        ("location", "weights.bin\0.txt"),
    ],
)
def test_strange_external_data_is_refused(key: str, value: str, tmp_path: Path) -> None:
    model = encoder_decomposed().model
    onnx.save_model(
        model,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=64,
    )
    (tmp_path.parent / "weights.bin").write_bytes(b"\0" * 100_000)
    stored = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    tensor = next(t for t in stored.graph.initializer if t.external_data)
    entry = next(e for e in tensor.external_data if e.key == key)
    entry.value = value
    (tmp_path / "m.onnx").write_bytes(stored.SerializeToString())
    with pytest.raises(BadInputError, match=r"m\.onnx") as caught:
        load_model(tmp_path / "m.onnx")
    assert "\n" not in str(caught.value)
