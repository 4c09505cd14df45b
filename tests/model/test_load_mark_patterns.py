"""Files, marks, patterns and weight findings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.model.cautions import cautions
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.model.lost_constants import weight_findings
from bisect_trt.model.outputs import mark_outputs, select_tensors
from bisect_trt.model.patterns import find_patterns
from bisect_trt.model.save import save_model
from fixtures.encoders import encoder_decomposed, encoder_layernorm
from fixtures.subgraphs import branch, loop
from tests.conftest import run_model


def test_external_data_is_loaded_and_part_of_the_digest(tmp_path: Path) -> None:
    model = encoder_decomposed().model
    onnx.save_model(
        model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0
    )
    first = load_model(tmp_path / "m.onnx")
    inline = [
        numpy_helper.to_array(t).tobytes()
        for t in load_model(encoder_decomposed().model).proto.graph.initializer
    ]
    assert [numpy_helper.to_array(t).tobytes() for t in first.proto.graph.initializer] == inline
    data = bytearray((tmp_path / "m.bin").read_bytes())
    data[100] ^= 1
    (tmp_path / "m.bin").write_bytes(bytes(data))
    assert load_model(tmp_path / "m.onnx").digest != first.digest


def test_models_over_two_gigabytes_differ_by_all_that_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is too large to be serialised whole is told apart by attributes, types and opsets."""
    first = encoder_layernorm().model
    others = [onnx.ModelProto() for _ in range(4)]
    for other in others:
        other.CopyFrom(first)
    norm = next(n for n in others[0].graph.node if n.op_type == "LayerNormalization")
    norm.attribute[0].i -= 1
    others[1].opset_import[0].version += 1
    others[2].graph.initializer[0].dims.append(1)
    others[3].graph.input[0].type.tensor_type.shape.dim[0].dim_value += 1
    whole = onnx.ModelProto.SerializeToString

    def too_large(message: onnx.ModelProto, **options: bool) -> bytes:
        if isinstance(message, onnx.ModelProto):
            raise ValueError("exceeds maximum protobuf size of 2GB")
        return whole(message, **options)

    monkeypatch.setattr(onnx.ModelProto, "SerializeToString", too_large)
    assert len({load_model(m).digest for m in (first, *others)}) == 5


def test_save_is_atomic_and_replaces(tmp_path: Path) -> None:
    model = encoder_layernorm().model
    (tmp_path / "m.onnx").write_bytes(b"old")
    save_model(model, tmp_path / "m.onnx")
    assert load_model(tmp_path / "m.onnx").proto == model
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    with pytest.raises(BadInputError, match="cannot be written"):
        save_model(model, tmp_path / "no" / "m.onnx")


@pytest.mark.parametrize(
    ("selector", "count"),
    [
        ("MatMul", 17),
        ("Pow", 5),
        ("LayerNorm", 45),
        ("/head/*", 10),
        ("/head/Pow", 1),
        ("/head/Pow_output_0", 1),
        ("*", 75),
    ],
)
def test_marks_by_name_glob_operator_and_pattern(selector: str, count: int) -> None:
    fixture = encoder_decomposed()
    tensors = select_tensors(fixture.model, [selector])
    assert len(tensors) == count
    marked = mark_outputs(fixture.model, tensors)
    onnx.checker.check_model(marked, full_check=True)
    reference = run_model(fixture.model, fixture.inputs)[0]
    results = dict(
        zip([o.name for o in marked.graph.output], run_model(marked, fixture.inputs), strict=True)
    )
    np.testing.assert_allclose(results["logits"], reference, rtol=1e-5, atol=1e-6)
    assert set(tensors) <= set(results)


def test_a_name_with_brackets_is_a_name_before_it_is_a_glob() -> None:
    model = encoder_decomposed().model
    layer = next(node for node in model.graph.node if node.op_type == "MatMul")
    layer.name = "blocks[0]/MatMul"
    assert select_tensors(model, ["blocks[0]/MatMul"]) == [layer.output[0]]


def test_a_selector_that_matches_nothing_is_refused() -> None:
    with pytest.raises(BadInputError, match="'Conv'"):
        select_tensors(encoder_decomposed().model, ["Conv"])


def test_layernorm_operator_is_a_pattern_too() -> None:
    patterns = find_patterns(encoder_layernorm().model)
    assert [p.kind for p in patterns if not p.decomposed].count("LayerNorm") == 5
    assert len(select_tensors(encoder_layernorm().model, ["LayerNorm"])) == 5


