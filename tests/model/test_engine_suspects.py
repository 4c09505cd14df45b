"""Forms of models that engines are known to refuse or to get wrong: named where they are, not where
they nearly are; what is said to build, or not to, is built.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph
from bisect_trt.model.inspection import inspect_model
from bisect_trt.model.load import load_model
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.tensorrt.build import build_engine
from bisect_trt.runners.tensorrt.records import EngineRequest, Profile, import_tensorrt
from tests.networks import branching

TRT = import_tensorrt("tensorrt_rtx")
F = TensorProto.FLOAT
node, info = helper.make_node, helper.make_tensor_value_info


def model_of(
    nodes: list[NodeProto],
    inputs: dict[str, list[Any]],
    opset: int = 17,
    out: int = F,
    **constants: Any,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [info(n, F, s) for n, s in inputs.items()],
        [info("y", out, None)],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def found(model: onnx.ModelProto, precision: str = "fp16") -> dict[str, Finding]:
    return {f.kind: f for f in inspect_model(load_model(model), Precision(precision)).findings}


def builds(model: onnx.ModelProto, profile: Profile | None = None) -> bool:
    sizes = {
        i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.input
    }
    profile = profile or {name: (shape, shape, shape) for name, shape in sizes.items()}
    try:
        build_engine(TRT, EngineRequest(model.SerializeToString(), profile, tf32=False))
    except RunnerFailedError:
        return False
    return True


@pytest.mark.parametrize(
    ("shape", "opset", "axis", "named"),
    [
        ([1, 65_504], 17, -1, True),
        ([1, 65_503], 17, -1, False),
        ([1, "keys"], 17, -1, False),
        ([65_504, 8], 17, 0, True),
        ([65_504, 8], 17, -1, False),
        ([1, 1_024, 64], 11, 1, True),  # flattened before opset 13
        ([1, 1_024, 64], 13, 1, False),
        ([1, 1_024, 63], 11, 1, False),
    ],
)
def test_softmax_over_more_keys_than_fp16_can_count(
    shape: list[Any], opset: int, axis: int, named: bool
) -> None:
    model = model_of([node("Softmax", ["x"], ["y"], "attend", axis=axis)], {"x": shape}, opset)
    told = found(model)
    assert ("long-softmax" in told) == named
    assert "long-softmax" not in found(model, "bf16"), "BF16 has FP32's range"
    if named:
        assert (
            told["long-softmax"].where == "attend" and "--keep-fp32" in told["long-softmax"].message
        )


def test_attention_written_out_and_as_one_operator() -> None:
    """The keys' number comes through a Reshape to a constant shape."""
    nodes = [
        node("Reshape", ["k", "to"], ["keys"], "split"),
        node("MatMul", ["q", "keys"], ["scores"], "compare"),
        node("Softmax", ["scores"], ["y"], "attend"),
    ]
    inputs: dict[str, list[Any]] = {"q": [1, 4, 8], "k": [1, 8 * 70_000]}
    written = model_of(nodes, inputs, to=np.asarray([1, 8, -1]))
    assert "70,000 keys" in found(written)["long-softmax"].message
    whole = node("Attention", ["q", "k", "k"], ["y"], "attend", q_num_heads=1, kv_num_heads=1)
    for keys, named in ((70_000, True), (60_000, False)):
        model = model_of([whole], {"q": [1, 4, 8], "k": [1, keys, 8]}, 23)
        assert ("long-softmax" in found(model)) == named


def bf16_convolution(op: str, opset: int) -> onnx.ModelProto:
    nodes = [node(op, ["x", "w"], ["y"], "stem")]
    return model_of(nodes, {"x": [1, 4, 8, 8]}, opset, w=np.ones((4, 4, 3, 3), np.float32))


