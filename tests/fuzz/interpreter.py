"""An interpreter of typed models that shares nothing with the product.

It takes each node's types from the arrays that it reads and the operator's schema, computes in
float64 by ONNX's reference evaluator, and rounds by NumPy and ml_dtypes. With each result comes a
bound on what FP32 arithmetic in any order may give instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper

from tests.fuzz.bounds import UNIT, bounds
from tests.fuzz.operators import FLOATS, Array, array_of, evaluated

Types = tuple[np.dtype[Any] | None, ...]

MOVING = frozenset(
    re.findall(
        r"\w+",
        """
    Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Reshape Slice
    SpaceToDepth Split Squeeze Tile Transpose Unsqueeze Pad Where Compress ReverseSequence
    Trilu ScatterElements ScatterND CenterCropPad Cast CastLike Dropout OneHot EyeLike Constant
    ConstantOfShape Shape Size NonZero TopK Unique Col2Im MaxUnpool
    """,
    )
)
EXACT = MOVING | frozenset(
    re.findall(
        r"\w+",
        """
    Add Sub Mul Div Sqrt Neg Abs Relu Max Min Clip Floor Ceil Round Sign Mod Equal Less Greater
    LessOrEqual GreaterOrEqual And Or Xor Not IsNaN IsInf MaxPool GlobalMaxPool ReduceMax
    ReduceMin ArgMax ArgMin Hardmax Reciprocal ThresholdedRelu LeakyRelu PRelu Shrink
    """,
    )
)
"""Operators whose FP32 result IEEE 754 fixes, or that compute nothing."""

SUMS = frozenset(
    {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "ReduceSum", "ReduceMean"}
    | {"ReduceSumSquare", "ReduceL1", "GlobalAveragePool", "AveragePool", "CumSum", "Sum", "Mean"}
)
"""Operators that are linear in each operand: a sum of products of operands."""

ABSOLUTE_ERROR = 4e-8
"""What ONNX Runtime's kernels may be off by near zero."""

SATURATING_ERROR = 2e-7
"""The same of operators that hold a sigmoid, a tanh, or an exponential less one."""

SATURATING = frozenset(
    {"Sigmoid", "Tanh", "Erf", "Gelu", "Mish", "Swish", "Softplus", "LSTM", "GRU", "RNN"}
    | {"Elu", "Selu", "Celu"}
)

RECURRENT = frozenset({"LSTM", "GRU"})
"""Operators whose kernels give finite numbers for NaN."""

OPEN_FOR_NAN = frozenset(
    {"ArgMax", "ArgMin", "TopK", "QuantizeLinear", "Cast", "NonMaxSuppression"}
)
"""Operators whose integers ONNX leaves open where they read a NaN."""


@dataclass(frozen=True)
class Result:
    """The exact ``values`` of an output in float64, its ``dtype``, and FP32's possible ``error``.

    ``error`` is None where the values are no floats. ``is_open`` says that a NaN was made an
    integer, which ONNX leaves to the kernel. ``is_composed`` says that a kernel may reach a number
    that is not finite on another way, as another one: infinity times a weight of zero.
    ``may_be_nan`` says that an emulated value may be NaN where one alone of the operands was.
    """

    values: Array
    dtype: np.dtype[Any]
    error: Array | None = None
    is_open: bool = False
    is_composed: bool = False
    may_be_nan: bool = False

    def stored(self) -> Array:
        """The values in their type."""
        return to_type(self.values, self.dtype)

    def disagreement(self, found: Array) -> str:
        """Says where ``found`` is none of the possible values; empty if it is."""
        if found.shape != self.values.shape:
            return f"shape {found.shape} instead of {self.values.shape}"
        if self.is_open:
            return ""
        if self.error is None:
            wrong = found != self.values
            return "" if not wrong.any() else f"{int(wrong.sum())} other values"
        error = np.where(np.isfinite(self.error), self.error, 0.0)
        with np.errstate(all="ignore"):
            low = to_type(self.values - error, self.dtype).astype(np.float64)
            high = to_type(self.values + error, self.dtype).astype(np.float64)
        got = found.astype(np.float64)
        lost = np.isnan(self.values)
        wrong = np.where(lost, ~np.isnan(got), ~((low <= got) & (got <= high)))
        if self.may_be_nan:
            wrong &= ~np.isnan(got)
        if self.is_composed:
            wrong &= np.isfinite(low) | np.isfinite(got)
        if not wrong.any():
            return ""
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        return (
            f"{int(wrong.sum())} of {got.size}, at {at} {got[at]!r} instead of {low[at]!r} to "
            f"{high[at]!r}"
        )


