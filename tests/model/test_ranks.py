"""Ranks behind a Reshape whose shape is computed: a marked tensor's output says its rank."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.model.outputs import mark_outputs
from bisect_trt.model.tensor_types import infer_types

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def flattened() -> onnx.ModelProto:
    """A classifier's head as exporters write it: a batch of any size, its features in a row."""
    info, node = helper.make_tensor_value_info, helper.make_node
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Slice", ["shape", "zero", "one"], ["batch"]),
        node("Cast", ["batch"], ["as_int"], to=TensorProto.INT32),
        node("Cast", ["features"], ["features_as_int"], to=TensorProto.INT32),
        node("Concat", ["as_int", "features_as_int"], ["wanted"], axis=0),
        node("Cast", ["wanted"], ["rows"], to=INT64),
        node("Reshape", ["x", "rows"], ["flat"]),
        node("MatMul", ["flat", "w"], ["product"]),
        node("Add", ["product", "bias"], ["logits"]),
        node("Softmax", ["logits"], ["y"], axis=-1),
    ]
    numbers = {"zero": np.int64([0]), "one": np.int64([1]), "features": np.int64([8])}
    constants = [
        node("Constant", [], [name], value=numpy_helper.from_array(array))
        for name, array in numbers.items()
    ]
    values = {"w": np.ones((8, 3), np.float32), "bias": np.ones(3, np.float32)}
    graph = helper.make_graph(
        [*constants, *nodes],
        "g",
        [info("x", FLOAT, ["n", 2, 4])],
        [info("y", FLOAT, ["n", 3])],
        [numpy_helper.from_array(array, name) for name, array in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_what_follows_from_the_length_of_a_shape() -> None:
    model = flattened()
    ranks = infer_types(model).ranks
    inferred = onnx.shape_inference.infer_shapes(model)
    assert "flat" not in {i.name for i in inferred.graph.value_info if i.type.tensor_type.shape.dim}
    assert [ranks[n] for n in ("flat", "product", "logits")] == [2, 2, 2]


def test_a_shape_among_the_weights_has_a_length() -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("Relu", ["r"], ["y"])],
        "g",
        [info("x", FLOAT, ["n", 8])],
        [info("y", FLOAT, ["n", 2, 4])],
        [numpy_helper.from_array(np.int64([-1, 2, 4]), "s")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    assert infer_types(model).ranks["r"] == 3
    onnx.checker.check_model(mark_outputs(model, ["r"]), full_check=True)


@pytest.mark.parametrize("tensors", [["flat"], ["product", "logits"]])
def test_a_marked_model_is_valid_and_its_ranks_are_right(tensors: list[str]) -> None:
    marked = mark_outputs(flattened(), tensors)
    onnx.checker.check_model(marked, full_check=True)
    session = ort.InferenceSession(marked.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(16, dtype=np.float32).reshape(2, 2, 4)
    found = session.run(None, {"x": x})
    told = [len(o.type.tensor_type.shape.dim) for o in marked.graph.output]
    assert [array.ndim for array in found] == told


@pytest.mark.parametrize("op_type", ["Relu", "Add", "MatMul", "Reshape", "Concat"])
def test_a_node_without_inputs_is_left_to_who_checks_the_model(op_type: str) -> None:
    model = flattened()
    model.graph.node.append(helper.make_node(op_type, [], ["nothing"]))
    model.graph.node.append(helper.make_node(op_type, [""], ["unnamed"]))
    assert not {"nothing", "unnamed"} & infer_types(model).ranks.keys()