def test_bf16_convolutions_below_opset_22_are_advised_on() -> None:
    for opset, precision, told in ((17, "bf16", 1), (22, "bf16", 0), (17, "fp16", 0)):
        model = bf16_convolution("Conv", opset)
        advice = inspect_model(load_model(model), Precision(precision)).advice
        assert [a.startswith("stem (Conv) has no BF16 form in opset 17") for a in advice] == (
            [True] * told
        )
    assert (
        "export with opset 22"
        in inspect_model(load_model(bf16_convolution("Conv", 13)), Precision.BF16).advice[-1]
    )


def test_transposed_convolutions_in_bf16() -> None:
    assert found(bf16_convolution("ConvTranspose", 22), "bf16")["bf16-transposed"].where == "stem"
    assert "bf16-transposed" not in found(bf16_convolution("ConvTranspose", 22), "fp16")
    assert "bf16-transposed" not in found(bf16_convolution("Conv", 22), "bf16")


@pytest.mark.parametrize("op", ["HardSwish", "Mish", "GRU", "LpNormalization", "LpPool"])
def test_what_is_not_parsed_in_bf16(op: str) -> None:
    x, more = [1, 3, 8, 8], dict[str, Any]()
    operator = node(op, ["n"], ["y"], "op", **({"kernel_shape": [2, 2]} if op == "LpPool" else {}))
    if op == "GRU":
        operator = node("GRU", ["n", "w", "r"], ["y"], "op", hidden_size=5)
        x = [7, 1, 4]
        more = {"w": np.ones((1, 15, 4), np.float32), "r": np.ones((1, 15, 5), np.float32)}
    model = model_of([node("Neg", ["x"], ["n"], "neg"), operator], {"x": x}, 18, **more)
    told = found(model, "bf16")["bf16-unparsed"]
    assert told.where == "op" and op in told.message
    assert "bf16-unparsed" not in found(model, "fp16")
    if op == "GRU":  # of which a build takes minutes
        return
    graph = Graph(load_model(model).proto)
    for plan, as_said in (
        (PrecisionPlan("fp16"), True),
        (PrecisionPlan("bf16"), False),
        (PrecisionPlan("bf16", ["op"]), True),
    ):
        assert builds(to_typed(graph, plan), {"x": (tuple(x),) * 3}) == as_said


def chosen(
    then: list[NodeProto], other: list[NodeProto], condition: str = "rate", **constants: Any
) -> onnx.ModelProto:
    """An If between two bodies; its condition is told by an input's value, the input's size, or
    not at all.
    """
    types = {"Cast": TensorProto.INT32}
    bodies = [
        helper.make_graph(
            nodes, kind, [], [info(max(nodes[-1].output), types.get(nodes[-1].op_type, F), None)]
        )
        for kind, nodes in (("then", then), ("else", other))
    ]
    nodes = {
        "rate": [node("Greater", ["rate", "limit"], ["told"], "compare")],
        "size": [
            node("Size", ["x"], ["size"]),
            node("Greater", ["size", "most"], ["told"], "compare"),
        ],
        "constant": [],
    }[condition]
    nodes.append(
        node(
            "If",
            ["told" if nodes else "always"],
            ["o"],
            "choose",
            then_branch=bodies[0],
            else_branch=bodies[1],
        )
    )
    nodes.append(node("Identity", ["o"], ["y"]))
    return model_of(
        nodes,
        {"x": [4, 8], "rate": []},
        always=True,
        limit=np.float32(0),
        most=np.int64(3),
        axis=np.asarray([0]),
        **constants,
    )


RAISED = [node("Unsqueeze", ["x", "axis"], ["a"])]
WHOLE = [node("Cast", ["x"], ["a"], to=TensorProto.INT32)]
LONGER = [node("Concat", ["x", "x"], ["a"], axis=0)]
PLAIN = [node("Abs", ["x"], ["b"])]


@pytest.mark.parametrize(
    ("then", "condition", "words"),
    [
        (RAISED, "rate", "3 and 2 dimensions"),
        (WHOLE, "rate", "INT32 and FLOAT"),
        (LONGER, "rate", ""),
        (RAISED, "size", ""),
        (RAISED, "constant", ""),
    ],
)
def test_ifs_whose_bodies_differ(then: list[NodeProto], condition: str, words: str) -> None:
    model = chosen(then, PLAIN, condition)
    told = found(model)
    assert ("if-bodies" in told) == bool(words) == (not builds(model))
    if words:
        assert told["if-bodies"].where == "choose" and words in told["if-bodies"].message


