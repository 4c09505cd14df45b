"""The ``emulated`` runner: reduced precision on any machine, without making a session for each probe.

It executes ``to_emulated``'s semantics node by node. Each node is a session of its own (see ``pieces``), made once; a
probe only chooses, for each layer, between the plain piece and the rounding one. Values are freed after their last use,
so that memory does not grow with the number of layers, and the same walk gives every layer's errors in one pass.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bisect_trt.errors import BadInputError, RunnerFailedError, one_line
from bisect_trt.graph.layers import Kind, Role, node_names, role_of
from bisect_trt.graph.lowering import is_standard
from bisect_trt.graph.opset import with_new_nodes_pinned, with_roundings
from bisect_trt.graph.types import infer_types, opset_of
from bisect_trt.numerics import rounded
from bisect_trt.precision import Precision, PrecisionPlan
from bisect_trt.runners.base import Sample
from bisect_trt.runners.pieces import Piece, PieceStore, captured_names

Value = Any  # ONNX Runtime's C OrtValue, which has no public type


@dataclass(frozen=True)
class LayerValues:
    """A layer's float output under three histories: exact, everything upstream lowered too, only this layer lowered."""

    layer: str
    tensor: str
    reference: NDArray[np.float32]
    accumulated: NDArray[np.float32]
    introduced: NDArray[np.float32]


@dataclass(frozen=True)
class _Step:
    index: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    roles: Mapping[Precision, Role]
    reduced_in: Mapping[Precision, frozenset[int]]
    reduced_out: Mapping[Precision, tuple[str, ...]]
    frees: tuple[str, ...]

    def lowers(self, precision: Precision) -> bool:
        """True if the node is a layer that runs differently at ``precision``."""
        return self.roles[precision].kind is Kind.LAYER


@dataclass
class _Chain:
    """The live tensors of one history: values, their rounded versions, and what is rounded already."""

    values: dict[str, Value]
    versions: dict[tuple[str, Precision], Value] = field(default_factory=dict)
    state: dict[str, Precision] = field(default_factory=dict)

    def free(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)
        if self.versions:
            gone = set(names)
            for key in [k for k in self.versions if k[0] in gone]:
                del self.versions[key]


