"""The ``emulated`` runner: reduced precision on any machine, without making a session for each probe.

A probe is one call of a session that holds every plan (see ``switched``). What needs every layer's values, the error
table and the effects of single layers, walks node by node instead: each node is a session of its own (see ``pieces``),
made once, and values are freed after their last use, so that memory does not grow with the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.errors import RunnerFailedError, one_line
from bisect_trt.graph.layers import Kind, Role, list_layers, node_names, role_of
from bisect_trt.graph.opset import with_new_nodes_pinned, with_roundings
from bisect_trt.graph.types import captured_names, infer_types, opset_of
from bisect_trt.precision import Precision, PrecisionPlan
from bisect_trt.runners.base import Sample
from bisect_trt.runners.kernels import KERNELS, run_kernel
from bisect_trt.runners.pieces import Piece, PieceStore
from bisect_trt.runners.switched import SwitchedSession
from bisect_trt.runners.weights import ConstantStore, Value

_KEPT_SESSIONS = 2
"""Most runs need the base's session and once TF32's; each holds one network's activations."""


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
    held: tuple[ort.OrtValue, ...] = ()
    """The inputs' owners: ONNX Runtime's C values only borrow NumPy's memory."""

    def free(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)
        if self.versions:
            gone = set(names)
            for key in [k for k in self.versions if k[0] in gone]:
                del self.versions[key]