def to_type(values: Array, dtype: np.dtype[Any]) -> Array:
    """``values`` rounded to FP32 and then to ``dtype``, as tensor cores give them back."""
    if dtype not in FLOATS:
        return values.astype(dtype)
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(np.float32).astype(dtype)


def _unwatched(name: str, node: onnx.NodeProto, found: Result) -> None:
    """Goes on with the interpreter's own value."""


@dataclass
class Interpreter:
    """Runs a typed model node by node.

    ``watch`` sees each result of the main graph by name, and says the value to go on with: None
    for the interpreter's own.
    """

    model: onnx.ModelProto
    watch: Callable[[str, onnx.NodeProto, Result], Array | None] = _unwatched
    values: dict[str, Array] = field(default_factory=dict)
    _quantised_nan: dict[str, Array] = field(default_factory=dict)

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of the model by name."""
        graph = self.model.graph
        self.values = self._constants(graph)
        for value in graph.input:
            if value.name in feed:
                kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
                given = np.asarray(feed[value.name])
                assert given.dtype == kind, f"input {value.name} is declared as {kind}"
                self.values[value.name] = given
        is_watched = self.watch is not _unwatched
        for node in graph.node:
            for name, found in self._results(node, self.values, is_bounded=is_watched):
                chosen = self.watch(name, node, found)
                self.values[name] = found.stored() if chosen is None else chosen
        outputs = {}
        for value in graph.output:
            found = self.values[value.name]
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            assert found.dtype == kind, f"output {value.name} is {found.dtype}, declared as {kind}"
            outputs[value.name] = found
        return outputs

    @staticmethod
    def _constants(graph: onnx.GraphProto) -> dict[str, Array]:
        return {t.name: array_of(t) for t in graph.initializer}

    @property
    def _opset(self) -> int:
        return next(o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx"))

    def _results(
        self, node: onnx.NodeProto, scope: Mapping[str, Array], *, is_bounded: bool = False
    ) -> list[tuple[str, Result]]:
        inputs = [scope[n] if n else None for n in node.input]
        if node.op_type in ("If", "Loop", "Scan"):
            arrays = self._control_flow(node, inputs, scope)
            # Roundings inside may fall to either side; none of them is watched.
            found = [_of_body(a) for a in arrays]
        else:
            found = results_of(node, inputs, self._opset, is_bounded=is_bounded)
        # What integer a NaN becomes is the kernel's matter: it is lost, and NaN where it is read.
        if node.op_type == "QuantizeLinear" and inputs[0] is not None:
            self._quantised_nan[node.output[0]] = np.isnan(inputs[0])
        if node.op_type == "DequantizeLinear" and node.input[0] in self._quantised_nan:
            is_nan = self._quantised_nan[node.input[0]]
            found = [replace(r, values=np.where(is_nan, np.nan, r.values)) for r in found]
        return [(n, r) for n, r in zip(node.output, found, strict=False) if n]

    def _body(
        self, graph: onnx.GraphProto, inputs: Sequence[Array], scope: Mapping[str, Array]
    ) -> list[Array]:
        inner = {**scope, **self._constants(graph)}
        for value, array in zip(graph.input, inputs, strict=True):
            kind = value.type.tensor_type.elem_type
            wanted = helper.tensor_dtype_to_np_dtype(kind) if kind else array.dtype
            assert array.dtype == wanted, f"body takes {value.name} as {wanted}, not {array.dtype}"
            inner[value.name] = array
        for node in graph.node:
            inner |= {name: found.stored() for name, found in self._results(node, inner)}
        for value in graph.output:
            kind = value.type.tensor_type.elem_type
            found = inner[value.name].dtype
            assert not kind or found == helper.tensor_dtype_to_np_dtype(kind), (
                f"body gives {value.name} as {found}"
            )
        return [inner[o.name] for o in graph.output]

    def _control_flow(
        self, node: onnx.NodeProto, inputs: Sequence[Array | None], scope: Mapping[str, Array]
    ) -> list[Array]:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "If":
            assert inputs[0] is not None
            taken = "then_branch" if bool(inputs[0].reshape(())) else "else_branch"
            return self._body(attributes[taken], [], scope)
        given = [a for a in inputs if a is not None]
        if node.op_type == "Loop":
            return self._loop(node, attributes["body"], inputs, scope)
        return self._scan(attributes, given, scope)

    def _loop(
        self,
        node: onnx.NodeProto,
        body: onnx.GraphProto,
        inputs: Sequence[Array | None],
        scope: Mapping[str, Array],
    ) -> list[Array]:
        turns = int(inputs[0].reshape(())) if inputs[0] is not None else 1 << 30
        go = True if inputs[1] is None else bool(inputs[1].reshape(()))
        carried = [a for a in inputs[2:] if a is not None]
        rows: list[list[Array]] = [[] for _ in range(len(node.output) - len(carried))]
        number = 0
        while number < turns and go:
            state = [np.asarray(number, np.int64), np.asarray(go), *carried]
            still, *given = self._body(body, state, scope)
            go, carried = bool(still.reshape(())), given[: len(carried)]
            for row, array in zip(rows, given[len(carried) :], strict=True):
                row.append(array)
            number += 1
        return [*carried, *(np.stack(row) for row in rows)]

    def _scan(
        self, attributes: Mapping[str, Any], inputs: Sequence[Array], scope: Mapping[str, Array]
    ) -> list[Array]:
        count = attributes["num_scan_inputs"]
        state, scanned = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
        axes = attributes.get("scan_input_axes", [0] * count)
        back = attributes.get("scan_input_directions", [0] * count)
        rows: list[list[Array]] = []
        for step in range(scanned[0].shape[axes[0]]):
            now = [
                np.take(a, a.shape[x] - 1 - step if r else step, axis=x)
                for a, x, r in zip(scanned, axes, back, strict=True)
            ]
            given = self._body(attributes["body"], [*state, *now], scope)
            state = given[: len(state)]
            rows = rows or [[] for _ in given[len(state) :]]
            for row, array in zip(rows, given[len(state) :], strict=True):
                row.append(array)
        out_axes = attributes.get("scan_output_axes", [0] * len(rows))
        out_back = attributes.get("scan_output_directions", [0] * len(rows))
        stacked = [
            np.stack(row[::-1] if r else row, axis=x)
            for row, x, r in zip(rows, out_axes, out_back, strict=True)
        ]
        return [*state, *stacked]


def _of_body(array: Array) -> Result:
    """A result of a body: a few roundings of the largest value either way."""
    if array.dtype not in FLOATS:
        return Result(array, array.dtype)
    wide = array.astype(np.float64)
    finite = np.abs(wide[np.isfinite(wide)])
    largest = float(finite.max()) if finite.size else 0.0
    step = {2: 2.0**-10 if array.dtype == np.float16 else 2.0**-7}.get(array.dtype.itemsize, 1e-6)
    return Result(wide, array.dtype, np.full(wide.shape, 8 * step * largest))


def results_of(
    node: onnx.NodeProto, inputs: Sequence[Array | None], opset: int, *, is_bounded: bool
) -> list[Result]:
    """The results of one node without bodies, of arrays in their declared types.

    Their errors are zero unless ``is_bounded``: finding them takes most of the time.
    """
    types = _output_types(node, tuple(None if a is None else a.dtype for a in inputs), opset)
    wide = [a.astype(np.float64) if a is not None and a.dtype in FLOATS else a for a in inputs]
    with np.errstate(all="ignore"):
        outputs = evaluated(node, wide, opset)
        none = [np.zeros(()) for _ in outputs]
        errors = _errors(node, wide, outputs, opset) if is_bounded else none
    # Comparisons of a NaN are defined; what ranks or quantises it is not.
    lost = node.op_type in OPEN_FOR_NAN and any(
        bool(np.isnan(a).any()) for a in wide if a is not None and a.dtype == np.float64
    )
    found = []
    for values, dtype, error in zip(outputs, types, errors, strict=False):
        is_float = dtype in FLOATS
        kept = np.asarray(values).astype(np.float64) if is_float else np.asarray(values)
        bound = np.broadcast_to(error, kept.shape) if is_float else None
        # One NaN makes all of a recurrent layer NaN where it is emulated: its kernel hides them.
        # An interpolation may multiply a neighbour by a weight of zero, or leave it out.
        hidden = _spreads(node) and any(
            not np.isfinite(a).all() for a in wide if a is not None and a.dtype == np.float64
        )
        is_place = node.op_type == "MaxPool" and not is_float
        is_open = is_place or (lost and (not is_float or node.op_type == "TopK"))
        is_composed = node.op_type not in EXACT | SUMS
        found.append(Result(kept, dtype, bound, is_open, is_composed, hidden))
    return found


def _spreads(node: onnx.NodeProto) -> bool:
    """Whether one place of an operand that is not finite may make another one NaN."""
    is_linear = any(a.name == "mode" and a.s in (b"linear", b"cubic") for a in node.attribute)
    return node.op_type in RECURRENT or (node.op_type == "Resize" and is_linear)


def _output_types(node: onnx.NodeProto, inputs: Types, opset: int) -> list[np.dtype[Any]]:
    """The types of a node's outputs by its schema, its attributes and what it reads."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type in ("Constant", "ConstantOfShape"):
        tensor = attributes.get("value")
        return [np.dtype(np.float32) if tensor is None else array_of(tensor).dtype]
    schema = defs.get_schema(node.op_type, opset, "")
    bound: dict[str, np.dtype[Any]] = {}
    for slot, dtype in enumerate(inputs):
        formal = schema.inputs[min(slot, len(schema.inputs) - 1)]
        if dtype is None:
            continue
        before = bound.setdefault(formal.type_str, dtype)
        mixes = formal.type_str != "V" and not formal.type_str.startswith("tensor(")
        variadic = not formal.is_homogeneous
        assert variadic or not mixes or before == dtype, (
            f"{node.op_type} {node.name} reads {before} and {dtype} as {formal.type_str}"
        )
        allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        word = f"tensor({_word(dtype)})"
        assert word in allowed.get(formal.type_str, [formal.type_str]), (
            f"{node.op_type} {node.name} takes no {word} in opset {opset}"
        )
    for named in ("to", "dtype", "output_dtype", "output_datatype", "stash_type"):
        if attributes.get(named):
            wanted = helper.tensor_dtype_to_np_dtype(attributes[named])
            for formal in schema.outputs:
                bound.setdefault(formal.type_str, wanted)
    found = []
    for slot in range(len(node.output)):
        kind = schema.outputs[min(slot, len(schema.outputs) - 1)].type_str
        if kind in bound:
            found.append(bound[kind])
        elif kind.startswith("tensor("):
            found.append(_dtype(kind))
        else:  # statistics of a LayerNormalization are FP32, quantised values uint8
            found.append(
                _dtype(
                    _usual(
                        next(
                            c for c in schema.type_constraints if c.type_param_str == kind
                        ).allowed_type_strs
                    )
                )
            )
    return found


