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
from onnx import numpy_helper

from bisect_trt.errors import RunnerFailedError, one_line
from bisect_trt.graph.layers import Kind, Role, node_names, role_of
from bisect_trt.graph.lowering import is_standard
from bisect_trt.graph.opset import with_new_nodes_pinned, with_roundings
from bisect_trt.graph.types import infer_types, opset_of
from bisect_trt.numerics import rounded
from bisect_trt.precision import Precision, PrecisionPlan
from bisect_trt.runners.base import Sample
from bisect_trt.runners.pieces import PieceStore, captured_names

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
    slots: tuple[int, ...]
    outputs: tuple[str, ...]
    roles: Mapping[Precision, Role]
    frees: tuple[str, ...]


@dataclass
class _Chain:
    """The live tensors of one history: values, their rounded versions, and what is rounded already."""

    values: dict[str, Value]
    versions: dict[tuple[str, Precision], Value] = field(default_factory=dict)
    state: dict[str, Precision] = field(default_factory=dict)

    def free(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)
            for precision in Precision:
                self.versions.pop((name, precision), None)


class EmulatedRunner:
    """Executes ``model`` on ``samples`` with explicit roundings; ``base`` is the precision most probes will use."""

    name = "emulated"

    def __init__(self, model: onnx.ModelProto, samples: Sequence[Sample], base: Precision = Precision.FP16) -> None:
        self.versions: Mapping[str, str] = {"onnxruntime": ort.__version__, "onnx": onnx.__version__}
        self._source = model
        self._samples = list(samples)
        self._model = with_roundings(model, base)
        self._pieces = PieceStore(self._model)
        self._constants = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in _constants(self._model.graph).items()}
        self._rounded_constants: dict[str, tuple[Precision, ort.OrtValue]] = {}
        self._outputs = tuple(o.name for o in self._model.graph.output)
        self._steps = self._compile()

    def outputs(self, plan: PrecisionPlan) -> Iterator[Mapping[str, NDArray[Any]]]:
        plan = with_new_nodes_pinned(self._source, self._model, plan)
        for sample in self._samples:
            chain = self._start(sample)
            for step in self._steps:
                results = self._execute(step, plan.precision_of(step.name), chain)
                self._keep(step, plan.precision_of(step.name), results, chain)
                chain.free(step.frees)
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
            role = step.roles[precision]
            if role.kind is Kind.LAYER:
                introduced = self._execute(step, precision, exact)
                rows = zip(step.outputs, reference, accumulated, introduced, strict=True)
                for tensor, *values in rows:
                    if values[0].data_type() == "tensor(float)":
                        yield LayerValues(step.name, tensor, *(v.numpy() for v in values))
            self._keep(step, Precision.FP32, reference, exact)
            self._keep(step, precision, accumulated, low)
            exact.free(step.frees)
            low.free(step.frees)

    def effects(self, sample: Sample, precision: Precision, wanted: Container[str]) -> Iterator[tuple[str, Mapping[str, NDArray[Any]]]]:
        """The model's outputs on ``sample`` when only one layer is lowered, for each layer of ``wanted`` in network order.

        The exact history advances once; at each wanted layer a fork of it runs to the end. That costs half an inference
        a layer, and one more network's live tensors.
        """
        exact = self._start(sample)
        for position, step in enumerate(self._steps):
            if step.name in wanted and step.roles[precision].kind is Kind.LAYER:
                fork = _Chain(dict(exact.values), dict(exact.versions), dict(exact.state))
                lowered = self._execute(step, precision, fork)
                self._keep(step, precision, lowered, fork)
                fork.free(step.frees)
                for later in self._steps[position + 1 :]:
                    self._keep(later, Precision.FP32, self._execute(later, Precision.FP32, fork), fork)
                    fork.free(later.frees)
                yield step.name, {name: self._fetch(name, fork) for name in self._outputs}
            self._keep(step, Precision.FP32, self._execute(step, Precision.FP32, exact), exact)
            exact.free(step.frees)

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
            steps.append(_Step(index, name, inputs, slots, outputs, roles, frees))
        return steps

    def _start(self, sample: Sample) -> _Chain:
        values = {n: ort.OrtValue.ortvalue_from_numpy(np.asarray(a, order="C")) for n, a in sample.arrays.items()}
        return _Chain({n: v._ortvalue for n, v in values.items()})

    def _execute(self, step: _Step, precision: Precision, chain: _Chain) -> list[Value]:
        role = step.roles[precision]
        if role.kind is not Kind.LAYER:
            precision = Precision.FP32
        values = [self._value(name, chain) for name in step.inputs]
        if precision is not Precision.FP32:
            for position, slot in enumerate(step.slots):
                if slot in role.reduced_in:
                    values[position] = self._rounded(step.inputs[position], precision, chain)
        try:
            piece = self._pieces.node(step.index, precision, [v.data_type() for v in values])
            feed = dict(zip(piece.inputs, values, strict=True))
            return list(piece.session._sess.run_with_ort_values(feed, piece.outputs, None))
        except Exception as error:
            op = self._model.graph.node[step.index].op_type
            raise RunnerFailedError(f"layer {step.name!r} ({op}): ONNX Runtime failed ({one_line(error)})") from error

    def _keep(self, step: _Step, precision: Precision, results: Sequence[Value], chain: _Chain) -> None:
        role = step.roles[precision]
        node = self._model.graph.node[step.index]
        for name, value in zip(step.outputs, results, strict=True):
            chain.values[name] = value
        if role.kind is Kind.LAYER:
            for slot in role.reduced_out:
                chain.state[node.output[slot]] = precision

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
