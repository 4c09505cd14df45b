"""Executes a model node by node, to compare the values of every layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays, all_finite, largest_finite
from bisect_trt.metrics.rounding import LARGEST
from bisect_trt.model.emulated import EmulationRewriter, rounding_model
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import CONTROL_FLOW
from bisect_trt.model.roundings import is_rounded, list_roundings
from bisect_trt.model.walk import captured_names
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.ort_session import failure_of_session, node_session
from bisect_trt.runners.values import Value, caller, owned, value_of, viewed


@dataclass(frozen=True)
class NodeSession:
    """A session of one node; feeds and results are in the order of ``inputs`` and ``outputs``."""

    session: ort.InferenceSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, values: Sequence[Value]) -> list[Value]:
        """Returns the results for ``values``, one for each input."""
        feed = dict(zip(self.inputs, values, strict=True))
        results = self._call(feed, self.outputs, None)
        return [results[i] for i in range(len(self.outputs))]  # see ``caller``

    @cached_property
    def _call(self) -> Callable[..., Any]:
        return caller(self.session)


def type_proto(text: str) -> onnx.TypeProto:
    """Parses ONNX Runtime's spelling of a type, such as ``seq(tensor(int64))``."""
    outer, _, inner = text.partition("(")
    inner = inner[:-1]
    if outer == "tensor":
        return helper.make_tensor_type_proto(TensorProto.DataType.Value(inner.upper()), None)
    if outer == "seq":
        return helper.make_sequence_type_proto(type_proto(inner))
    return helper.make_optional_type_proto(type_proto(inner))