class EmulatedRunner:
    """Executes ``model`` on ``samples`` with explicit roundings; ``base`` is the precision most probes will use."""

    name = "emulated"

    def __init__(self, model: onnx.ModelProto, samples: Sequence[Sample], base: Precision = Precision.FP16) -> None:
        self.versions: Mapping[str, str] = {"onnxruntime": ort.__version__, "onnx": onnx.__version__}
        self._source = model
        self._samples = list(samples)
        self._model = with_roundings(model, base)
        self._pieces = PieceStore(self._model)
        if self._model.graph.sparse_initializer:
            name = self._model.graph.sparse_initializer[0].values.name
            raise BadInputError(f"model: sparse initialiser {name!r} cannot be emulated; store it as a dense tensor")
        self._constants = {n: _ort_value(n, a) for n, a in _constants(self._model.graph).items()}
        self._ready: dict[tuple[int, Precision], Piece] = {}
        self._rounded_constants: dict[str, tuple[Precision, ort.OrtValue]] = {}
        self._outputs = tuple(o.name for o in self._model.graph.output)
        self._steps = self._compile()

    def outputs(self, plan: PrecisionPlan) -> Iterator[Mapping[str, NDArray[Any]]]:
        plan = with_new_nodes_pinned(self._source, self._model, plan)
        for sample in self._samples:
            chain = self._start(sample)
            self._advance(self._steps, plan, chain)
            yield {name: self._fetch(name, chain) for name in self._outputs}

    def trace(self, sample: Sample, plan: PrecisionPlan) -> Iterator[LayerValues]:
        """Each lowered layer's float outputs on ``sample`` in network order, against the exact ones.

        Both histories advance together and are freed together: two networks' live tensors are in memory, never all
        activations.
        """
        plan = with_new_nodes_pinned(self._source, self._model, plan)
        exact, low = self._start(sample), self._start(sample)
        for step in self._steps:
            precision = plan.precision_of(step.name)
            reference = self._execute(step, Precision.FP32, exact)
            accumulated = self._execute(step, precision, low)
            if step.lowers(precision):
                introduced = self._execute(step, precision, exact)
                rows = zip(step.outputs, reference, accumulated, introduced, strict=True)
                for tensor, *values in rows:
                    if values[0].data_type() == "tensor(float)":
                        yield LayerValues(step.name, tensor, *(v.numpy() for v in values))
            self._keep(step, Precision.FP32, reference, exact)
            self._keep(step, precision, accumulated, low)
            exact.free(step.frees)
            low.free(step.frees)

    def effects(
        self, sample: Sample, precision: Precision, wanted: Container[str]
    ) -> Iterator[tuple[str, Mapping[str, NDArray[Any]] | None]]:
        """The model's outputs on ``sample`` when only one layer is lowered, for each layer of ``wanted`` in network order.

        The exact history advances once; at each wanted layer a fork of it runs to the end. That costs half an inference
        a layer, and one more network's live tensors. None stands for outputs that could not be computed.
        """
        exact = self._start(sample)
        for position, step in enumerate(self._steps):
            if step.name in wanted and step.lowers(precision):
                fork = _Chain(dict(exact.values), dict(exact.versions), dict(exact.state))
                try:
                    self._advance([step], PrecisionPlan(precision), fork)
                    self._advance(self._steps[position + 1 :], PrecisionPlan(Precision.FP32), fork)
                except RunnerFailedError:
                    yield step.name, None
                else:
                    yield step.name, {name: self._fetch(name, fork) for name in self._outputs}
            self._advance([step], PrecisionPlan(Precision.FP32), exact)

    def _advance(self, steps: Sequence[_Step], plan: PrecisionPlan, chain: _Chain) -> None:
        for step in steps:
            precision = plan.precision_of(step.name)
            self._keep(step, precision, self._execute(step, precision, chain), chain)
            chain.free(step.frees)

    def _compile(self) -> list[_Step]:
        graph = self._model.graph
        scope, opset = infer_types(self._model), opset_of(self._model)
        last_use: dict[str, int] = {}
        parts = []
        for index, (node, name) in enumerate(zip(graph.node, node_names(graph.node), strict=True)):
            if node.output and node.output[0] in self._constants:
                continue
            slots = tuple(i for i, tensor in enumerate(node.input) if tensor)
            inputs = (*(node.input[i] for i in slots), *captured_names(node))
            outputs = tuple(o for o in node.output if o)
            for tensor in (*inputs, *outputs):
                last_use[tensor] = index
            parts.append((index, node, name, slots, inputs, outputs))
        kept = set(self._outputs)
        steps = []
        for index, node, name, slots, inputs, outputs in parts:
            frees = tuple(t for t in {*inputs, *outputs} if last_use[t] == index and t not in kept)
            roles = {p: role_of(node, name, scope, opset, p) for p in Precision}
            positions = {p: frozenset(slots.index(i) for i in role.reduced_in) for p, role in roles.items()}
            reduced = {p: tuple(node.output[i] for i in role.reduced_out) for p, role in roles.items()}
            steps.append(_Step(index, name, inputs, outputs, roles, positions, reduced, frees))
        return steps

    def _start(self, sample: Sample) -> _Chain:
        values = {n: ort.OrtValue.ortvalue_from_numpy(np.asarray(a, order="C")) for n, a in sample.arrays.items()}
        return _Chain({n: v._ortvalue for n, v in values.items()})

    def _execute(self, step: _Step, precision: Precision, chain: _Chain) -> list[Value]:
        if not step.lowers(precision):
            precision = Precision.FP32
        rounded_positions = step.reduced_in[precision]
        values = [
            self._rounded(name, precision, chain) if position in rounded_positions else self._value(name, chain)
            for position, name in enumerate(step.inputs)
        ]
        try:
            piece = self._ready.get((step.index, precision))
            if piece is None:
                piece = self._pieces.node(step.index, precision, [v.data_type() for v in values], rounded_positions)
                self._ready[(step.index, precision)] = piece
            results = piece.run(dict(zip(piece.inputs, values, strict=True)), piece.outputs, None)
            # By index: iterating this C++ vector to its end throws a C++ exception, which was seen to cost 30 us a layer.
            return [results[i] for i in range(len(piece.outputs))]
        except Exception as error:
            op = self._model.graph.node[step.index].op_type
            raise RunnerFailedError(f"layer {step.name!r} ({op}): ONNX Runtime failed ({one_line(error)})") from error

    def _keep(self, step: _Step, precision: Precision, results: Sequence[Value], chain: _Chain) -> None:
        chain.values.update(zip(step.outputs, results, strict=True))
        if step.lowers(precision):
            for name in step.reduced_out[precision]:
                chain.state[name] = precision

    def _value(self, name: str, chain: _Chain) -> Value:
        constant = self._constants.get(name)
        return chain.values[name] if constant is None else constant._ortvalue

    def _rounded(self, name: str, precision: Precision, chain: _Chain) -> Value:
        if name in self._constants:
            return self._rounded_constant(name, precision)._ortvalue
        state = chain.state.get(name, Precision.FP32)
        if state is precision or (precision is Precision.TF32 and state.is_storage):
            return chain.values[name]
        key = (name, precision)
        if key not in chain.versions:
            piece = self._pieces.rounding(precision)
            chain.versions[key] = piece.session._sess.run_with_ort_values({piece.inputs[0]: chain.values[name]}, piece.outputs, None)[0]
        return chain.versions[key]

    def _rounded_constant(self, name: str, precision: Precision) -> ort.OrtValue:
        """One rounded copy of each constant is kept, of the precision last asked for: weights are held twice at most."""
        held = self._rounded_constants.get(name)
        if held is None or held[0] is not precision:
            array = np.asarray(rounded(self._constants[name].numpy(), precision), np.float32)
            held = (precision, ort.OrtValue.ortvalue_from_numpy(array))
            self._rounded_constants[name] = held
        return held[1]

    def _fetch(self, name: str, chain: _Chain) -> NDArray[Any]:
        value: NDArray[Any] = self._value(name, chain).numpy()
        return value


