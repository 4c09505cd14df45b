"""A small model of every operator: optional outputs, and attributes that change a type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.fuzz.net import Arrays, with_shapes

F, H, D, L, I32, U8, I8 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.UINT8,
    TensorProto.INT8,
)


@dataclass(frozen=True)
class Given:
    """An operand: ``values``, computed by a layer of its own or ``stored`` as a constant."""

    values: NDArray[Any]
    stored: bool = False


@dataclass(frozen=True)
class Entry:
    """One use of an operator, for opsets ``since`` to ``until``."""

    op: str
    operands: tuple[Given | None, ...]
    outputs: int = 1
    since: int = 13
    until: int = 23
    attributes: dict[str, Any] = field(default_factory=dict)


def _values(shape: tuple[int, ...], low: float, high: float) -> NDArray[np.float32]:
    random = np.random.default_rng([len(shape), *shape])
    return random.uniform(low, high, shape).astype(np.float32)


def _f(*shape: int, low: float = -2.0, high: float = 2.0) -> Given:
    """Computed floats."""
    return Given(_values(shape, low, high))


def _w(*shape: int, low: float = -1.0, high: float = 1.0) -> Given:
    """Stored floats."""
    return Given(_values(shape, low, high), stored=True)


def _c(*values: Any, kind: Any = np.int64) -> Given:
    """A stored constant of one dimension."""
    return Given(np.asarray(values, kind), stored=True)


def _s(value: Any, kind: Any = np.int64) -> Given:
    """A stored scalar."""
    return Given(np.asarray(value, kind), stored=True)


def _e(op: str, *operands: Given | None, outputs: int = 1, **attributes: Any) -> Entry:
    since, until = attributes.pop("since", 13), attributes.pop("until", 23)
    return Entry(op, operands, outputs, since, until, attributes)


_SQUARE, _IMAGE = _f(3, 4), _f(1, 4, 6, 6)
_UNIT = _f(3, 4, low=-0.9, high=0.9)
_ABOVE = _f(3, 4, low=1.1, high=4.0)
_INTS = Given(np.arange(12, dtype=np.int64).reshape(3, 4), stored=True)
_BOOLS = Given(np.asarray([[True, False, True, False]] * 3), stored=True)


def _unary() -> Iterator[Entry]:
    for op in (
        *("Abs", "Neg", "Ceil", "Floor", "Round", "Sign", "Relu", "Sigmoid", "Tanh", "Erf", "Exp"),
        *("Sin", "Cos", "Tan", "Sinh", "Cosh", "Atan", "Asinh", "Softplus", "Softsign", "Identity"),
    ):
        yield _e(op, _SQUARE)
    for op in ("Acos", "Asin", "Atanh"):
        yield _e(op, _UNIT)
    for op in ("Acosh", "Log", "Sqrt", "Reciprocal"):
        yield _e(op, _ABOVE)
    yield _e("LeakyRelu", _SQUARE, alpha=0.3)
    yield _e("Elu", _SQUARE, alpha=1.5)
    yield _e("Celu", _SQUARE, alpha=1.5)
    yield _e("Selu", _SQUARE)
    yield _e("HardSigmoid", _SQUARE, alpha=0.25)
    yield _e("HardSwish", _SQUARE, since=14)
    yield _e("Mish", _SQUARE, since=18)
    yield _e("ThresholdedRelu", _SQUARE, alpha=0.7)
    yield _e("Shrink", _SQUARE, lambd=0.5, bias=0.25)
    for approximate in ("none", "tanh"):
        yield _e("Gelu", _SQUARE, since=20, approximate=approximate)
    for op in ("Softmax", "LogSoftmax", "Hardmax"):
        yield _e(op, _SQUARE, axis=-1)
        yield _e(op, _f(2, 3, 4), axis=1)
    yield _e("LpNormalization", _SQUARE, p=2, axis=-1)
    yield _e("LRN", _IMAGE, size=3)
    yield _e("MeanVarianceNormalization", _IMAGE)
    yield _e("Dropout", _SQUARE)
    yield _e("Dropout", _SQUARE, outputs=2)
    yield _e("Det", _f(2, 3, 3))
    for upper in (0, 1):
        yield _e("Trilu", _f(4, 4), since=14, upper=upper)


def _binary() -> Iterator[Entry]:
    for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum"):
        yield _e(op, _SQUARE, _w(4, low=0.5, high=1.5))
        yield _e(op, _SQUARE, _ABOVE)
    for op in ("Max", "Min", "Mean", "Sum"):
        yield _e(op, _SQUARE, _UNIT, _ABOVE)
        yield _e(op, _SQUARE)
    yield _e("Pow", _ABOVE, _s(2.0, np.float32))
    yield _e("Pow", _ABOVE, _s(2, np.int64))
    yield _e("Pow", _ABOVE, _UNIT)
    yield _e("Mod", _SQUARE, _ABOVE, fmod=1)
    yield _e("PRelu", _SQUARE, _w(4))
    for op in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"):
        yield _e(op, _SQUARE, _UNIT, since=16)
    for op in ("IsNaN", "IsInf"):
        yield _e(op, _SQUARE)
    yield _e("Where", _BOOLS, _SQUARE, _w(4))
    yield _e("Clip", _SQUARE, _s(-1.0, np.float32), _s(1.0, np.float32))
    yield _e("Clip", _SQUARE, None, _s(1.0, np.float32))
    yield _e("Clip", _SQUARE, _s(-1.0, np.float32))
    for kind in (F, H, D, L, I32, U8, TensorProto.BOOL):
        yield _e("Cast", _ABOVE, to=kind)
    yield _e("Cast", _INTS, to=F)
    yield _e("CastLike", _INTS, _SQUARE, since=15)
    yield _e("CastLike", _ABOVE, _INTS, since=15)


def _matrices() -> Iterator[Entry]:
    yield _e("MatMul", _f(2, 3, 4), _w(4, 5))
    yield _e("MatMul", _f(2, 3, 4), _f(2, 4, 3))
    yield _e("Gemm", _SQUARE, _w(4, 5), _w(5))
    yield _e("Gemm", _SQUARE, _w(5, 4), transB=1, alpha=0.5)
    yield _e("Gemm", _f(4, 3), _w(4, 5), _w(5), transA=1, beta=0.25)
    yield _e("Einsum", _SQUARE, _w(4, 5), equation="ij,jk->ik")
    yield _e("Einsum", _f(2, 3, 4), _f(2, 5, 4), equation="bij,bkj->bik")
    yield _e("Conv", _IMAGE, _w(6, 4, 3, 3), _w(6), pads=[1] * 4)
    yield _e("Conv", _IMAGE, _w(4, 1, 3, 3), group=4, strides=[2, 2])
    yield _e("Conv", _f(1, 4, 9), _w(6, 4, 3), dilations=[2])
    yield _e("ConvTranspose", _IMAGE, _w(4, 3, 2, 2), strides=[2, 2])
    yield _e("ConvTranspose", _IMAGE, _w(4, 2, 3, 3), _w(4), group=2)
    yield _e("DeformConv", _IMAGE, _w(6, 4, 2, 2), _f(1, 8, 5, 5), since=19)
    for outputs, extra in ((1, {}), (2, {}), (3, {"axis": 1})):
        yield _e("LayerNormalization", _f(2, 3, 4), _w(*((3, 4) if extra else (4,))),
                 outputs=outputs, since=17, **extra)  # fmt: skip
    yield _e("RMSNormalization", _f(2, 3, 4), _w(4), since=23)
    yield _e("BatchNormalization", _IMAGE, _w(4), _w(4), _w(4), _w(4, low=0.5, high=2.0))
    yield _e("InstanceNormalization", _IMAGE, _w(4), _w(4))
    yield _e("GroupNormalization", _IMAGE, _w(4), _w(4), since=21, num_groups=2)
    for op, gates, outputs in (("LSTM", 4, 3), ("GRU", 3, 2), ("RNN", 1, 2)):
        sequence = _f(4, 2, 5)
        for count in range(1, outputs + 1):
            weights = _w(1, gates * 3, 5), _w(1, gates * 3, 3), _w(1, gates * 6)
            yield _e(op, sequence, *weights, outputs=count, hidden_size=3)
        both = _w(2, gates * 3, 5), _w(2, gates * 3, 3)
        yield _e(op, sequence, *both, outputs=2, hidden_size=3, direction="bidirectional")
        start = (None, None, _f(1, 2, 3), *([_f(1, 2, 3)] if op == "LSTM" else []))
        yield _e(op, sequence, _w(1, gates * 3, 5), _w(1, gates * 3, 3), *start, hidden_size=3)
    yield _e("GRU", _f(4, 2, 5), _w(1, 9, 5), _w(1, 9, 3), hidden_size=3, linear_before_reset=1)
    heads = _f(1, 2, 3, 4)
    yield _e("Attention", heads, heads, heads, since=23)
    yield _e("Attention", heads, heads, heads, since=23, is_causal=1)
    yield _e("Attention", heads, heads, heads, _w(3, 3), since=23)


def _reductions() -> Iterator[Entry]:
    kinds = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
    for kind in kinds:
        x = _f(2, 3, 4, low=0.2, high=2.0)
        yield _e(f"Reduce{kind}", x, keepdims=0)
        if kind == "Sum":
            yield _e("ReduceSum", x, _c(1))
            continue
        yield _e(f"Reduce{kind}", x, axes=[1], until=17)
        yield _e(f"Reduce{kind}", x, _c(-1), since=18, keepdims=0)
    for op in ("ArgMax", "ArgMin"):
        yield _e(op, _SQUARE, axis=1)
        yield _e(op, _SQUARE, axis=0, keepdims=0, select_last_index=1)
    yield _e("CumSum", _SQUARE, _s(1), exclusive=1, reverse=1)
    yield _e("TopK", _SQUARE, _c(2), outputs=2)
    yield _e("TopK", _SQUARE, _c(2), outputs=2, largest=0, axis=0)
    for op in ("MaxPool", "AveragePool", "LpPool"):
        yield _e(op, _IMAGE, kernel_shape=[2, 2], strides=[2, 2])
        yield _e(op, _IMAGE, kernel_shape=[3, 3], pads=[1] * 4)
    yield _e("AveragePool", _IMAGE, kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1)
    yield _e("MaxPool", _IMAGE, kernel_shape=[2, 2], outputs=2)
    for op in ("GlobalAveragePool", "GlobalMaxPool"):
        yield _e(op, _IMAGE)
    yield _e("GlobalLpPool", _IMAGE, until=21)


def _moves() -> Iterator[Entry]:
    yield _e("Concat", _SQUARE, _UNIT, axis=1)
    yield _e("Split", _SQUARE, _c(1, 3), outputs=2, axis=1)
    yield _e("Split", _SQUARE, outputs=2, axis=1, since=18, num_outputs=2)
    yield _e("Slice", _SQUARE, _c(0), _c(3), _c(1), _c(2))
    yield _e("Gather", _SQUARE, _c(2, 0), axis=1)
    yield _e("Gather", _w(5, 4), _c(2, 0))
    yield _e("GatherElements", _SQUARE, _c([0, 1], [1, 0], [2, 2]), axis=1)
    yield _e("GatherND", _SQUARE, _c([0, 1], [2, 3]))
    yield _e("ScatterElements", _SQUARE, _c([0, 1, 2, 0]), _f(1, 4))
    yield _e("ScatterElements", _SQUARE, _c([0, 1, 2, 0]), _f(1, 4), since=18, reduction="add")
    yield _e("ScatterND", _SQUARE, _c([0], [2]), _f(2, 4))
    yield _e("Reshape", _SQUARE, _c(2, 6))
    yield _e("Flatten", _f(2, 3, 4), axis=1)
    yield _e("Squeeze", _f(2, 1, 4), _c(1))
    yield _e("Unsqueeze", _SQUARE, _c(0, 2))
    yield _e("Transpose", _f(2, 3, 4), perm=[2, 0, 1])
    yield _e("Expand", _f(1, 4), _c(3, 4))
    yield _e("Tile", _SQUARE, _c(2, 1))
    yield _e("Pad", _SQUARE, _c(1, 0, 0, 2))
    yield _e("Pad", _SQUARE, _c(1, 0, 0, 2), _s(0.3, np.float32))
    for mode in ("reflect", "edge"):
        yield _e("Pad", _SQUARE, _c(1, 0, 0, 2), mode=mode)
    yield _e("DepthToSpace", _IMAGE, blocksize=2)
    yield _e("SpaceToDepth", _IMAGE, blocksize=2)
    yield _e("ReverseSequence", _f(4, 2, 3), _c(4, 2))
    yield _e("Compress", _SQUARE, _c(True, False, True, kind=np.bool_), axis=0)
    yield _e("CenterCropPad", _SQUARE, _c(2, 6), since=18)
    yield _e("OneHot", _c(0, 2), _s(3), _c(0.25, 0.75, kind=np.float32))
    yield _e("EyeLike", _SQUARE)
    yield _e("EyeLike", _SQUARE, dtype=D)
    yield _e("Shape", _SQUARE)
    yield _e("Size", _SQUARE)
    yield _e("NonZero", _SQUARE)
    yield _e("Unique", _c(2.0, 1.0, 2.0, kind=np.float32), outputs=4)
    yield _e("ConstantOfShape", _c(2, 3))
    yield _e("Range", _s(0.0, np.float32), _s(2.0, np.float32), _s(0.5, np.float32))
    scales = _c(1, 1, 2, 2, kind=np.float32)
    for mode in ("nearest", "linear", "cubic"):
        yield _e("Resize", _IMAGE, None, scales, mode=mode)
    yield _e("Resize", _IMAGE, None, None, _c(1, 4, 9, 9), mode="linear")
    boxes = Given(np.asarray([[0, 0, 4, 4], [1, 1, 5, 3]], np.float32), stored=True)
    yield _e(
        "RoiAlign", _IMAGE, boxes, _c(0, 0), since=16, until=21, output_height=2, output_width=2
    )
    yield _e("GridSample", _IMAGE, _f(1, 3, 3, 2, low=-0.9, high=0.9), since=20, mode="linear")
    scale, zero = _s(0.05, np.float32), _s(3, np.uint8)
    yield _e("QuantizeLinear", _SQUARE, scale, zero)
    yield _e("DequantizeLinear", Given(np.arange(12, dtype=np.uint8), stored=True), scale, zero)
    yield _e("DynamicQuantizeLinear", _SQUARE, outputs=3)


ZOO = tuple(entry for part in (_unary, _binary, _matrices, _reductions, _moves) for entry in part())
"""Every entry, in order."""


def opsets(entry: Entry) -> list[int]:
    """The oldest and the newest opset of an entry."""
    return sorted({entry.since, entry.until})


def model_of(entry: Entry, opset: int) -> tuple[onnx.ModelProto, Arrays]:
    """A model in which layers compute the operands of ``entry`` and read its floats."""
    nodes, stored, inputs, feed, names = [], [], [], {}, []
    for number, operand in enumerate(entry.operands):
        if operand is None:
            names.append("")
            continue
        name = f"given{number}"
        if operand.stored:
            stored.append(numpy_helper.from_array(operand.values, name))
        else:
            feed[f"x{number}"] = operand.values
            inputs.append(helper.make_tensor_value_info(f"x{number}", F, operand.values.shape))
            nodes.append(helper.make_node("Mul", [f"x{number}", "one"], [name], f"make{number}"))
        names.append(name)
    results = [f"y{number}" for number in range(entry.outputs)]
    nodes.append(helper.make_node(entry.op, names, results, "judged", **entry.attributes))
    used = {t for t in names if t}
    if inputs:
        stored.append(numpy_helper.from_array(np.float32(0.99), "one"))
    else:  # something must be fed
        inputs.append(helper.make_tensor_value_info("x", F, [2]))
        feed["x"] = np.ones(2, np.float32)
        nodes.append(helper.make_node("Neg", ["x"], ["unused"], "other"))
        results.append("unused")
    graph = helper.make_graph(
        nodes, "zoo", inputs, [], [t for t in stored if t.name in used | {"one"}]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model)
    kinds = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    for name in results:
        graph_output = helper.make_tensor_value_info(name, kinds.get(name) or F, None)
        model.graph.output.append(graph_output)
    return with_shapes(model), feed