class NodeSessions:
    """Opens and keeps the sessions of one model's nodes; equal nodes share one."""

    def __init__(self, model: onnx.ModelProto, threads: int = 0) -> None:
        self._model = model
        self._threads = threads
        self._sessions: dict[object, NodeSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def node(
        self, index: int, precision: Precision, types: Sequence[str], rounded: Collection[int]
    ) -> NodeSession:
        """Returns node ``index``'s session; its inputs at ``rounded`` are rounded already."""
        node = self._model.graph.node[index]
        captures = captured_names(node)
        # A body that captures outer tensors names them: its session serves this node only.
        attributes: object = index
        if not captures:
            attributes = b"".join(sorted(a.SerializeToString() for a in node.attribute))
        present = tuple(bool(i) for i in node.input), tuple(bool(o) for o in node.output)
        key = (node.domain, node.op_type, attributes, present, tuple(types), precision)
        if key not in self._sessions:
            self._sessions[key] = self._make(node, captures, precision, types, rounded)
        return self._sessions[key]

    def rounding(self, precision: Precision) -> NodeSession:
        """Returns the session that rounds any float tensor to ``precision``."""
        if precision not in self._sessions:
            model = rounding_model(precision)
            self._sessions[precision] = NodeSession(
                node_session(model, self._threads), ("x",), ("y",)
            )
        return self._sessions[precision]

    def _make(
        self,
        node: onnx.NodeProto,
        captures: tuple[str, ...],
        precision: Precision,
        types: Sequence[str],
        rounded: Collection[int],
    ) -> NodeSession:
        # Tensors are renamed by their slots, so that equal nodes share the session.
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.name = "node"
        operands = []
        for slot, name in enumerate(node.input):
            if name:
                new.input[slot] = f"__node_in_{slot}"
                operands.append(new.input[slot])
        for slot, name in enumerate(node.output):
            if name:
                new.output[slot] = f"__node_out_{slot}"
        names = (*operands, *captures)
        inputs = [
            helper.make_value_info(n, type_proto(t)) for n, t in zip(names, types, strict=True)
        ]
        outputs = [onnx.ValueInfoProto(name=o) for o in new.output if o]
        graph = helper.make_graph([new], "node", inputs, outputs)
        model = onnx.ModelProto(ir_version=max(self._model.ir_version, 4), graph=graph)
        model.opset_import.extend(self._model.opset_import)
        model.functions.extend(self._model.functions)
        already_rounded = frozenset(names[i] for i in rounded)
        plan = PrecisionPlan(precision)
        rewriter = EmulationRewriter(Graph(model), plan, rounded_inputs=already_rounded)
        emulated = rewriter.rewrite()
        session = node_session(emulated, self._threads)
        return NodeSession(session, names, tuple(o.name for o in outputs))


Positions = Mapping[Precision, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Step:
    """One node to execute, with its roundings at each precision.

    ``reduced_at`` holds the precisions at which the node is a layer. ``reduced_in`` holds positions
    among ``inputs``, ``reduced_out`` among ``outputs``. ``frees`` holds the tensors that no later
    node reads.
    """

    index: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced_at: tuple[Precision, ...]
    reduced_in: Positions
    reduced_out: Positions
    frees: tuple[str, ...]

    def reduces(self, precision: Precision) -> bool:
        """True if the node is a layer that can run at ``precision``."""
        return precision in self.reduced_at


@dataclass
class Execution:
    """One execution of the model under one plan, as far as it has come.

    ``values`` are the live tensors, ``versions`` rounded copies of them, ``state`` the precision
    that a tensor is rounded to already. ``owners`` hold the memory of the inputs.
    """

    values: dict[str, Value]
    versions: dict[tuple[str, Precision], Value] = field(default_factory=dict)
    state: dict[str, Precision] = field(default_factory=dict)
    owners: tuple[ort.OrtValue, ...] = ()

    def free(self, names: Sequence[str]) -> None:
        """Drops tensors and their rounded copies."""
        for name in names:
            self.values.pop(name, None)
        if self.versions:
            for key in [k for k in self.versions if k[0] in names]:
                del self.versions[key]


def compile_steps(graph: Graph, constants: ConstantStore) -> list[Step]:
    """Lists the nodes of the main graph to execute, in order; constants are left out."""
    last_use: dict[str, int] = {}
    parts = []
    for index, node in enumerate(graph.proto.graph.node):
        if node.output and node.output[0] in constants:  # the store has its value
            continue
        slots = tuple(i for i, tensor in enumerate(node.input) if tensor)
        inputs = (*(node.input[i] for i in slots), *captured_names(node))
        outputs = tuple(o for o in node.output if o)
        for tensor in (*inputs, *outputs):
            last_use[tensor] = index
        parts.append((index, slots, inputs, outputs))
    all_roundings = {p: list_roundings(graph, p) for p in Precision}
    steps = []
    for index, slots, inputs, outputs in parts:
        unread = {t for t in {*inputs, *outputs} if last_use[t] == index}
        roundings = {p: by_node[index] for p, by_node in all_roundings.items()}
        steps.append(
            Step(
                index,
                graph.names[index],
                inputs,
                outputs,
                tuple(p for p in Precision if graph.role(index, p).kind is Kind.LAYER),
                {p: tuple(map(slots.index, r.operands)) for p, r in roundings.items()},
                {
                    p: tuple(outputs.index(x.tensor) for x in r.results.values())
                    for p, r in roundings.items()
                },
                tuple(unread.difference(graph.outputs)),
            )
        )
    return steps


@dataclass(frozen=True)
class LayerValues:
    """A layer's float output in three executions.

    ``reference`` is exact, ``accumulated`` has all layers up to this one reduced, ``introduced``
    this layer only. ``in_range``: what the layer reads and gives in FP32 fits the reduced range, so
    that values which are not finite come from small ones that became zero.
    """

    layer: str
    tensor: str
    reference: NDArray[np.float32]
    accumulated: NDArray[np.float32]
    introduced: NDArray[np.float32]
    in_range: bool = False


class NodeByNode:
    """Executes ``graph`` step by step; ``constants`` may be shared with other runners."""

    def __init__(self, graph: Graph, constants: ConstantStore, threads: int) -> None:
        self._graph = graph
        self._constants = constants
        self._threads = threads
        self._sessions = NodeSessions(graph.proto, threads)
        self._ready: dict[tuple[int, Precision], NodeSession] = {}
        self._compiled: Sequence[Step] | None = None

    def release(self) -> None:
        """Closes the sessions and forgets the steps."""
        self._ready.clear()
        self._sessions = NodeSessions(self._graph.proto, self._threads)
        self._compiled = None

    @property
    def _steps(self) -> Sequence[Step]:
        # :meth:`release` may run in another thread: what it clears is read once.
        steps = self._compiled
        if steps is None:
            steps = self._compiled = compile_steps(self._graph, self._constants)
        return steps

    def outputs(self, sample: Sample, plan: PrecisionPlan) -> Arrays:
        """Returns the model's outputs on ``sample`` under ``plan``."""
        execution = self._start(sample)
        for step in self._steps:
            precision = plan.precision_of(step.name)
            self._keep(step, precision, self._execute(step, precision, execution), execution)
            execution.free(step.frees)
        return {name: self._fetch(name, execution) for name in self._graph.outputs}

    def trace(self, sample: Sample, plan: PrecisionPlan) -> Iterator[LayerValues]:
        """Yields the float outputs of each layer that can run at the plan's base, in order."""
        # Exact and reduced execution advance together: only their live tensors are in memory.
        exact, low = self._start(sample), self._start(sample)
        for step in self._steps:
            # A generator of its own: its locals are freed before the next layer runs.
            yield from self._traced(step, plan, exact, low)
            exact.free(step.frees)

    def exact(
        self, sample: Sample, precision: Precision
    ) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
        """Yields (layer, tensor, FP32 values) of each float output that ``precision`` reduces."""
        execution = self._start(sample)
        for step in self._steps:
            results = self._execute(step, Precision.FP32, execution)
            if step.reduces(precision):
                for tensor, value in zip(step.outputs, results, strict=True):
                    if value.data_type() == "tensor(float)":
                        yield step.name, tensor, viewed(value)
            self._keep(step, Precision.FP32, results, execution)
            execution.free(step.frees)

    def _traced(
        self, step: Step, plan: PrecisionPlan, exact: Execution, low: Execution
    ) -> Iterator[LayerValues]:
        """Executes ``step`` in both executions, and yields its outputs where it is a layer."""
        precision = plan.precision_of(step.name)
        reference = self._execute(step, Precision.FP32, exact)
        accumulated = self._execute(step, precision, low)
        self._keep(step, precision, accumulated, low)
        low.free(step.frees)
        if step.reduces(plan.base):
            introduced = reference
            if step.reduces(precision):
                introduced = self._execute(step, precision, exact)
            exact.versions.clear()  # no later step reads the exact values rounded
            rows = zip(step.outputs, reference, accumulated, introduced, strict=True)
            for tensor, *values in rows:
                if values[0].data_type() != "tensor(float)":
                    continue
                true, all_reduced, alone = (viewed(v) for v in values)
                in_range = not all_finite(alone) and self._in_range(step, precision, exact, true)
                yield LayerValues(step.name, tensor, true, all_reduced, alone, in_range)
        self._keep(step, Precision.FP32, reference, exact)

    @staticmethod
    def _start(sample: Sample) -> Execution:
        """An execution of which no step has run yet."""
        owners = {name: owned(array) for name, array in sample.arrays.items()}
        return Execution({n: value_of(o) for n, o in owners.items()}, owners=tuple(owners.values()))

    def _execute(self, step: Step, precision: Precision, execution: Execution) -> list[Value]:
        if not step.reduces(precision):
            precision = Precision.FP32
        rounded = step.reduced_in[precision]
        owners: list[ort.OrtValue] = []  # must live until the call is done
        values = [
            self._rounded(name, precision, execution, owners)
            if position in rounded
            else self._value(name, execution, owners)
            for position, name in enumerate(step.inputs)
        ]
        node = self._graph.proto.graph.node[step.index]
        try:
            session = self._ready.get((step.index, precision))
            if session is None:
                types = [v.data_type() for v in values]
                session = self._sessions.node(step.index, precision, types, rounded)
                self._ready[(step.index, precision)] = session
            return session.run(values)
        except Exception as error:
            where = f"layer {step.name!r} ({node.op_type})"
            raise failure_of_session(where, error) from error

    def _in_range(
        self, step: Step, precision: Precision, exact: Execution, output: NDArray[Any]
    ) -> bool:
        """True if ``output`` and the rounded operands of ``step`` are in ``precision``'s range."""
        # The values inside the bodies of control flow are not known here.
        largest = LARGEST.get(precision)
        if largest is None or self._graph.proto.graph.node[step.index].op_type in CONTROL_FLOW:
            return False
        owners: list[ort.OrtValue] = []
        inputs = (step.inputs[i] for i in step.reduced_in[precision])
        read = [viewed(self._value(name, exact, owners)) for name in inputs]
        return all(largest_finite(a) <= largest for a in (output, *read))

    @staticmethod
    def _keep(
        step: Step, precision: Precision, results: Sequence[Value], execution: Execution
    ) -> None:
        execution.values.update(zip(step.outputs, results, strict=True))
        if step.reduces(precision):
            for name in (step.outputs[i] for i in step.reduced_out[precision]):
                execution.state[name] = precision

    def _value(self, name: str, execution: Execution, owners: list[ort.OrtValue]) -> Value:
        """A live tensor, or a constant; appends the constant's owner to ``owners``."""
        if name in execution.values:
            return execution.values[name]
        owners.append(self._constants.owner(name))
        return value_of(owners[-1])

    def _rounded(
        self, name: str, precision: Precision, execution: Execution, owners: list[ort.OrtValue]
    ) -> Value:
        if name in self._constants:
            owners.append(self._constants.owner(name, precision))
            return value_of(owners[-1])
        # Rounding again would change nothing.
        if is_rounded(execution.state.get(name, Precision.FP32), precision):
            return execution.values[name]
        key = (name, precision)
        if key not in execution.versions:
            session = self._sessions.rounding(precision)
            execution.versions[key] = session.run([execution.values[name]])[0]
        return execution.versions[key]

    def _fetch(self, name: str, execution: Execution) -> NDArray[Any]:
        """A live tensor, or a copy of a constant."""
        owners: list[ort.OrtValue] = []
        array = viewed(self._value(name, execution, owners))
        return array.copy() if owners else array  # a constant's memory is the store's
