"""Float inputs that a model takes for ids and masks."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from bisect_trt.model.graph import Graph

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
RESHAPED = [helper.make_node("Reshape", ["x", "shape"], ["r"])]
SHAPE = helper.make_tensor("shape", INT64, [2], [1, 4])


def graph(*nodes: onnx.NodeProto) -> Graph:
    made = helper.make_graph(
        [*nodes, helper.make_node("Add", ["x", "x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [4])],
        [helper.make_tensor_value_info("y", FLOAT, [4])],
        [SHAPE],
    )
    return Graph(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]))


@pytest.mark.parametrize(
    ("nodes", "discrete"),
    [
        ([helper.make_node("Cast", ["x"], ["c"], to=INT64)], True),
        ([helper.make_node("Cast", ["x"], ["c"], to=BOOL)], True),
        ([*RESHAPED, helper.make_node("Cast", ["r"], ["c"], to=INT64)], True),
        ([*RESHAPED, helper.make_node("Equal", ["r", "r"], ["c"])], True),
        ([helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT16)], False),
        (
            [  # row * width + column, cast
                helper.make_node("Mul", ["x", "x"], ["m"]),
                helper.make_node("Add", ["m", "x"], ["a"]),
                helper.make_node("Cast", ["a"], ["c"], to=INT64),
            ],
            True,
        ),
        (
            [
                helper.make_node("Relu", ["x"], ["r"]),
                helper.make_node("Cast", ["r"], ["c"], to=INT64),
            ],
            False,
        ),
        (RESHAPED, False),
        ([], False),
    ],
)
def test_what_is_cast_or_compared_is_discrete(nodes: list[onnx.NodeProto], discrete: bool) -> None:
    assert graph(*nodes).discrete == ({"x"} if discrete else set())


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_each_part_of_a_concat_is_followed(order: list[str]) -> None:
    made = helper.make_graph(
        [
            helper.make_node("Concat", order, ["c"], axis=0),
            helper.make_node("Cast", ["c"], ["y"], to=INT64),
        ],
        "g",
        [helper.make_tensor_value_info(name, FLOAT, [4]) for name in "ab"],
        [helper.make_tensor_value_info("y", INT64, [8])],
    )
    made_model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)])
    assert Graph(made_model).discrete == {"a", "b"}