def _ort_value(name: str, array: NDArray[Any]) -> ort.OrtValue:
    """A constant as ONNX Runtime holds it; NumPy's own types go without a copy."""
    try:
        if array.dtype.kind == "V":  # ml_dtypes: bfloat16 and the 8-bit floats, which ONNX Runtime takes as raw bits
            bits = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, helper.np_dtype_to_tensor_dtype(array.dtype))
        return ort.OrtValue.ortvalue_from_numpy(array)
    except Exception as error:
        raise BadInputError(f"model: constant {name!r} ({array.dtype}) cannot be emulated ({one_line(error, 80)})") from error


def _constants(graph: onnx.GraphProto) -> dict[str, NDArray[Any]]:
    """Every constant tensor of the top-level graph, whatever its type."""
    found = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and is_standard(node) and node.attribute:
            attribute = node.attribute[0]
            if attribute.name == "value":
                found[node.output[0]] = numpy_helper.to_array(attribute.t)
            elif attribute.name in ("value_float", "value_floats"):
                data = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                found[node.output[0]] = np.asarray(data, np.float32)
            elif attribute.name in ("value_int", "value_ints"):
                data = attribute.i if attribute.name == "value_int" else list(attribute.ints)
                found[node.output[0]] = np.asarray(data, np.int64)
    return found
