"""The rule `layernorm`: exact where it matches, refused where anything differs from the
definition.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bisect_trt.model.graph import Graph
from bisect_trt.repair.edits import Rule, beginning
from bisect_trt.repair.rules import edited
from fixtures.build import GraphBuilder
from tests.conftest import run_model

SHAPE = [2, 6, 5, 8]


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` after the rule; the same where nothing matches."""
    return edited(beginning(Graph(model)), (Rule.LAYERNORM,), lambda _: {}).graph.proto


def chain(
    *,
    axes: tuple[int, ...] = (-1,),
    second_axes: tuple[int, ...] | None = None,
    square: str = "Pow",
    power: float = 2.0,
    shift: str = "constant",
    scale: bool = True,
    watch: str = "",
    opset: int = 13,
    divide: str = "Div",
    keepdims: int = 1,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A written-out LayerNorm with one thing about it changed, if anything."""
    b = GraphBuilder(7, opset=opset)
    b.scope = "/norm"

    def mean(x: str, over: tuple[int, ...]) -> str:
        if opset >= 18:
            return str(b.op("ReduceMean", x, b.weight(list(over), np.int64), keepdims=keepdims))
        return str(b.op("ReduceMean", x, axes=list(over), keepdims=keepdims))

    shape = [n if a in {x % 4 for x in axes} else 1 for a, n in enumerate(SHAPE)]
    centred = b.op("Sub", "x", mean("x", axes))
    squared = (
        b.op("Pow", centred, b.weight(power)) if square == "Pow" else b.op("Mul", centred, centred)
    )
    variance = mean(squared, second_axes or axes)
    root = b.op("Sqrt", b.op("Add", variance, b.weight(1e-5)))
    y = normal = (
        b.op("Div", centred, root)
        if divide == "Div"
        else b.op("Mul", centred, b.op("Reciprocal", root))
    )
    if scale:
        y = b.op("Mul", y, b.weight(b.random.uniform(0.5, 1.5, shape)))
    if shift == "constant":
        y = b.op("Add", b.weight(b.random.normal(size=shape)), y)
    elif shift == "residual":
        y = b.op("Add", y, "x")
    elif shift == "wrong axis":
        y = b.op(
            "Add",
            y,
            b.weight(b.random.normal(size=[1, 1, SHAPE[2], 1] if axes != (2,) else [1, 6, 1, 1])),
        )
    b.rename_output(y, "y")
    outputs = {"y": SHAPE}
    if watch:
        b.rename_output({"normal": normal, "variance": variance}[watch], "watched")
        outputs["watched"] = [2, 6, 5, 1] if watch == "variance" else SHAPE
    inputs = {"x": np.random.default_rng(8).normal(3.0, 2.0, SHAPE).astype(np.float32)}
    return b.model({"x": SHAPE}, outputs), inputs


def operators(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("axes", [(-1,), (-2, -1), (3,), (1, 2, 3), (1,)])
def test_what_matches_is_one_operator_and_equal(
    axes: tuple[int, ...], square: str, opset: int
) -> None:
    model, inputs = chain(axes=axes, square=square, opset=opset)
    before = model.SerializeToString()
    new_model = fused(model)
    assert model.SerializeToString() == before
    onnx.checker.check_model(new_model, full_check=True)
    transposed = axes == (1,)
    assert operators(new_model) == (
        ["Transpose", "LayerNormalization", "Transpose"] if transposed else ["LayerNormalization"]
    )
    old, new = run_model(model, inputs)[0], run_model(new_model, inputs)[0]
    assert np.abs(old - new).max() <= 1e-6 * np.abs(old).max()


def test_weights_that_nobody_reads_any_more_are_left_out() -> None:
    model, _ = chain()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "spare"))
    weights = {tensor.name for tensor in fused(model).graph.initializer}
    assert weights == {"/norm/LayerNormalization_scale", "/norm/LayerNormalization_shift", "spare"}
    assert len(model.graph.initializer) > len(weights), "the model given is not changed"


def test_a_residual_addition_behind_it_stays() -> None:
    """The shape that another tool's fusion swallows: x + norm(x) without a shift."""
    model, inputs = chain(shift="residual")
    new_model = fused(model)
    assert operators(new_model) == ["LayerNormalization", "Add"]
    assert "x" in new_model.graph.node[1].input
    assert np.allclose(
        run_model(model, inputs)[0], run_model(new_model, inputs)[0], rtol=1e-5, atol=1e-6
    )


def test_a_shift_along_another_axis_stays() -> None:
    model, _ = chain(shift="wrong axis")
    assert operators(fused(model)) == [
        "LayerNormalization",
        "Add",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"second_axes": (-2,)},
        {"power": 3.0},
        {"axes": (2,)},
        {"scale": False},
        {"watch": "normal"},
        {"watch": "variance"},
        {"divide": "Reciprocal"},
    ],
    ids=lambda c: "-".join(c),
)
def test_anything_else_is_refused(change: dict[str, object]) -> None:
    model, _ = chain(**change)  # type: ignore[arg-type]
    assert operators(fused(model)) == operators(model)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(-1,), (-2, -1), (1,), (2,)]),
    st.sampled_from(["Pow", "Mul"]),
    st.sampled_from(["constant", "residual", "wrong axis", "none"]),
    st.sampled_from(["", "normal", "variance"]),
    st.booleans(),
)
def test_either_exact_or_refused(
    axes: tuple[int, ...], square: str, shift: str, watch: str, scale: bool
) -> None:
    assume(watch != "variance" or axes == (-1,))
    assume(scale or shift != "none" or watch != "normal")  # the normal would be the output itself
    model, inputs = chain(axes=axes, square=square, shift=shift, watch=watch, scale=scale)
    for old, new in zip(run_model(model, inputs), run_model(fused(model), inputs), strict=True):
        assert np.abs(old - new).max() <= 1e-6 * np.abs(old).max()
