"""The work of an inference, counted from shapes, is what the operators' definitions say."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.shapes import inference_work, shapes_from
from bisect_trt.model.tensor_values import Constants


def model(node: onnx.NodeProto, weight: np.ndarray, taken: list[object]) -> Graph:
    """One node that reads ``x`` and ``w``, and one behind it whose shape follows."""
    nodes = [node, helper.make_node("Relu", ["y"], ["z"], "relu")]
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, taken)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    return Graph(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]))


@pytest.mark.parametrize(
    ("node", "weight", "values", "products"),
    [
        (helper.make_node("MatMul", ["x", "w"], ["y"], "n"), (6, 5), 4 * 5, 4 * 5 * 6),
        (helper.make_node("Gemm", ["x", "w"], ["y"], "n", transA=1), (4, 5), 6 * 5, 6 * 5 * 4),
    ],
)
def test_products_of_matrices(
    node: onnx.NodeProto, weight: tuple[int, ...], values: int, products: int
) -> None:
    graph = model(node, np.ones(weight, np.float32), ["rows", 6])
    found = inference_work(graph, {"x": (4, 6)})
    assert (found.values, found.products, found.nodes) == (2 * values, products, 2)


def test_products_of_a_convolution() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "n", group=2)
    graph = model(node, np.ones((6, 2, 3, 3), np.float32), ["n", 4, "h", "w_"])
    found = inference_work(graph, {"x": (1, 4, 8, 10)})
    assert found.values == 2 * 6 * 6 * 8 and found.products == 6 * 6 * 8 * 2 * 3 * 3


@pytest.mark.parametrize(("group", "products"), [(1, 4), (4, 1)])
def test_products_of_a_transposed_convolution(group: int, products: int) -> None:
    node = helper.make_node(
        "ConvTranspose", ["x", "w"], ["y"], "n", group=group, kernel_shape=[1, 1]
    )
    graph = model(node, np.ones((4, 4 // group, 1, 1), np.float32), [1, 4, 3, 3])
    assert inference_work(graph, {"x": (1, 4, 3, 3)}).products == 4 * 9 * products


def test_products_of_an_einsum() -> None:
    node = helper.make_node("Einsum", ["x", "w"], ["y"], "n", equation="ij,jk->ik")
    found = inference_work(model(node, np.ones((6, 5), np.float32), [4, 6]), {"x": (4, 6)})
    # ONNX may not tell an Einsum's shape; then the result counts as the others do, or not at all.
    assert found.products in (4 * 5 * 6, 30)


def test_what_is_not_told_counts_as_the_rest() -> None:
    graph = model(
        helper.make_node("Compress", ["x", "w"], ["y"], "n"), np.ones(8, np.bool_), [2, 4]
    )
    nodes = [helper.make_node("Neg", ["x"], ["a"], "first"), *graph.proto.graph.node]
    del graph.proto.graph.node[:]
    graph.proto.graph.node.extend(nodes)
    found = inference_work(Graph(graph.proto), {"x": (2, 4)})
    assert found.nodes == 3 and found.values == 8 * 3


def test_weights_are_counted_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run says what it needs before it reads them."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "n")
    graph = model(node, np.ones((6, 5), np.float32), [1, 6])
    shapes_from(graph, {"x": (1, 6)})  # remembered; it reads small ones
    monkeypatch.delattr(Constants, "__getitem__")
    assert inference_work(graph, {"x": (1, 6)}).products == 6 * 5
