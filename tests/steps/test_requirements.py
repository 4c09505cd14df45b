"""Requirements that the outputs do not fit, and models that no run takes, are refused or said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.model.cautions import refusals, refuse_unsupported
from bisect_trt.model.graph import Graph
from bisect_trt.model.outputs import unreached
from bisect_trt.steps.problem import odd_outputs
from fixtures.fixture import waves
from tests.model.test_decided import MODEL

GRAPH = Graph(onnx.parser.parse_model(MODEL))


@pytest.mark.parametrize(
    ("texts", "kinds"),
    [
        ([], {}),
        (["max_abs<=1e-2"], {"decided": "best"}),
        (["logits:max_abs<=1e-2"], {"unasked": "best"}),
        (["logits:max_abs<=1e-2", "best:argmax>=1", "mask:argmax>=1"], {"unasked": "ids"}),
        (["argmax>=1"], {}),
        (["mine<=1"], {}),
    ],
)
def test_what_is_not_asked_and_what_is_asked_of_classes(
    texts: list[str], kinds: dict[str, str]
) -> None:
    metrics = {"mine": lambda *_: 0.0} if texts == ["mine<=1"] else {}
    requirements = parse_requirements(texts, GRAPH.outputs, metrics)
    found = odd_outputs(GRAPH, requirements, ["product"])
    assert {finding.kind: finding.where for finding in found} == kinds


@pytest.mark.parametrize("held", ["bfloat16", "float8e4m3fn", "int4"])
def test_outputs_of_which_nobody_gives_numbers_are_refused(held: str) -> None:
    """Of eight bits and fewer ONNX Runtime gives the codes: 126 and 127 are no error of 1."""
    code = onnx.TensorProto.DataType.Value(held.upper())
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[2] x) => ({held}[2] y) {{ y = Cast<to={code}>(x) }}"""
    with pytest.raises(BadInputError, match=f"m.onnx: output 'y' is {held}, .*a Cast behind it"):
        refuse_unsupported(Graph(onnx.parser.parse_model(text)), "m.onnx")
    refuse_unsupported(GRAPH, "m.onnx")


@pytest.mark.parametrize(
    ("declared", "body", "words"),
    [
        ("string[2] y", "y = Cast<to=8>(x)", "output 'y' is text"),
        (
            "float[2] y",
            "y = BatchNormalization<training_mode=1>(x, x, x, x, x)",
            "in training mode",
        ),
    ],
)
def test_whoever_looks_is_told_what_a_run_refuses(declared: str, body: str, words: str) -> None:
    text = (
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => ({declared}) {{ {body} }}"""
    )
    graph = Graph(onnx.parser.parse_model(text))
    (found,) = refusals(graph, "m.onnx")
    assert words in found.message and found.message.startswith("a run refuses this model: m.onnx: ")
    with pytest.raises(BadInputError, match=words):
        refuse_unsupported(graph, "m.onnx")
    assert refusals(GRAPH, "m.onnx") == []


def test_sparse_constants_are_refused_by_the_files_name() -> None:
    graph = Graph(onnx.ModelProto())
    dense = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [1.0])
    places = onnx.helper.make_tensor("i", onnx.TensorProto.INT64, [1], [0])
    graph.proto.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(dense, places, [4]))
    (found,) = refusals(graph, "m.onnx")
    assert "m.onnx: sparse initialiser 'w' cannot be emulated" in found.message


def test_what_reaches_no_output_is_found() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[2] x, bool c) => (float[2] y) {
        [inner] a = Exp(x)
        [unused] b = Exp(a)
        [over] d = Exp(b)
        [choice] y = If(c) <then_branch = t () => (float[2] p) { p = Neg(a) },
                            else_branch = e () => (float[2] q) { q = Abs(x) }>
    }"""
    assert unreached(Graph(onnx.parser.parse_model(text))) == {"unused", "over"}


@pytest.mark.parametrize(("answer", "told"), [("x", False), ("b", True)])
def test_what_reaches_no_output_leaves_no_range(answer: str, told: bool, tmp_path: Path) -> None:
    """An Exp that nobody reads was named, with the advice to pin it."""
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) {{
        a = Mul(x, x)
        b = Exp(a)
        c = Min({answer}, x)
        y = Neg(c)
    }}"""
    given = {"x": np.float32([1.0, 2.0, 3.0, 4.0])}
    found = bisect_trt.bisect(
        onnx.parser.parse_model(text), given, require="max_abs<=1", out=tmp_path, robust=0
    )
    assert any(f.kind == "left-overflowing" for f in found.findings) is told


def test_a_model_is_refused_before_its_inputs_are_read(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (string[2] y) {
        y = Cast<to=8>(x) }"""
    with pytest.raises(BadInputError, match="output 'y' is text"):
        bisect_trt.bisect(onnx.parser.parse_model(text), tmp_path / "missing.npz", out=tmp_path)


DETECTOR = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 6, 5] x) => (float[1, 6, 5] y, float[1, 6, 4] boxes, float[1, 6] scores) <
        int64[1] zero = {0}, int64[1] four = {4}, int64[1] two = {2}, int64[1] last = {-1}
    > {
        y = Tanh(x)
        b = Slice(x, zero, four, two)
        boxes = Abs(b)
        d = Gather<axis = 2>(x, last)
        e = Squeeze(d, two)
        scores = Sigmoid(e)
    }"""
)


@pytest.mark.parametrize(
    ("require", "said"),
    [
        ("y[:,:,90:]:max_abs<=1e-9", "takes nothing of output 'y', which has shape (1, 6, 5)"),
        ("y[5]:max_abs<=1e-9", "takes nothing of output 'y'"),
        ("y[:,:,4:2]:cosine>=0.9", "takes nothing of output 'y'"),
        ("y[:,:,:,0]:max_abs<=1e-3", "takes nothing of output 'y'"),
        ("y[:,:,::0]:max_abs<=1e-3", "is no index or slice"),
        ("box_match(boxes,scores[:,:3])>=0.9", "boxes have shape (1, 6, 4), scores (1, 3)"),
        ("box_match(boxes,scores,boxes[:,:,:2])>=0.9", "and classes (1, 6, 2)"),
        ("box_match(boxes[0:5:0],scores)>=0.9", "'0:5:0' is no index or slice"),
        ("box_match(boxes[:,9:],scores[:,9:])>=0.9", "no box with a score above 0"),
        ("box_match(boxes,scores)<=0.9", "not understood"),
        ("box_match()>=0.9", "not understood"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, require: str, said: str) -> None:
    with pytest.raises(BadInputError) as refused:
        bisect_trt.bisect(
            DETECTOR, {"x": waves(1, 1, 6, 5)}, require=require, runner="emulated", out=tmp_path
        )
    assert said in str(refused.value)


def test_one_input_may_be_empty_there(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y) { y = Tanh(x) }"""
    )
    inputs = [{"x": waves(n, n, 4)} for n in (2, 6)]
    result = bisect_trt.bisect(
        model, inputs, require="y[4:]:max_abs<=1e-2", runner="emulated", robust=0, out=tmp_path
    )
    assert result.passed and np.isfinite(result.score)