def test_a_norm_between_two_reshapes_is_of_groups() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,8,4,4] x) => (float[1,8,4,4] y)
        <int64[3] by = {1, 2, 64}, int64[4] back = {1, 8, 4, 4}, float eps = {1e-5}>
        {
            r = Reshape(x, by)
            m = ReduceMean<axes=[-1]>(r)
            c = Sub(r, m)
            s = Mul(c, c)
            v = ReduceMean<axes=[-1]>(s)
            e = Add(v, eps)
            d = Sqrt(e)
            n = Div(c, d)
            y = Reshape(n, back)
        }
    """)
    (found,) = find_patterns(model)
    assert (found.kind, len(found.layers)) == ("GroupNorm", 7)


def test_a_residual_addition_is_not_part_of_the_norm() -> None:
    f = TensorProto.FLOAT
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], "mean", axes=[-1]),
        helper.make_node("Sub", ["x", "m"], ["c"], "sub"),
        helper.make_node("Mul", ["c", "c"], ["s"], "square"),
        helper.make_node("ReduceMean", ["s"], ["v"], "variance", axes=[-1]),
        helper.make_node("Add", ["v", "eps"], ["e"], "eps_add"),
        helper.make_node("Sqrt", ["e"], ["r"], "root"),
        helper.make_node("Div", ["c", "r"], ["n"], "div"),
        helper.make_node("Mul", ["n", "g"], ["k"], "scale"),
        helper.make_node("Add", ["k", "x2"], ["y"], "residual"),
        helper.make_node("Relu", ["x"], ["x2"], "branch"),
    ]
    nodes.insert(0, nodes.pop())
    weights = [
        numpy_helper.from_array(np.float32(1e-5), "eps"),
        numpy_helper.from_array(np.ones(4, np.float32), "g"),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [info("x", f, [2, 4])], [info("y", f, [2, 4])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (pattern,) = find_patterns(model)
    assert pattern.layers == (
        "mean",
        "sub",
        "square",
        "variance",
        "eps_add",
        "root",
        "div",
        "scale",
    )


def test_a_body_that_reads_the_norm_is_not_part_of_it() -> None:
    """The run ended with a traceback where an If scales a normalised value."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 4] x, bool go) => (float[2, 4] y) <float eps = {1e-5}, float two = {2}> {
            s = Pow(x, two)
            v = ReduceMean<axes=[-1]>(s)
            e = Add(v, eps)
            d = Sqrt(e)
            n = Div(x, d)
            y = If (go) <
                then_branch = a () => (float[2, 4] p) { p = Mul(n, two) },
                else_branch = b () => (float[2, 4] q) { q = Neg(n) }
            >
        }
    """)
    (found,) = find_patterns(model)
    assert (found.kind, len(found.layers)) == ("RMSNorm", 5)


def test_weights_out_of_range_are_named() -> None:
    f = TensorProto.FLOAT
    weights = {
        "big": [1e5, 1.0],
        "tiny": [1e-9, 1.0],
        "zero": [0.0, 65504.0],
        "mask": [np.finfo(np.float32).min, 0.0],
        "infinite": [-np.inf, np.nan],  # which it is in any precision
    }
    nodes = [helper.make_node("Add", ["x", w], [f"y_{w}"], f"add_{w}") for w in weights]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", f, [2])],
        [info(f"y_{w}", f, [2]) for w in weights],
        [numpy_helper.from_array(np.float32(v), n) for n, v in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = {(f.kind, f.where) for f in weight_findings(model, Precision.FP16)}
    assert found == {
        ("weight-overflow", "add_big"),
        ("weight-overflow", "add_mask"),
        ("weight-underflow", "add_tiny"),
    }
    assert {f.where for f in weight_findings(model, Precision.BF16)} == {"add_mask"}
    assert weight_findings(model, Precision.TF32) == []


def test_a_body_that_is_most_of_the_network_is_told() -> None:
    """It is one layer, whose pin is everything in FP32."""
    found = [f for f in cautions(Graph(loop().model)) if f.kind == "control-flow"]
    assert [f.where for f in found] == ["/steps/Loop"] and found[0].weighty
    assert "holds 4 of 7 nodes that run" in found[0].message
    assert not cautions(Graph(branch().model))


def test_an_input_with_a_default_is_told_to_be_a_constant() -> None:
    """Not so of formats in which every weight is listed as an input."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[2] x, float[2] gain = {1, 2}) => (float[2] y) { y = Mul (x, gain) }"""
    model = onnx.parser.parse_model(text)
    (found,) = [f for f in cautions(Graph(model)) if f.kind == "default-input"]
    assert found.where == "gain" and "1 input with a default is a constant here" in found.message
    model.ir_version = 3
    assert not [f for f in cautions(Graph(model)) if f.kind == "default-input"]
