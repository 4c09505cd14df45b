"""The typed and the emulated model on the graphs that break other converters."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.graph import list_layers, to_emulated, to_typed
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.tensor_types import infer_types
from fixtures.models import ALL
from tests.conftest import run_model, same

F, H = TensorProto.FLOAT, TensorProto.FLOAT16


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    weights: dict[str, Any] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    def info(name: str, spec: Any) -> onnx.ValueInfoProto:
        shape, elem = spec if isinstance(spec, tuple) else (spec, F)
        return helper.make_tensor_value_info(name, elem, shape)

    graph = helper.make_graph(
        nodes,
        "g",
        [info(n, s) for n, s in inputs.items()],
        [info(n, s) for n, s in outputs.items()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def check_both(
    model: onnx.ModelProto, feed: dict[str, Any], base: str = "fp16"
) -> dict[str, onnx.ModelProto]:
    """Valid, loadable, all-pinned equal to the reference; returns the all-lowered models."""
    reference = run_model(
        with_unique_names(model), feed
    )  # ONNX Runtime refuses two nodes of one name
    layers = [layer.name for layer in list_layers(model)]
    reduced = {}
    before = model.SerializeToString()
    for rewrite in (to_typed, to_emulated):
        pinned = rewrite(model, PrecisionPlan(base, layers))
        onnx.checker.check_model(pinned, full_check=True)
        assert same(run_model(pinned, feed), reference)
        low = rewrite(model, PrecisionPlan(base))
        onnx.checker.check_model(low, full_check=True)
        assert len(run_model(low, feed)) == len(reference)
        reduced[rewrite.__name__] = low
    assert model.SerializeToString() == before, "the source model must not change"
    return reduced


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    return infer_types(model).types


def test_unnamed_and_duplicate_names_get_unique_stable_ids() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "same"),
        helper.make_node("Relu", ["a"], ["b"], "same"),
        helper.make_node("Relu", ["b"], ["c"], "same_1"),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    model = model_of(nodes, {"x": [2]}, {"y": [2]})
    names = [layer.name for layer in list_layers(model)]
    assert names == ["same", "same_2", "same_1", "Relu_y"]
    typed = to_typed(model, PrecisionPlan("fp16", {"same_2"}))
    assert types_of(typed)["b"] == F and types_of(typed)["a"] == H
    assert set(names) <= {n.name for n in typed.graph.node}


def test_shared_weight_is_held_in_both_types_once() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "one"),
        helper.make_node("MatMul", ["a", "w"], ["b"], "two"),
        helper.make_node("MatMul", ["b", "w"], ["y"], "three"),
    ]
    weight = np.eye(4, dtype=np.float32) * 1.0001
    model = model_of(nodes, {"x": [2, 4]}, {"y": [2, 4]}, {"w": weight})
    check_both(model, {"x": np.ones((2, 4), np.float32)})
    mixed = to_typed(model, PrecisionPlan("fp16", {"two"}))
    assert sorted(t.data_type for t in mixed.graph.initializer) == [F, H]
    reduced = to_typed(model, PrecisionPlan("fp16"))
    assert [t.data_type for t in reduced.graph.initializer] == [H], (
        "the FP32 copy nobody reads must go"
    )


def test_one_cast_for_each_tensor_and_type() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"], "a")]
    nodes += [helper.make_node("Sigmoid", ["a"], [f"y{i}"], f"s{i}") for i in range(4)]
    model = model_of(nodes, {"x": [3]}, {f"y{i}": [3] for i in range(4)})
    typed = to_typed(model, PrecisionPlan("fp16", {"a"}))
    casts = [n for n in typed.graph.node if n.op_type == "Cast" and n.input[0] == "a"]
    assert len(casts) == 1


def test_pinned_islands_hold_no_lossy_cast() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["t0"], "n0")]
    nodes += [helper.make_node("Sigmoid", [f"t{i}"], [f"t{i + 1}"], f"n{i + 1}") for i in range(5)]
    model = model_of(nodes, {"x": [3]}, {"t5": [3]})
    typed = to_typed(model, PrecisionPlan("fp16", {"n2", "n3"}))
    types = types_of(typed)
    assert types["t2"] == F, "between two pinned layers nothing is rounded"
    downs = [n.input[0] for n in typed.graph.node if n.op_type == "Cast" and n.attribute[0].i == H]
    assert downs == ["x", "t3"]


def test_source_casts_are_retyped() -> None:
    nodes = [
        helper.make_node("Cast", ["i"], ["f"], "to_float", to=F),
        helper.make_node("Mul", ["f", "f"], ["y"], "square"),
    ]
    model = model_of(nodes, {"i": ([3], TensorProto.INT64)}, {"y": [3]})
    low = check_both(model, {"i": np.array([1, 2, 300])})
    assert types_of(low["to_typed"])["f"] == H
    assert np.isinf(run_model(low["to_emulated"], {"i": np.array([1, 2, 300])})[0][2])


def test_graph_output_used_inside_and_input_as_output() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["mid"], "r"),
        helper.make_node("Sigmoid", ["mid"], ["y"], "s"),
    ]
    model = model_of(nodes, {"x": [3]}, {"mid": [3], "y": [3], "x": [3]})
    low = check_both(model, {"x": np.array([0.1, 70000.0, -1.0], np.float32)})
    outputs = {o.name: o.type.tensor_type.elem_type for o in low["to_typed"].graph.output}
    assert outputs == {"mid": F, "y": F, "x": F}
    mid = run_model(low["to_emulated"], {"x": np.array([0.1, 70000.0, -1.0], np.float32)})[0]
    assert np.isinf(mid[1]) and mid[0] == np.float32(np.float16(0.1))


def test_constant_nodes_and_optional_inputs() -> None:
    tensor = numpy_helper.from_array(np.float32([0.5, 0.5, 0.5]), "c")
    nodes = [
        helper.make_node("Constant", [], ["k"], value=tensor),
        helper.make_node("Constant", [], ["top"], value_float=6.0),
        helper.make_node("Add", ["x", "k"], ["a"], "add"),
        helper.make_node("Clip", ["a", "", "top"], ["y"], "clip"),
    ]
    low = check_both(model_of(nodes, {"x": [3]}, {"y": [3]}), {"x": np.float32([1, 2, 9])})
    clip = next(n for n in low["to_typed"].graph.node if n.name == "clip")
    assert clip.input[1] == "" and types_of(low["to_typed"])[clip.input[2]] == H


def test_resize_scales_and_range_stay_float() -> None:
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["big"], "resize", mode="nearest"),
        helper.make_node("Range", ["start", "stop", "step"], ["r"], "range"),
        helper.make_node("Mul", ["r", "two"], ["y"], "scale"),
    ]
    weights = {
        "scales": np.float32([1, 1, 2, 2]),
        "start": np.float32(0),
        "stop": np.float32(5),
        "step": np.float32(1),
        "two": np.float32(2),
    }
    model = model_of(nodes, {"x": [1, 1, 2, 2]}, {"big": [1, 1, 4, 4], "y": [5]}, weights)
    assert [x.name for x in list_layers(model)] == ["resize", "scale"]
    low = check_both(model, {"x": np.ones((1, 1, 2, 2), np.float32)})
    types = types_of(low["to_typed"])
    assert types["scales"] == F and types["r"] == F


def test_topk_takes_the_exact_values_and_indices_are_untouched() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "relu"),
        helper.make_node("TopK", ["a", "k"], ["values", "indices"], "topk"),
        helper.make_node("Sigmoid", ["values"], ["y"], "sig"),
    ]
    model = model_of(
        nodes, {"x": [8]}, {"y": [2], "indices": ([2], TensorProto.INT64)}, {"k": np.array([2])}
    )
    low = check_both(model, {"x": np.arange(8, dtype=np.float32)})
    assert types_of(low["to_typed"])["values"] == F
    assert [x.name for x in list_layers(model)] == ["relu", "sig"]


def test_quantise_dequantise_is_left_alone() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "dq"),
        helper.make_node("Relu", ["d"], ["y"], "relu"),
    ]
    model = model_of(nodes, {"x": [4]}, {"y": [4]}, {"s": np.float32(0.1), "z": np.uint8(10)})
    low = check_both(model, {"x": np.float32([0.1, 0.2, 0.3, 5])})
    assert [x.name for x in list_layers(model)] == ["relu"]
    assert types_of(low["to_typed"])["d"] == F


def test_inputs_and_weights_already_in_fp16() -> None:
    nodes = [
        helper.make_node("Cast", ["h"], ["f"], "up", to=F),
        helper.make_node("Cast", ["wh"], ["wf"], "up_w", to=F),
        helper.make_node("Mul", ["f", "wf"], ["m"], "mul"),
        helper.make_node("Cast", ["m"], ["y"], "down", to=H),
    ]
    model = model_of(nodes, {"h": ([3], H)}, {"y": ([3], H)}, {"wh": np.float16([1, 2, 3])})
    low = check_both(model, {"h": np.float16([1, 2, 3])})
    assert types_of(low["to_typed"])["m"] == H
    assert [x.name for x in list_layers(model)] == ["up", "up_w", "mul"]


def test_custom_domain_is_kept_in_fp32_and_types_flow_past_it() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "relu"),
        helper.make_node("Gelu", ["a"], ["g"], "custom", domain="com.microsoft"),
        helper.make_node("Mul", ["g", "two"], ["y"], "mul"),
    ]
    model = model_of(nodes, {"x": [3]}, {"y": [3]}, {"two": np.float32(2)})
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    feed = {"x": np.float32([1, 2, 3])}
    assert [x.name for x in list_layers(model)] == ["relu", "mul"]
    reference = run_model(model, feed)
    typed = to_typed(model, PrecisionPlan("fp16"))
    custom = next(n for n in typed.graph.node if n.name == "custom")
    assert custom.input[0] == "a__fp32"
    np.testing.assert_allclose(run_model(typed, feed)[0], reference[0], rtol=2e-3)
    assert same(run_model(to_typed(model, PrecisionPlan("fp16", {"relu", "mul"})), feed), reference)


def test_local_function_is_kept_in_fp32() -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["b"], "inner")]
    function = helper.make_function(
        "local", "Square", ["a"], ["b"], body, [helper.make_opsetid("", 17)]
    )
    nodes = [
        helper.make_node("Square", ["x"], ["s"], "call", domain="local"),
        helper.make_node("Relu", ["s"], ["y"], "relu"),
    ]
    model = model_of(nodes, {"x": [3]}, {"y": [3]})
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.append(function)
    check_both(model, {"x": np.float32([1, 2, 300])})
    assert [x.name for x in list_layers(model)] == ["relu"]


@pytest.mark.parametrize("dims", [["?", "?"], [None, None], [-1, -1], ["n", "m"]])
def test_placeholder_dimensions_get_their_own_names(dims: list[Any]) -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"], "r")], {"x": [2, 2]}, {"y": [2, 2]})
    for value in (model.graph.input[0], model.graph.output[0]):
        for dim, name in zip(value.type.tensor_type.shape.dim, dims, strict=True):
            dim.Clear()
            if isinstance(name, str):
                dim.dim_param = name
            elif name is not None:
                dim.dim_value = name
    typed = to_typed(model, PrecisionPlan("fp16"))
    names = [
        d.dim_param
        for v in (*typed.graph.input, *typed.graph.output)
        for d in v.type.tensor_type.shape.dim
    ]
    assert names == (["n", "m", "n", "m"] if dims[0] == "n" else ["x_0", "x_1", "y_0", "y_1"])


def test_stale_value_info_is_dropped() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "r"),
        helper.make_node("Sigmoid", ["a"], ["y"], "s"),
    ]
    model = model_of(nodes, {"x": ["n", 4]}, {"y": ["n", 4]})
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.DOUBLE, [7, 7]))
    for rewrite in (to_typed, to_emulated):
        assert len(rewrite(model, PrecisionPlan("fp16")).graph.value_info) == 0
    assert [x.name for x in list_layers(model)] == ["r", "s"]


def test_float32_lowest_mask_becomes_infinite_and_shows_as_nan() -> None:
    lowest = np.finfo(np.float32).min
    nodes = [
        helper.make_node("Add", ["x", "mask"], ["m"], "mask"),
        helper.make_node("Softmax", ["m"], ["y"], "soft"),
    ]
    model = model_of(
        nodes,
        {"x": [2, 3]},
        {"y": [2, 3]},
        {"mask": np.float32([[0, lowest, lowest], [lowest] * 3])},
    )
    low = check_both(model, {"x": np.zeros((2, 3), np.float32)})
    got = run_model(low["to_emulated"], {"x": np.zeros((2, 3), np.float32)})[0]
    assert got[0].tolist() == [1, 0, 0] and np.isnan(got[1]).all()


def test_initialisers_listed_as_inputs_are_constants() -> None:
    model = model_of(
        [helper.make_node("Mul", ["x", "w"], ["y"], "m")],
        {"x": [3], "w": [3]},
        {"y": [3]},
        {"w": np.float32([1, 2, 3])},
    )
    model.ir_version = 3
    low = check_both(model, {"x": np.float32([1, 2, 3])})
    assert [i.name for i in low["to_typed"].graph.input] == ["x"]


def test_bodies_are_really_lowered_and_really_pinned() -> None:
    for make in ALL:
        fixture = make()
        if fixture.name not in ("branch", "loop"):
            continue
        check_both(fixture.model, fixture.inputs)
        layer = next(iter(fixture.pins or ()))
        for pinned, wanted in ((False, H), (True, F)):
            typed = to_typed(fixture.model, PrecisionPlan("fp16", {layer} if pinned else ()))
            node = next(n for n in typed.graph.node if n.name == layer)
            bodies = [a.g for a in node.attribute if a.HasField("g")]
            for body in bodies:
                assert body.output[-1].type.tensor_type.elem_type == wanted
                assert {t.data_type for t in body.initializer if t.data_type in (F, H)} == {wanted}


def test_scan_with_its_body() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Add", ["state", "item"], ["next"], "sum"),
            helper.make_node("Identity", ["next"], ["out"], "id"),
        ],
        "b",
        [helper.make_tensor_value_info(n, F, [2]) for n in ("state", "item")],
        [helper.make_tensor_value_info(n, F, [2]) for n in ("next", "out")],
    )
    nodes = [
        helper.make_node(
            "Scan", ["s0", "items"], ["last", "all"], "scan", body=body, num_scan_inputs=1
        )
    ]
    model = model_of(nodes, {"s0": [2], "items": [4, 2]}, {"last": [2], "all": [4, 2]})
    feed = {"s0": np.float32([0, 0]), "items": np.full((4, 2), 0.1, np.float32)}
    low = check_both(model, feed)
    typed, emulated = run_model(low["to_typed"], feed), run_model(low["to_emulated"], feed)
    assert emulated[0][0] == np.float32(typed[0][0]) != run_model(model, feed)[0][0]


def test_tf32_rounds_only_matrix_operands() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "mm"),
        helper.make_node("Add", ["a", "b"], ["y"], "add"),
    ]
    value = np.float32(1 + 2.0**-12)
    model = model_of(
        nodes, {"x": [1, 1]}, {"y": [1, 1]}, {"w": np.float32([[1]]), "b": np.float32([2.0**-12])}
    )
    got = run_model(to_emulated(model, PrecisionPlan("tf32")), {"x": np.array([[value]])})[0]
    assert got[0, 0] == np.float32(1 + 2.0**-12), "x is rounded to 1, the addition is exact"
    assert to_typed(model, PrecisionPlan("tf32")).graph.node[0].op_type == "MatMul"


def test_pins_can_be_emulated_as_tf32() -> None:
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "mm")],
        {"x": [1, 1]},
        {"y": [1, 1]},
        {"w": np.float32([[1]])},
    )
    x = np.array([[1 + 2.0**-12]], np.float32)
    strict = run_model(to_emulated(model, PrecisionPlan("fp16", {"mm"})), {"x": x})[0]
    as_tf32 = run_model(
        to_emulated(model, PrecisionPlan("fp16", {"mm"}, Precision.TF32)), {"x": x}
    )[0]
    assert strict[0, 0] == x[0, 0] and as_tf32[0, 0] == 1.0


def test_bf16_raises_the_opset_where_it_must() -> None:
    weight = np.ones((1, 1, 1, 1), np.float32)
    model = model_of(
        [helper.make_node("Conv", ["x", "w"], ["y"], "c")],
        {"x": [1, 1, 2, 2]},
        {"y": [1, 1, 2, 2]},
        {"w": weight},
        opset=12,
    )
    typed = to_typed(model, PrecisionPlan("bf16"))
    onnx.checker.check_model(typed, full_check=True)
    assert typed.opset_import[0].version == 22
    assert TensorProto.BFLOAT16 in types_of(typed).values()
    x = np.full((1, 1, 2, 2), 1.003, np.float32)
    assert run_model(to_emulated(model, PrecisionPlan("bf16")), {"x": x})[0].flat[0] == 1.0


def test_unknown_pin_is_refused_by_name() -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"], "r")], {"x": [1]}, {"y": [1]})
    with pytest.raises(BadInputError, match="'nope'"):
        to_typed(model, PrecisionPlan("fp16", {"nope"}))


OPS = ("Relu", "Sigmoid", "Neg", "Add", "Mul", "Concat", "Identity")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_graphs(data: st.DataObject) -> None:
    """Any wiring, any pins: valid; all pinned is the reference; typed and emulated types agree;
    pins read FP32.
    """
    tensors, nodes = ["x"], []
    for index in range(data.draw(st.integers(1, 10))):
        op = data.draw(st.sampled_from(OPS))
        inputs = [
            data.draw(st.sampled_from(tensors))
            for _ in range(2 if op in ("Add", "Mul", "Concat") else 1)
        ]
        attributes = {"axis": 0} if op == "Concat" else {}
        name = data.draw(st.sampled_from(["", "dup", f"n{index}"]))
        if op == "Concat":
            nodes.append(helper.make_node(op, inputs, [f"c{index}"], name, **attributes))
            nodes.append(
                helper.make_node(
                    "ReduceMean", [f"c{index}"], [f"t{index}"], "", axes=[0], keepdims=1
                )
            )
        else:
            nodes.append(helper.make_node(op, inputs, [f"t{index}"], name, **attributes))
        tensors.append(f"t{index}")
    outputs = sorted({tensors[-1], data.draw(st.sampled_from(tensors[1:]))})
    model = model_of(nodes, {"x": [1, 4]}, {o: [1, 4] for o in outputs})
    layers = [layer.name for layer in list_layers(model)]
    feed = {"x": np.float32([[0.1, -2.5, 3.3, 0.7]])}
    pins = data.draw(st.sets(st.sampled_from(layers)))
    check_both(model, feed)
    typed = to_typed(model, PrecisionPlan("fp16", pins))
    onnx.checker.check_model(typed, full_check=True)
    types = types_of(typed)
    for node in typed.graph.node:
        if node.name in layers:
            wanted = F if node.name in pins else H
            assert {types[t] for t in (*node.input, *node.output)} == {wanted}
    pairs = [(n.input[0], n.attribute[0].i) for n in typed.graph.node if n.op_type == "Cast"]
    assert len(pairs) == len(set(pairs)), "one cast for each tensor and type"


def test_layernorm_statistics_keep_their_type_in_bf16() -> None:
    nodes = [
        helper.make_node("LayerNormalization", ["x", "s"], ["n", "mean"], "norm", axis=-1),
        helper.make_node("Add", ["n", "mean"], ["y"], "add"),
    ]
    model = model_of(nodes, {"x": [2, 4]}, {"y": [2, 4]}, {"s": np.ones(4, np.float32)})
    typed = to_typed(model, PrecisionPlan("bf16"))
    onnx.checker.check_model(typed, full_check=True)
    assert types_of(typed)["mean"] == F and types_of(typed)["n"] == TensorProto.BFLOAT16


def test_raising_the_opset_keeps_functions_and_looks_into_bodies() -> None:
    body = helper.make_function(
        "my",
        "Fn",
        ["a"],
        ["b"],
        [helper.make_node("Neg", ["a"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    conv = helper.make_graph(
        [helper.make_node("Conv", ["f", "w"], ["c"], "conv")],
        "b",
        [],
        [helper.make_tensor_value_info("c", F, [1, 1, 2, 2])],
    )
    same_conv = helper.make_graph(
        [helper.make_node("Conv", ["f", "w"], ["d"], "conv")],
        "e",
        [],
        [helper.make_tensor_value_info("d", F, [1, 1, 2, 2])],
    )
    nodes = [
        helper.make_node("Fn", ["x"], ["f"], "call", domain="my"),
        helper.make_node("If", ["go"], ["y"], "if", then_branch=conv, else_branch=same_conv),
    ]
    weights = {"w": np.ones((1, 1, 1, 1), np.float32), "go": np.array(True)}
    model = model_of(nodes, {"x": [1, 1, 2, 2]}, {"y": [1, 1, 2, 2]}, weights)
    model.opset_import.append(helper.make_opsetid("my", 1))
    model.functions.append(body)
    typed = to_typed(model, PrecisionPlan("bf16"))
    assert typed.functions and typed.opset_import[0].version == 22
    onnx.checker.check_model(typed, full_check=True)


def test_a_tensor_may_have_the_name_of_a_constants_value() -> None:
    """``w__value`` was taken for the constant ``w``, and the layer that makes it was none."""
    large = numpy_helper.from_array(np.arange(2000, dtype=np.int64) % 4)
    nodes = [
        helper.make_node("Constant", [], ["w"], "constant", value=large),
        helper.make_node("Relu", ["x"], ["w__value"], "relu"),
        helper.make_node("Gather", ["w__value", "w"], ["g"], "gather"),
        helper.make_node("Add", ["g", "g"], ["y"], "add"),
    ]
    model = model_of(nodes, {"x": [4]}, {"y": [2000]})
    assert [layer.name for layer in list_layers(model)] == ["relu", "gather", "add"]
    onnx.checker.check_model(to_typed(model, PrecisionPlan("fp16")), full_check=True)


def test_bodies_of_sequence_map_read_fp32() -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["e", "c"], ["r"], "inner")],
        "b",
        [helper.make_tensor_value_info("e", F, [2])],
        [helper.make_tensor_value_info("r", F, [2])],
    )
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["c"], "mul"),
        helper.make_node("SequenceConstruct", ["x", "x"], ["s"], "seq"),
        helper.make_node("SequenceMap", ["s"], ["m"], "map", body=body),
        helper.make_node("SequenceAt", ["m", "zero"], ["y"], "at"),
    ]
    check_both(
        model_of(nodes, {"x": [2]}, {"y": [2]}, {"zero": np.array(0)}),
        {"x": np.float32([0.1, 0.2])},
    )


def test_tf32_leaves_bodies_without_matrix_products_alone() -> None:
    for make in ALL:
        fixture = make()
        if fixture.name in ("branch", "loop"):
            reference = run_model(fixture.model, fixture.inputs)
            assert same(
                run_model(to_emulated(fixture.model, PrecisionPlan("tf32")), fixture.inputs),
                reference,
            )
            assert all(
                Precision.TF32 not in layer.precisions for layer in list_layers(fixture.model)
            )