def test_the_fixture_whose_bodies_differ_in_rank() -> None:
    told = found(branching()[0])
    assert told["if-bodies"].where == "choose" and "3 and 2" in told["if-bodies"].message
    assert "if-recurrent" not in told


@pytest.mark.parametrize(
    ("op", "gates", "condition", "named"),
    [
        ("LSTM", 4, "rate", True),
        ("GRU", 3, "rate", True),
        ("RNN", 1, "rate", False),
        ("LSTM", 4, "constant", False),
    ],
)
def test_recurrent_operators_inside_an_if(op: str, gates: int, condition: str, named: bool) -> None:
    inside = [*RAISED, node(op, ["a", "w", "w"], ["", "h"], "remember", hidden_size=8)]
    raised = [node("Unsqueeze", ["x", "axis"], ["b"])]
    model = chosen(inside, raised, condition, w=np.full((1, 8 * gates, 8), 0.1, np.float32))
    told = found(model)
    assert ("if-recurrent" in told) == named == (not builds(model))
    assert "if-bodies" not in told
    if named:
        assert "remember" in told["if-recurrent"].where and "choose" in told["if-recurrent"].message


def test_the_fixture_with_recurrent_bodies() -> None:
    told = found(branching(recurrent=True)[0])["if-recurrent"]
    assert "and 1 more" in told.message and "LSTM" in told.where


def test_integer_operators() -> None:
    quantised = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "quantise"),
        node("MatMulInteger", ["q", "w"], ["i"], "multiply"),
        node("Cast", ["i"], ["y"], "widen", to=F),
    ]
    constants = {"s": np.float32(0.1), "z": np.int8(0), "w": np.ones((8, 8), np.int8)}
    model = model_of(quantised, {"x": [4, 8]}, **constants)
    assert found(model)["integer-operator"].where == "multiply" and not builds(model)
    around = [
        quantised[0],
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("DequantizeLinear", ["w", "s", "z"], ["v"]),
        node("MatMul", ["d", "v"], ["y"], "multiply"),
    ]
    model = model_of(around, {"x": [4, 8]}, **constants)
    assert "integer-operator" not in found(model) and builds(model)


def test_uint8_between_nodes() -> None:
    def through(kind: int) -> onnx.ModelProto:
        nodes = [node("Cast", ["x"], ["u"], "narrow", to=kind), node("Cast", ["u"], ["y"], to=F)]
        return model_of(nodes, {"x": [4, 8]})

    model = through(TensorProto.UINT8)
    assert found(model)["uint8-tensor"].where == "narrow" and not builds(model)
    model = through(TensorProto.INT32)
    assert "uint8-tensor" not in found(model) and builds(model)
    last = [node("Relu", ["x"], ["r"]), node("Cast", ["r"], ["y"], "narrow", to=TensorProto.UINT8)]
    model = model_of(last, {"x": [4, 8]}, out=TensorProto.UINT8)
    assert "uint8-tensor" not in found(model) and builds(model)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (["?", 3, "?", "?"], True),
        (["unk", 3, "unk", "w"], True),
        (["?", 3, 32, "w"], False),
        (["", 3, "", ""], False),  # an empty name is none
        (["n", 3, "h", "w"], False),
    ],
)
def test_dimensions_that_share_a_placeholder(sizes: list[Any], named: bool) -> None:
    model = model_of([node("Relu", ["x"], ["y"])], {"x": sizes})
    told = found(model)
    assert ("shared-dimension" in told) == named
    smallest, largest = (1, 3, 32, 64), (1, 3, 48 if isinstance(sizes[2], str) else 32, 128)
    assert builds(model, {"x": (smallest, smallest, largest)}) == (not named)
    if named:
        assert told["shared-dimension"].where == "x" and repr(sizes[0]) in (
            told["shared-dimension"].message
        )
