"""Requirements that every plan meets, or that the outputs do not fit, are refused or said."""

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
from fixtures.build import GraphBuilder
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


SINGLE = "of a single value the cosine sees the sign alone"
RANDOM = np.random.default_rng(0)


def classifier() -> onnx.ModelProto:
    """Probabilities and the class that they choose."""
    build = GraphBuilder(0)
    logits = build.op("MatMul", "x", build.normal(32, 10))
    chosen = build.op("ArgMax", logits, axis=1, keepdims=0)
    sure = build.op("Greater", build.op("Softmax", logits, axis=1), build.weight(0.1))
    outputs = {chosen: ([1], np.int64), sure: ([1, 10], np.bool_)}
    model = build.model({"x": [1, 32]}, {logits: [1, 10]})
    for name, (shape, dtype) in outputs.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, shape))
    return model


def test_ids_and_truth_values_are_compared_and_not_chosen_among(tmp_path: Path) -> None:
    """Refused as always true, for 'class_id' has one value: its top 1 is the same class."""
    model = classifier()
    logits, chosen, sure = (o.name for o in model.graph.output)
    given = {"x": RANDOM.normal(size=(1, 32)).astype(np.float32)}
    asked = [f"{chosen}:top1>=1", f"{sure}:top10>=0.5", f"{logits}:top9>=1"]
    result = bisect_trt.bisect(model, given, require=asked, robust=0, out=tmp_path)
    assert result.passed
    with pytest.raises(BadInputError, match=f"top10>=1: always true.*{logits}.*has 10;"):
        bisect_trt.bisect(model, given, require=f"{logits}:top10>=1", out=tmp_path / "refused")


@pytest.mark.parametrize(("channels", "refused"), [(1, True), (2, False)])
@pytest.mark.parametrize("rank", [2, 4])
def test_an_argmax_of_one_channel_is_refused(
    rank: int, channels: int, refused: bool, tmp_path: Path
) -> None:
    """A binary segmentation "met the requirement as it is", whatever its logits were."""
    build = GraphBuilder(0)
    if rank == 4:
        shape, kernel = [1, 3, 4, 4], build.normal(channels, 3, 1, 1)
        made = build.op("Conv", "x", kernel)
        model = build.model({"x": shape}, {made: [1, channels, 4, 4]})
    else:
        shape = [1, 8]
        made = build.op("MatMul", "x", build.normal(8, channels))
        model = build.model({"x": shape}, {made: [1, channels]})
    given = {"x": RANDOM.normal(size=shape).astype(np.float32)}

    def run() -> bisect_trt.Result:
        return bisect_trt.bisect(model, given, require="argmax>=1", out=tmp_path, robust=0)

    if not refused:
        assert run().requirements == ("argmax>=1",)
        return
    with pytest.raises(BadInputError, match=r"argmax>=1: always true.*has 1;"):
        run()


def test_the_cosine_of_single_values_is_refused_for_a_batch_of_one(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,8] x) => (float[n,1] y) {
        y = ReduceMean<axes = [1], keepdims = 1>(x) }"""
    )
    one, three = (RANDOM.normal(size=(n, 8)).astype(np.float32) for n in (1, 3))
    with pytest.raises(BadInputError, match=SINGLE):
        bisect_trt.bisect(model, [{"x": one}, {"x": -one}], require="cosine>=0.9", out=tmp_path)
    several = [{"x": one}, {"x": three}]
    assert bisect_trt.bisect(model, several, require="cosine>=0.9", out=tmp_path, robust=0).passed
    detector = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1,8] x) => (float[1,found] y) {
        y = ReduceMean<axes = [1], keepdims = 1>(x) }"""
    )
    out = tmp_path / "detector"  # may find one thing, or none
    assert bisect_trt.bisect(detector, {"x": one}, require="cosine>=0.9", out=out, robust=0).passed


def test_one_value_has_no_range_and_that_is_said(tmp_path: Path) -> None:
    """One input whose value is near zero kept everything in FP32, and nothing said why."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,8] x) => (float[n,1] y) {
        y = ReduceMean<axes = [1], keepdims = 1>(x) }"""
    )
    given = {"x": RANDOM.normal(size=(1, 8)).astype(np.float32)}
    for require, told in (("rel_range<=1e-2", True), ("max_abs<=1", False)):
        out = tmp_path / str(told)
        found = bisect_trt.bisect(model, given, require=require, out=out, robust=0).findings
        assert any("'y' holds one value, which has no range" in f.message for f in found) is told


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
