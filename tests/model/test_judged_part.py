"""Models with an NMS inside or a plugin at their end: judged before it, shipped whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.model.graph import Graph
from bisect_trt.model.outputs import judged_part, names_of, tail_outputs
from fixtures.fixture import waves
from tests.command import call
from tests.copies import EIGHT

F, I64 = TensorProto.FLOAT, TensorProto.INT64


def detector(tail: str, gain: float = 1.0) -> onnx.ModelProto:
    """Boxes and scores of 12 x 12 cells, then an NMS of ONNX's own or TensorRT's plugin."""
    random, node = np.random.default_rng(0), helper.make_node
    nodes = [
        node("Conv", ["x", "w1"], ["c"], "conv", pads=[1] * 4),
        node("Relu", ["c"], ["r"], "relu"),
        node("Conv", ["r", "wb"], ["b0"], "box_conv"),
        node("Reshape", ["b0", "sb"], ["b1"], "box_rows"),
        node("Transpose", ["b1"], ["b2"], "box_turn", perm=[0, 2, 1]),
        node("Exp", ["b2"], ["sizes"], "exp"),
        node("Split", ["sizes", "two"], ["low", "size"], "split", axis=2),
        node("Add", ["low", "size"], ["high"], "high"),
        node("Concat", ["low", "high"], ["boxes"], "boxes", axis=2),
        node("Conv", ["r", "ws"], ["s0"], "score_conv"),
        node("Reshape", ["s0", "ss"], ["s1"], "score_rows"),
        node("Sigmoid", ["s1"], ["scores"], "sigmoid"),
    ]
    weights = {
        "w1": random.normal(0, 0.3, (8, 3, 3, 3)).astype(np.float32),
        "wb": random.normal(0, 0.3, (4, 8, 1, 1)).astype(np.float32),
        "ws": gain * random.normal(0, 2, (2, 8, 1, 1)).astype(np.float32),
        "sb": np.array([1, 4, -1]),
        "ss": np.array([1, 2, -1]),
        "two": np.array([2, 2]),
    }
    info = helper.make_tensor_value_info
    if tail == "plugin":
        nodes += [
            node("EfficientNMS_TRT", ["boxes", "scores"], ["n", "db", "ds"], "nms", domain="TRT")
        ]
        outputs = [info("n", TensorProto.INT32, [1, 1]), info("db", F, [1, 9, 4])]
        outputs += [info("ds", F, [1, 9])]
    else:
        nodes += [
            node("NonMaxSuppression", ["boxes", "scores", "most", "iou", "least"], ["i"], "nms"),
            node("Gather", ["i", "third"], ["row"], "rows", axis=1),
            node("Squeeze", ["boxes", "axis"], ["all_boxes"], "squeeze"),
            node("Gather", ["all_boxes", "row"], ["found"], "found", axis=0),
            node("ReduceMax", ["scores"], ["best"], "best", axes=[1], keepdims=0),
            node("Squeeze", ["best", "axis"], ["all_scores"], "squeeze_scores"),
            node("Gather", ["all_scores", "row"], ["found_scores"], "found_scores", axis=0),
        ]
        weights |= {"most": np.array([20]), "iou": np.float32([0.5]), "least": np.float32([0.6])}
        weights |= {"third": np.array(2), "axis": np.array([0])}
        outputs = [info("found", F, ["n", 4]), info("found_scores", F, ["n"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", F, [1, 3, 12, 12])],
        outputs,
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("TRT", 1)]
    opsets = domains if tail == "plugin" else domains[:1]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


INPUTS = [{"x": waves(n, 1, 3, 12, 12)} for n in range(3)]


@pytest.mark.parametrize("tail", ["plugin", "nms"])
def test_a_tail_is_left_out_by_itself_and_shipped(tail: str, tmp_path: Path) -> None:
    model = detector(tail)
    result = bisect_trt.bisect(model, INPUTS, runner="emulated", out=tmp_path, limits=EIGHT)
    assert result.passed and set(result.outputs["output"]) == {"boxes", "scores"}
    (told,) = (f.message for f in result.findings if f.kind == "judged-part")
    assert "judged at 'boxes', 'scores', before nms" in told
    shipped = onnx.load(tmp_path / "model.typed.onnx")
    assert [o.name for o in shipped.graph.output] == [o.name for o in model.graph.output]
    made = {n.name: n for n in shipped.graph.node}
    assert made["nms"].op_type == ("EfficientNMS_TRT" if tail == "plugin" else "NonMaxSuppression")
    again = bisect_trt.verify(
        model,
        INPUTS,
        tmp_path / "plan.json",
        runner="emulated",
        out=tmp_path / "verify",
        limits=EIGHT,
    )
    assert again.passed


def test_detections_are_judged_where_that_is_asked(tmp_path: Path) -> None:
    require = "box_match(found,found_scores,iou=0.5)>=0.9"
    result = bisect_trt.bisect(
        detector("nms"), INPUTS, require=require, runner="emulated", out=tmp_path, robust=0
    )
    assert set(result.outputs["output"]) == {"found", "found_scores"} and result.passed
    assert not any(f.kind in ("judged-part", "shape") for f in result.findings)
    wrong = "box_match(found,found_scores,layout=cxcywh)>=0.9"
    found = bisect_trt.bisect(
        detector("nms"), INPUTS, require=wrong, runner="emulated", out=tmp_path / "c", robust=0
    )
    assert found.passed, "boxes of any layout match themselves as long as they have an area"


def test_tensors_are_named_in_one_text_or_several(tmp_path: Path) -> None:
    model = detector("nms")
    assert names_of(["boxes,scores"], model) == names_of(["boxes", "scores"], model)
    with pytest.raises(BadInputError, match="--outputs nothing: no node"):
        names_of(["boxes,nothing"], model)
    part = judged_part(model, ["scores"])
    onnx.checker.check_model(part, full_check=True)
    assert {n.name for n in part.graph.node} == {
        *("conv", "relu", "score_conv", "score_rows", "sigmoid")
    }
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", **INPUTS[0])
    common = [str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npz")]
    told = call("run", *common, "--outputs", "box", "--out", str(tmp_path / "run"))
    assert told.exit_code == 2 and len(told.output.strip().splitlines()) == 1


def test_a_plugin_in_the_middle_is_refused(tmp_path: Path) -> None:
    """What is behind it cannot be run, and what is before it says nothing of the outputs."""
    nodes = [
        helper.make_node("Exp", ["x"], ["a"], "exp"),
        helper.make_node("Plugin", ["a"], ["b"], "plugin", domain="TRT"),
        helper.make_node("Tanh", ["b"], ["y"], "tanh"),
    ]
    infos = [helper.make_tensor_value_info(n, F, [2]) for n in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("TRT", 1)]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    assert tail_outputs(model, of_rows=True) == (["a"], ["plugin"])
    result = bisect_trt.bisect(
        model, {"x": np.float32([1, 2])}, runner="emulated", out=tmp_path, robust=0
    )
    (told,) = (f.message for f in result.findings if f.kind == "judged-part")
    assert "judged at 'a', before plugin" in told


def test_the_plugin_of_a_source_that_is_reduced_is_left_out_too(tmp_path: Path) -> None:
    half = TensorProto.FLOAT16
    nodes = [
        helper.make_node("Mul", ["x", "k"], ["a"], "large"),
        helper.make_node("Mul", ["a", "a"], ["s"], "square"),
        helper.make_node("Sqrt", ["s"], ["boxes"], "root"),
        helper.make_node("Sigmoid", ["x"], ["scores"], "sigmoid"),
        helper.make_node("EfficientNMS_TRT", ["boxes", "scores"], ["n"], "nms", domain="TRT"),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("TRT", 1)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", half, [1, 8, 4])],
        [helper.make_tensor_value_info("n", TensorProto.INT32, [1, 1])],
        [numpy_helper.from_array(np.float16(500), "k")],
    )
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    inputs = [{"x": waves(n, 1, 8, 4).astype(np.float16)} for n in range(3)]
    result = bisect_trt.bisect(
        model, inputs, runner="emulated", out=tmp_path, robust=0, repair="none"
    )
    assert result.passed and set(result.outputs["output"]) == {"boxes", "scores"}
    assert "square" in result.pinned
    shipped = onnx.load(tmp_path / "model.typed.onnx")
    types = Graph(shipped).types
    (plugin,) = (n for n in shipped.graph.node if n.op_type == "EfficientNMS_TRT")
    assert [types.type_of(n) for n in plugin.input] == [half, half]
