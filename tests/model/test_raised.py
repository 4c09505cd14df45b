"""A model at a later opset computes what it did, or is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph
from bisect_trt.model.inspection import inspect_model
from bisect_trt.model.load import load_model
from bisect_trt.model.opsets import raised
from bisect_trt.model.typed import to_typed
from tests.conftest import run_model

FLOAT = TensorProto.FLOAT
X = np.random.default_rng(0).normal(size=(1, 2, 4, 4)).astype(np.float32)


def model(
    nodes: list[onnx.NodeProto], opset: int, shape: list[int], *more: TensorProto
) -> onnx.ModelProto:
    scales = numpy_helper.from_array(np.float32([1, 1, 2, 2]), "scales")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", FLOAT, shape)],
        [scales, *more],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    return made


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("op", "opset"), [("Resize", 10), ("Upsample", 9)])
@pytest.mark.parametrize("target", [13, 22])
def test_a_resize_goes_on_reading_from_the_corners(
    op: str, opset: int, mode: str, target: int
) -> None:
    """ONNX's converter leaves the default of later opsets, half a pixel off."""
    node = helper.make_node(op, ["x", "scales"], ["y"], "/up", mode=mode)
    source = model([node], opset, [1, 2, 8, 8])
    later = raised(source, target)
    assert later.opset_import[0].version == target
    assert [n.name for n in later.graph.node if n.op_type == "Resize"] == ["/up"]
    for one, other in zip(run_model(source, {"x": X}), run_model(later, {"x": X}), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_nearest_resize_that_shrinks_is_refused() -> None:
    source = model([helper.make_node("Resize", ["x", "scales"], ["y"], "/down")], 10, [1, 2, 8, 8])
    half = numpy_helper.from_array(np.float32([1, 1, 0.75, 0.75]), "scales")
    source.graph.initializer[0].CopyFrom(half)
    with pytest.raises(BadInputError, match="/down: the precision needs opset 13"):
        raised(source, 13)


def test_weights_that_lie_in_a_file_are_no_hindrance(tmp_path: Path) -> None:
    """Of what ``load_model`` leaves in the file only a Resize's scales are asked for."""
    source = model([helper.make_node("Softmax", ["x"], ["y"], "/s", axis=1)], 10, [1, 2, 4, 4])
    source.graph.initializer.append(numpy_helper.from_array(np.ones(20_000, np.float32), "w"))
    onnx.save(source, tmp_path / "m.onnx")
    later = raised(load_model(tmp_path / "m.onnx").proto, 13)
    assert later.opset_import[0].version == 13


def test_no_two_nodes_get_one_name() -> None:
    node = helper.make_node("Softmax", ["x"], ["y"], "/s", axis=1)
    names = [n.name for n in raised(model([node], 12, list(X.shape)), 13).graph.node if n.name]
    assert len(names) == len(set(names)) and "/s" in names


def test_what_later_opsets_take_for_something_else_is_refused() -> None:
    node = helper.make_node("Hardmax", ["x"], ["y"], "/h", axis=1)
    source = model([node], 12, list(X.shape))
    with pytest.raises(BadInputError, match="Hardmax means something else from opset 13 on"):
        raised(source, 13)
    assert raised(model([helper.make_node("Relu", ["x"], ["y"], "/r")], 12, list(X.shape)), 13)


def test_a_plan_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path) -> None:
    """The whole search was made, and its answer lost."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "/conv"),
        helper.make_node("GroupNormalization", ["c", "s", "s"], ["y"], "/gn", num_groups=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", FLOAT, X.shape)],
        [
            numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), "w"),
            numpy_helper.from_array(np.ones(1, np.float32), "s"),
        ],
    )
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    asked = {"precision": "bf16", "require": "max_abs<=1", "runner": "emulated"}
    with pytest.raises(BadInputError, match="GroupNormalization means something else from opset 2"):
        bisect_trt.bisect(source, {"x": X}, out=tmp_path, **asked)
    assert not any(tmp_path.iterdir())
    held = bisect_trt.bisect(source, {"x": X}, out=tmp_path, keep_fp32=["/conv"], **asked)
    assert held.passed
    again = bisect_trt.verify(source, {"x": X}, tmp_path / "plan.json", runner="emulated")
    assert again.passed, "it is written as it was"


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        (helper.make_node("Einsum", ["x"], ["y"], "/n", equation="abcd->abdc"), [1, 2, 4, 4]),
        (helper.make_node("Celu", ["x"], ["y"], "/n"), [1, 2, 4, 4]),
    ],
)
@pytest.mark.parametrize("opset", [17, 22])
def test_what_has_no_bf16_form_up_to_opset_22_stays_in_fp32(
    node: onnx.NodeProto, shape: list[int], opset: int
) -> None:
    first = helper.make_node("Mul", ["x", "x"], ["t"], "/first")
    second = onnx.NodeProto()
    second.CopyFrom(node)
    second.input[0] = "t"
    graph = Graph(model([first, second], opset, shape))
    assert [layer.name for layer in graph.layers_at(Precision.BF16)] == ["/first"]
    typed = to_typed(graph, PrecisionPlan(Precision.BF16))
    onnx.checker.check_model(typed, full_check=True)


def test_bf16_convolutions_below_opset_22_are_advised_on() -> None:
    weights = numpy_helper.from_array(np.ones((4, 2, 3, 3), np.float32), "w")
    for opset, precision, advised in ((17, "bf16", 1), (22, "bf16", 0), (17, "fp16", 0)):
        convolution = model(
            [helper.make_node("Conv", ["x", "w"], ["y"], "stem")], opset, [1, 4, 2, 2], weights
        )
        advice = inspect_model(load_model(convolution), Precision(precision)).advice
        assert [a.startswith("stem (Conv) has no BF16 form in opset 17") for a in advice] == (
            [True] * advised
        )
