"""Every rule gives the gradient that finite differences measure, in each form of its operator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bisect_trt.model.gradient_moves import RULES_OF_ALL
from bisect_trt.model.precision_rules import schema_of
from tests.model.reverse import check, node_model

BLANK = np.zeros(0, np.float32)
GRID = (np.arange(48).reshape(2, 4, 3, 2) * 0.808 % 2.4 - 1.2).astype(np.float32)
"""Places in and beside an image, none near the middle of a pixel, where slopes change."""

BY_RUNTIME = {"step": 1e-2, "precise": False}
"""Where ONNX's evaluator rounds to FP32, or knows only the newest form of an operator."""


def normal(*shape: int) -> NDArray[np.float32]:
    """The same numbers for the same shape, so that an example that fails does so again."""
    return np.random.default_rng([1, *shape]).standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> NDArray[np.float32]:
    return (np.random.default_rng([2, *shape]).random(shape) + 0.5).astype(np.float32)


def apart(*shape: int) -> NDArray[np.float32]:
    """Positive numbers, none near another: a small step changes no order."""
    places = np.random.default_rng(3).permutation(math.prod(shape))
    return (0.5 + places.reshape(shape) / 20.0).astype(np.float32)


def number(value: float) -> NDArray[np.float32]:
    return np.asarray(value, np.float32)


def ints(*values: int) -> NDArray[np.int64]:
    return np.asarray(values, np.int64)


def uncovered(
    op: str,
    inputs: dict[str, NDArray[Any]],
    options: dict[str, Any] | None = None,
    constants: str = "",
    **attributes: Any,
) -> set[str]:
    """The layers without an effect, of those that give the inputs; the others' are checked."""
    names = {n for n in inputs if n in constants.split()}
    model = node_model(op, inputs, constants=names, **attributes)
    layers = {n: a for n, a in inputs.items() if a.dtype == np.float32 and n not in names}
    reverse = check(model, {n: a for n, a in layers.items() if a.size}, **(options or {}))
    return set(reverse.uncovered)


FUNCTIONS = (
    *("Abs", "Celu", "Cos", "Dropout", "Elu", "Exp", "HardSigmoid", "HardSwish", "Identity"),
    *("LeakyRelu", "LogSoftmax", "Neg", "Relu", "Selu", "Sigmoid", "Sin", "Softmax", "Softplus"),
    *("Softsign", "Tanh", "ThresholdedRelu", "Round", "Floor", "Ceil", "Sign"),
)


@pytest.mark.parametrize("opset", [13, 15, 17, 18, 19, 20, 21])
@pytest.mark.parametrize("op", FUNCTIONS)
def test_functions_of_one_number(op: str, opset: int) -> None:
    if schema_of(op, opset) is None:
        pytest.skip("introduced later")
    assert uncovered(op, {"x": normal(3, 4)}, opset=opset) == set()


@pytest.mark.parametrize("op", ["Log", "Sqrt", "Reciprocal"])
def test_functions_of_positive_numbers(op: str) -> None:
    assert uncovered(op, {"x": positive(3, 4)}) == set()


FORMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Erf", {"x": normal(3, 4)}, {"options": BY_RUNTIME}),
    ("Gelu", {"x": normal(3, 4)}, {"opset": 20, "options": BY_RUNTIME}),
    ("Gelu", {"x": normal(3, 4)}, {"opset": 20, "approximate": "tanh", "options": BY_RUNTIME}),
    ("Mish", {"x": normal(3, 4)}, {"opset": 18}),
    ("Swish", {"x": normal(3, 4)}, {"opset": 24, "alpha": 1.5, "options": {"step": 1e-6}}),
    (
        "Clip",
        {"x": normal(3, 4), "low": number(-0.5), "high": number(0.5)},
        {"constants": "low high"},
    ),
    ("Cast", {"x": normal(3, 4)}, {"to": 1, "options": BY_RUNTIME}),
    ("Sum", {"a": normal(2, 3), "b": normal(3), "c": normal(1, 1)}, {}),
    ("Mean", {"a": normal(2, 3), "b": normal(3), "c": normal(1, 1)}, {}),
    ("Pow", {"x": positive(2, 3), "e": number(2.5)}, {"constants": "e"}),
    ("Pow", {"x": normal(2, 3), "e": number(2.0)}, {"constants": "e"}),
    ("Pow", {"x": normal(2, 3), "e": ints(3)}, {}),
    ("Pow", {"x": positive(3), "e": positive(2, 3)}, {"constants": "e"}),
    ("Where", {"c": np.array([[True], [False]]), "a": normal(2, 3), "b": normal(3)}, {}),
    ("PRelu", {"x": normal(2, 3, 4), "s": normal(3, 1)}, {"constants": "s"}),
    ("Einsum", {"a": normal(2, 3, 4), "b": normal(2, 5, 4)}, {"equation": "bid,bjd->bij"}),
    ("Einsum", {"a": normal(2, 3), "b": normal(3)}, {"equation": "ij,j->i"}),
    ("Conv", {"x": normal(1, 4, 7), "w": normal(2, 4, 1)}, {"constants": "w"}),
    ("Conv", {"x": normal(1, 2, 4, 4, 5), "w": normal(2, 2, 2, 2, 2)}, {"constants": "w"}),
    *(
        (
            "BatchNormalization",
            {
                "x": normal(2, 3, 4),
                "s": positive(3),
                "b": normal(3),
                "m": normal(3),
                "v": positive(3),
            },
            {"constants": "s b m v", "opset": opset, "options": BY_RUNTIME},
        )
        for opset in (13, 15, 21)
    ),
    (
        "LayerNormalization",
        {"x": normal(2, 3, 4), "s": positive(4), "b": normal(4)},
        {"constants": "s b"},
    ),
    (
        "LayerNormalization",
        {"x": normal(2, 3, 4), "s": positive(3, 4)},
        {"constants": "s", "axis": 1, "epsilon": 0.1},
    ),
    (
        "RMSNormalization",
        {"x": normal(2, 3, 4), "s": positive(4)},
        {"constants": "s", "opset": 23, "options": BY_RUNTIME},
    ),
    (
        "InstanceNormalization",
        {"x": normal(2, 3, 4), "s": positive(3), "b": normal(3)},
        {"constants": "s b"},
    ),
    (
        "GroupNormalization",
        {"x": normal(2, 6, 4), "s": positive(2), "b": normal(2)},
        {"constants": "s b", "opset": 18, "num_groups": 2},
    ),
    (
        "GroupNormalization",
        {"x": normal(2, 6, 4), "s": positive(6), "b": normal(6)},
        {"constants": "s b", "opset": 21, "num_groups": 2, "options": BY_RUNTIME},
    ),
    ("LpNormalization", {"x": normal(2, 3, 4)}, {"axis": 1}),
    ("MeanVarianceNormalization", {"x": normal(2, 3, 4, 4)}, {"options": BY_RUNTIME}),
    *(
        (op, {"x": normal(2, 3, 4)}, {"axis": 1, "opset": opset, "options": BY_RUNTIME})
        for op in ("Softmax", "LogSoftmax")
        for opset in (12, 13)
    ),
    ("GlobalAveragePool", {"x": normal(2, 3, 4, 4)}, {}),
    ("GlobalMaxPool", {"x": normal(2, 3, 4, 4)}, {}),
    ("MaxPool", {"x": normal(1, 2, 7, 7)}, {"kernel_shape": [2, 2], "dilations": [2, 2]}),
    ("Gather", {"x": normal(3, 4), "i": ints(0, 2, 2, -1).reshape(2, 2)}, {"axis": 1}),
    ("Gather", {"x": normal(3, 4), "i": ints(1)}, {}),
    (
        "GatherElements",
        {"x": normal(3, 4), "i": ints(0, 2, 2, -1, 0, 0).reshape(3, 2)},
        {"axis": 1},
    ),
    ("GatherElements", {"x": normal(3, 2), "i": ints(0, 2, 2, -1).reshape(2, 2)}, {}),
    ("GatherND", {"x": normal(3, 4, 2), "i": ints(0, 2, 2, -1).reshape(2, 2)}, {}),
    (
        "GatherND",
        {"x": normal(2, 3, 4), "i": ints(0, 2, 1, 1).reshape(2, 2, 1)},
        {"batch_dims": 1},
    ),
    ("Reshape", {"x": normal(3, 4), "s": ints(2, -1)}, {}),
    ("Flatten", {"x": normal(3, 4, 2)}, {}),
    ("Squeeze", {"x": normal(3, 1, 2), "a": ints(1)}, {}),
    ("Unsqueeze", {"x": normal(3, 2), "a": ints(0, -1)}, {}),
    ("Transpose", {"x": normal(3, 4, 2)}, {}),
    ("Transpose", {"x": normal(3, 4, 2)}, {"perm": [1, 2, 0]}),
    ("Expand", {"x": normal(3, 1), "s": ints(2, 1, 4)}, {}),
    ("Tile", {"x": normal(3, 2), "r": ints(2, 3)}, {}),
    (
        "Concat",
        {"a": normal(2, 3), "b": normal(2, 1), "c": normal(2, 2)},
        {"axis": -1, "constants": "b"},
    ),
    ("Split", {"x": normal(2, 6), "s": ints(1, 5)}, {"axis": 1, "outputs": 2}),
    ("Pad", {"x": normal(3, 4), "p": ints(1, 0, 2, 1)}, {}),
    ("Pad", {"x": normal(3, 4), "p": ints(1, 0, 2, 1)}, {"mode": "reflect"}),
    ("Pad", {"x": normal(3, 4), "p": ints(1, 0, 2, 1)}, {"mode": "edge"}),
    (
        "Pad",
        {"x": normal(3, 4), "p": ints(1, 2), "v": number(1.0), "a": ints(-1)},
        {"opset": 18, "constants": "v"},
    ),
    ("DepthToSpace", {"x": normal(1, 8, 2, 3)}, {"blocksize": 2}),
    ("DepthToSpace", {"x": normal(1, 8, 2, 3)}, {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", {"x": normal(1, 2, 4, 6)}, {"blocksize": 2}),
    ("TopK", {"x": normal(3, 5), "k": ints(2)}, {"outputs": 2, "axis": 1}),
    *(
        ("CumSum", {"x": normal(3, 4), "a": np.asarray(1)}, {"exclusive": e, "reverse": r})
        for e in (0, 1)
        for r in (0, 1)
    ),
    ("Trilu", {"x": normal(3, 4), "k": np.asarray(1)}, {"upper": 0}),
    ("Trilu", {"x": normal(3, 4)}, {}),
    (
        "Upsample",
        {"x": normal(1, 2, 3, 4), "scales": np.asarray([1, 1, 2, 2], np.float32)},
        {"constants": "scales", "mode": "linear", "opset": 9, "options": BY_RUNTIME},
    ),
    *(
        (
            "GridSample",
            {"x": normal(2, 3, 5, 6), "g": GRID},
            {
                "opset": opset,
                "padding_mode": mode,
                "align_corners": corners,
                "options": {"step": 1e-3, "precise": False},
            },
        )
        for opset in (16, 20)
        for mode in ("zeros", "border")
        for corners in (0, 1)
    ),
]


@pytest.mark.parametrize(
    ("op", "inputs", "how"), FORMS, ids=[f"{n}-{form[0]}" for n, form in enumerate(FORMS)]
)
def test_other_operators(op: str, inputs: dict[str, Any], how: dict[str, Any]) -> None:
    assert uncovered(op, inputs, **how) == set()


@pytest.mark.parametrize(
    ("op", "inputs", "how"),
    [
        ("Pow", {"x": positive(3), "e": positive(2, 3)}, {}),
        ("Conv", {"x": normal(1, 4, 7), "w": normal(2, 4, 1)}, {}),
        ("Einsum", {"a": normal(2, 3)}, {"equation": "ij->i"}),
        ("Det", {"x": normal(2, 2)}, {}),
        (
            "ConvTranspose",
            {"x": normal(1, 3, 4, 5), "w": normal(3, 2, 3, 3)},
            {"constants": "w", "output_shape": [9, 11], "strides": [2, 2]},
        ),
        (
            "Resize",
            {"x": normal(1, 2, 4, 5), "roi": BLANK, "none": BLANK, "sizes": ints(1, 2, 7, 3)},
            {"mode": "cubic"},
        ),
        (
            "GridSample",
            {"x": normal(1, 3, 5, 6), "g": normal(1, 4, 3, 2)},
            {"padding_mode": "reflection"},
        ),
    ],
)
def test_what_has_no_rule_leaves_the_layers_before_it_uncovered(
    op: str, inputs: dict[str, Any], how: dict[str, Any]
) -> None:
    constants = how.get("constants", "").split()
    layers = {n for n, a in inputs.items() if a.dtype == np.float32 and n not in constants}
    expected = {f"/{n}" for n in layers if inputs[n].size}
    assert uncovered(op, inputs, {"precise": False}, **how) == expected


_SIDE = st.integers(1, 4)
_QUICK = settings(max_examples=25, deadline=None)


@st.composite
def broadcast(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that broadcast to each other."""
    whole = draw(st.lists(_SIDE, max_size=3))
    shapes = []
    for _ in range(2):
        shape = [draw(st.sampled_from([1, size])) for size in whole]
        shapes.append(tuple(shape[draw(st.integers(0, len(shape))) :]))
    return shapes[0], shapes[1]


@_QUICK
@given(st.sampled_from(["Add", "Sub", "Mul", "Div", "Max", "Min"]), broadcast())
def test_operands_are_broadcast(op: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    first, second = shapes
    assert uncovered(op, {"a": normal(*first), "b": positive(*second)}) == set()


@_QUICK
@given(broadcast(), _SIDE, _SIDE, _SIDE, st.sampled_from(["both", "first", "second"]))
def test_matrix_products(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    rows: int,
    inner: int,
    columns: int,
    matrix: str,
) -> None:
    first, second = (*shapes[0], rows, inner), (*shapes[1], inner, columns)
    if matrix == "first":  # the second is a vector
        second = (inner,)
    elif matrix == "second":
        first = (inner,)
    assert uncovered("MatMul", {"a": normal(*first), "b": normal(*second)}) == set()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1])
def test_gemm_turns_its_operands(first: int, second: int) -> None:
    a = normal(*((3, 2) if first else (2, 3)))
    b = normal(*((4, 3) if second else (3, 4)))
    how = {"transA": first, "transB": second, "alpha": 0.5, "beta": 2.0}
    assert uncovered("Gemm", {"a": a, "b": b, "c": normal(4)}, **how) == set()


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """The attributes of a convolution of an image of 7 by 8 places."""
    pair = st.lists(st.integers(1, 2), min_size=2, max_size=2)
    kernel = draw(st.lists(st.integers(1, 3), min_size=2, max_size=2))
    how: dict[str, Any] = {"kernel_shape": kernel, "strides": draw(pair)}
    automatic = draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if automatic == "NOTSET":
        how["pads"] = [draw(st.integers(0, k - 1)) for k in (*kernel, *kernel)]
        how["dilations"] = draw(pair)
    else:
        how["auto_pad"] = automatic  # ONNX Runtime refuses a stride beyond the kernel here
        how["strides"] = [min(k, s) for k, s in zip(kernel, how["strides"], strict=True)]
    return how


@_QUICK
@given(windows(), st.sampled_from([(1, 3, 4), (2, 4, 6), (4, 4, 4), (4, 4, 8)]))
def test_convolutions(how: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    group, inside, outside = sizes
    weight = normal(outside, inside // group, *how["kernel_shape"])
    inputs = {"x": normal(2, inside, 7, 8), "w": weight, "b": normal(outside)}
    # ONNX's evaluator fails at some groups. A difference quotient of a linear map has no error.
    options = {"step": 0.5, "precise": False}
    assert uncovered("Conv", inputs, options, "w b", group=group, **how) == set()


@_QUICK
@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 1),
    st.integers(1, 2),
    st.sampled_from([(1, 3, 2), (2, 4, 2), (4, 4, 1)]),
)
def test_transposed_convolutions(
    kernel: int, stride: int, pad: int, dilation: int, sizes: tuple[int, int, int]
) -> None:
    group, inside, outside = sizes
    pad = min(pad, kernel - 1)
    inputs = {"x": normal(1, inside, 4, 5), "w": normal(inside, outside, kernel, kernel)}
    how = {"strides": [stride] * 2, "pads": [pad] * 4, "dilations": [dilation] * 2, "group": group}
    how["output_padding"] = [stride - 1] * 2
    options = {"step": 0.5, "precise": False}
    assert uncovered("ConvTranspose", inputs, options, "w", **how) == set()


@_QUICK
@given(windows(), st.sampled_from(["MaxPool", "AveragePool"]), st.booleans(), st.booleans())
def test_pools(how: dict[str, Any], op: str, rounded_up: bool, counted: bool) -> None:
    more = {"count_include_pad": int(counted)} if op == "AveragePool" else {}
    opset = 19 if op == "AveragePool" and "dilations" in how else 13
    if "auto_pad" not in how:
        more["ceil_mode"] = int(rounded_up)
    options = {"step": 1e-3, "precise": False}
    assert uncovered(op, {"x": apart(1, 2, 7, 8)}, options, opset=opset, **how, **more) == set()


REDUCTIONS = (
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"),
    *("ReduceSumSquare", "ReduceLogSumExp", "ReduceLogSum", "ReduceProd"),
)


@pytest.mark.parametrize("op", REDUCTIONS)
@_QUICK
@given(st.lists(st.sampled_from([0, 1, -1]), unique=True, max_size=3), st.booleans(), st.booleans())
def test_reductions(op: str, axes: list[int], kept: bool, newer: bool) -> None:
    inputs: dict[str, NDArray[Any]] = {"x": apart(2, 3, 4)}
    how: dict[str, Any] = {"keepdims": int(kept), "opset": 18 if newer else 13}
    if axes and (newer or op == "ReduceSum"):
        inputs["axes"] = ints(*axes)
    elif axes:
        how["axes"] = axes
    assert uncovered(op, inputs, {"step": 1e-3, "precise": False}, **how) == set()


@_QUICK
@given(
    st.sampled_from(["nearest", "linear"]),
    st.sampled_from(["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"]),
    st.sampled_from(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]),
    st.lists(st.sampled_from([0.6, 1.0, 1.7, 2.0]), min_size=2, max_size=2),
    st.booleans(),
)
def test_images_of_another_size(
    mode: str, placed: str, rounding: str, scales: list[float], by_size: bool
) -> None:
    inputs: dict[str, NDArray[Any]] = {"x": normal(1, 2, 5, 6), "roi": BLANK}
    if by_size:
        sizes = [max(1, int(side * scale)) for side, scale in zip((5, 6), scales, strict=True)]
        inputs |= {"none": BLANK, "sizes": ints(1, 2, *sizes)}
    else:
        inputs["scales"] = np.asarray([1.0, 1.0, *scales], np.float32)
    how = {"mode": mode, "coordinate_transformation_mode": placed}
    if mode == "nearest":
        how["nearest_mode"] = rounding
    options = {"step": 0.5, "precise": False}
    assert uncovered("Resize", inputs, options, "scales", **how) == set()


@_QUICK
@given(
    st.integers(-7, 7),
    st.integers(-7, 7),
    st.sampled_from([1, 2, -1, -2]),
    st.sampled_from([0, -1]),
)
def test_slices(start: int, end: int, step: int, axis: int) -> None:
    inputs = {"x": normal(5, 5), "s": ints(start), "e": ints(end), "a": ints(axis), "t": ints(step)}
    if np.zeros(5)[slice(start, None if step < 0 and end < -5 else end, step)].size:
        assert uncovered("Slice", inputs) == set()


def test_every_rule_is_tested() -> None:
    tested = {op for op, _, _ in FORMS} | {*FUNCTIONS, *REDUCTIONS, "Log", "Sqrt", "Reciprocal"}
    tested |= {"Add", "Sub", "Mul", "Div", "Max", "Min", "MatMul", "Gemm", "ConvTranspose"}
    tested |= {"AveragePool", "Resize", "Slice"}
    assert RULES_OF_ALL.keys() == tested