class EmulatedRunner:
    """Executes ``model`` on ``samples`` with explicit roundings; ``base`` is the precision most probes will use.

    ``threads`` is what one call of ONNX Runtime may use; 0 leaves it to the machine.
    """

    name = "emulated"

    def __init__(self, model: onnx.ModelProto, samples: Sequence[Sample], base: Precision = Precision.FP16, *, threads: int = 0) -> None:
        self.versions: Mapping[str, str] = {"onnxruntime": ort.__version__, "onnx": onnx.__version__}
        self._source = model
        self._samples = list(samples)
        self._model = with_roundings(model, base)
        self._pieces = PieceStore(self._model, threads)
        self._constants = ConstantStore(self._model.graph)
        self._base = base
        self._opset = opset_of(self._model)
        self._threads = threads
        self._switched: dict[tuple[Precision, Precision], SwitchedSession] = {}
        self._layer_names = frozenset(layer.name for layer in list_layers(model))
        self._ready: dict[tuple[int, Precision], Piece] = {}
        self._outputs = tuple(o.name for o in self._model.graph.output)
        self._steps = self._compile()

    def outputs(self, plan: PrecisionPlan) -> Iterator[Mapping[str, NDArray[Any]]]:
        session, lowered = self._session_for(plan)
        for sample in self._samples:
            yield session.run(sample.arrays, lowered)

    def _session_for(self, plan: PrecisionPlan) -> tuple[SwitchedSession, frozenset[str]]:
        """A session that holds ``plan``, and the layers it lowers there."""
        if plan.base is Precision.FP32 and plan.pin_precision is Precision.FP32:
            low, lowered = self._base, frozenset[str]()
        else:
            low, lowered = plan.base, self._layer_names - plan.pinned
        key = (low, plan.pin_precision)
        if key not in self._switched:
            if len(self._switched) == _KEPT_SESSIONS:
                del self._switched[next(iter(self._switched))]
            self._switched[key] = SwitchedSession(self._model, self._constants, *key, self._threads)
        return self._switched[key], lowered

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def walk(self, plan: PrecisionPlan, *, kernels: bool) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Each sample's outputs, computed layer by layer; ``kernels`` as for :meth:`trace`."""
        plan = with_new_nodes_pinned(self._source, self._model, plan)
        for sample in self._samples:
            chain = self._start(sample)
            self._advance(self._steps, plan, chain, kernels)
            yield {name: self._fetch(name, chain) for name in self._outputs}

    def trace(self, sample: Sample, plan: PrecisionPlan, *, kernels: bool = False) -> Iterator[LayerValues]:
        """Each lowered layer's float outputs on ``sample`` in network order, against the exact ones.

        Both histories advance together and are freed together: two networks' live tensors are in memory, never all
        activations. ``kernels`` asks for the sums of TensorRT for RTX (see :mod:`bisect_trt.runners.kernels`), which take longer.
        """
        plan = with_new_nodes_pinned(self._source, self._model, plan)
        exact, low = self._start(sample), self._start(sample)
        for step in self._steps:
            precision = plan.precision_of(step.name)
            reference = self._execute(step, Precision.FP32, exact)
            accumulated = self._execute(step, precision, low, kernels)
            if step.lowers(precision):
                introduced = self._execute(step, precision, exact, kernels)
                rows = zip(step.outputs, reference, accumulated, introduced, strict=True)
                for tensor, *values in rows:
                    if values[0].data_type() == "tensor(float)":
                        yield LayerValues(step.name, tensor, *(v.numpy() for v in values))
            self._keep(step, Precision.FP32, reference, exact)
            self._keep(step, precision, accumulated, low)
            exact.free(step.frees)
            low.free(step.frees)

    def effects(
        self, sample: Sample, precision: Precision, wanted: Sequence[str]
    ) -> Iterator[tuple[str, Mapping[str, NDArray[Any]] | None]]:
        """The model's outputs on ``sample`` when only one layer is lowered, for each layer of ``wanted`` in network order.

        The exact history advances once; at each wanted layer a fork of it runs to the end. That costs half an inference
        a layer, and one more network's live tensors. None stands for outputs that could not be computed.
        """
        exact, asked = self._start(sample), frozenset(wanted)
        for position, step in enumerate(self._steps):
            if step.name in asked and step.lowers(precision):
                fork = _Chain(dict(exact.values), dict(exact.versions), dict(exact.state))
                try:
                    self._advance([step], PrecisionPlan(precision), fork)
                    self._advance(self._steps[position + 1 :], PrecisionPlan(Precision.FP32), fork)
                except RunnerFailedError:
                    yield step.name, None
                else:
                    yield step.name, {name: self._fetch(name, fork) for name in self._outputs}
            self._advance([step], PrecisionPlan(Precision.FP32), exact)

    def _advance(self, steps: Sequence[_Step], plan: PrecisionPlan, chain: _Chain, kernels: bool = False) -> None:
        for step in steps:
            precision = plan.precision_of(step.name)
            self._keep(step, precision, self._execute(step, precision, chain, kernels), chain)
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
        return _Chain({n: v._ortvalue for n, v in values.items()}, held=tuple(values.values()))

    def _execute(self, step: _Step, precision: Precision, chain: _Chain, kernels: bool = False) -> list[Value]:
        if not step.lowers(precision):
            precision = Precision.FP32
        rounded_positions = step.reduced_in[precision]
        values = [
            self._rounded(name, precision, chain) if position in rounded_positions else self._value(name, chain)
            for position, name in enumerate(step.inputs)
        ]
        try:
            if kernels and precision is Precision.FP16 and self._model.graph.node[step.index].op_type in KERNELS:
                found = run_kernel(self._model.graph.node[step.index], [v.numpy() for v in values], self._opset)
                if found is not None:
                    return [self._rounding(ort.OrtValue.ortvalue_from_numpy(found)._ortvalue, precision)]
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
        return self._constants.value(name) if name in self._constants else chain.values[name]

    def _rounded(self, name: str, precision: Precision, chain: _Chain) -> Value:
        if name in self._constants:
            return self._constants.value(name, precision)
        state = chain.state.get(name, Precision.FP32)
        if state is precision or (precision is Precision.TF32 and state.is_storage):
            return chain.values[name]
        key = (name, precision)
        if key not in chain.versions:
            chain.versions[key] = self._rounding(chain.values[name], precision)
        return chain.versions[key]

    def _rounding(self, value: Value, precision: Precision) -> Value:
        piece = self._pieces.rounding(precision)
        return piece.run({piece.inputs[0]: value}, piece.outputs, None)[0]

    def _fetch(self, name: str, chain: _Chain) -> NDArray[Any]:
        value: NDArray[Any] = self._value(name, chain).numpy()
        return value