def _usual(allowed: Sequence[str]) -> str:
    """The type that nothing else decides."""
    usual = ("tensor(float)", "tensor(uint8)")
    return allowed[0] if len(allowed) == 1 else next(t for t in usual if t in allowed)


def _word(dtype: np.dtype[Any]) -> str:
    """ONNX's word for an element type."""
    words = {"float32": "float", "float64": "double", "bool": "bool"}
    return words.get(dtype.name, dtype.name)


def _dtype(word: str) -> np.dtype[Any]:
    name = word.removeprefix("tensor(").removesuffix(")").upper()
    return helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(name))


def _errors(
    node: onnx.NodeProto, inputs: Sequence[Array | None], outputs: Sequence[Array], opset: int
) -> list[Array]:
    """What FP32 may be off by in each output."""
    op = node.op_type
    if op in EXACT:
        return [np.zeros(()) for _ in outputs]
    floats = [a is not None and a.dtype == np.float64 for a in inputs]
    if op in SUMS:
        sizes = [
            np.abs(a) if f and a is not None else a for a, f in zip(inputs, floats, strict=True)
        ]
        terms = _terms(op, inputs, outputs)
        return [(terms + 3) * UNIT * np.abs(a) for a in evaluated(node, sizes, opset)]
    # Composed functions: as much as roundings of the operands change, and a few of the result.
    found = [8 * UNIT * np.abs(o) if o.dtype == np.float64 else np.zeros(()) for o in outputs]
    random = np.random.default_rng(0)
    for _ in range(3):
        moved = [
            a * (1.0 + random.choice([-UNIT, UNIT], a.shape)) if f and a is not None else a
            for a, f in zip(inputs, floats, strict=True)
        ]
        again = evaluated(node, moved, opset)
        if [a.shape for a in again] != [o.shape for o in outputs]:
            break
        change = 16.0 * math.sqrt(max((a.size for a in inputs if a is not None), default=1)) / 4
        found = [
            np.maximum(e, change * np.abs(a - o)) if o.dtype == np.float64 else e
            for e, a, o in zip(found, again, outputs, strict=True)
        ]
    if op == "Resize":  # the places between are computed in FP32 too
        largest = max(float(np.abs(o[np.isfinite(o)]).max(initial=0.0)) for o in outputs)
        found = [e + 32 * UNIT * largest for e in found]
    least = SATURATING_ERROR if op in SATURATING else ABSOLUTE_ERROR
    own = bounds(node, inputs, outputs, opset)
    return [np.maximum(e, b) + least for e, b in zip(found, own, strict=True)]


def _terms(op: str, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> int:
    """How many products an element of a sum has, or more."""
    first, second = inputs[0], inputs[1] if len(inputs) > 1 else None
    assert first is not None
    if op in ("Conv", "ConvTranspose") and second is not None:
        return second.size // min(second.shape[:2])
    if op == "MatMul":
        return first.shape[-1]
    if op == "Gemm":
        return max(first.shape)
    return first.size
