"""The network run node by node, for what needs every layer's values: errors by layer.

Each kind of node has a session of its own; values are freed after their last use, so that memory
does not grow with the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from sys import intern
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
from bisect_trt.model.tensor_types import captured_names
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.ort_session import failure_of_session, node_session
from bisect_trt.runners.values import Value, caller, owned, value_of, viewed


@dataclass(frozen=True)
class NodeSession:
    """A ready session: fed with ``inputs`` in order, it gives ``outputs`` in order."""

    session: ort.InferenceSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, values: Sequence[Value]) -> list[Value]:
        """The results for ``values``, one for each input."""
        feed = dict(zip(self.inputs, values, strict=True))
        results = self._call(feed, self.outputs, None)
        return [results[i] for i in range(len(self.outputs))]

    @cached_property
    def _call(self) -> Callable[..., Any]:
        return caller(self.session)


def type_proto(text: str) -> onnx.TypeProto:
    """The ONNX type that ONNX Runtime spells ``text``, such as ``seq(tensor(int64))``."""
    outer, _, inner = text.partition("(")
    inner = inner[:-1]
    if outer == "tensor":
        return helper.make_tensor_type_proto(TensorProto.DataType.Value(inner.upper()), None)
    if outer == "seq":
        return helper.make_sequence_type_proto(type_proto(inner))
    return helper.make_optional_type_proto(type_proto(inner))


class NodeSessions:
    """Makes and keeps the sessions of one model's nodes."""

    def __init__(self, model: onnx.ModelProto, threads: int = 0) -> None:
        self._model = model
        self._threads = threads
        self._sessions: dict[object, NodeSession] = {}
        self._attributes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def node(
        self, index: int, precision: Precision, types: Sequence[str], rounded: Collection[int]
    ) -> NodeSession:
        """The session of one node."""
        node = self._model.graph.node[index]
        captures = captured_names(node)
        if index not in self._attributes:
            self._attributes[index] = b"".join(
                sorted(a.SerializeToString() for a in node.attribute)
            )
        shape = tuple(bool(i) for i in node.input), tuple(bool(o) for o in node.output)
        attributes: object = index if captures else self._attributes[index]
        key = (node.domain, node.op_type, attributes, shape, tuple(types), precision)
        if key not in self._sessions:
            self._sessions[key] = self._make(node, captures, precision, types, rounded)
        return self._sessions[key]

    def rounding(self, precision: Precision) -> NodeSession:
        """The session that rounds any float tensor to ``precision``."""
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
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.name = "node"
        own = []
        for slot, name in enumerate(node.input):
            if name:
                new.input[slot] = f"__node_in_{slot}"
                own.append(new.input[slot])
        for slot, name in enumerate(node.output):
            if name:
                new.output[slot] = f"__node_out_{slot}"
        names = (*own, *captures)
        inputs = [
            helper.make_value_info(n, type_proto(t)) for n, t in zip(names, types, strict=True)
        ]
        outputs = [onnx.ValueInfoProto(name=o) for o in new.output if o]
        graph = helper.make_graph([new], "node", inputs, outputs)
        model = onnx.ModelProto(ir_version=max(self._model.ir_version, 4), graph=graph)
        model.opset_import.extend(self._model.opset_import)
        model.functions.extend(self._model.functions)
        given = frozenset(names[i] for i in rounded)
        plan = PrecisionPlan(precision)
        emulated = EmulationRewriter(Graph(model), plan, rounded_inputs=given).rewrite()
        session = node_session(emulated, self._threads)
        return NodeSession(session, names, tuple(o.name for o in outputs))


Places = Mapping[Precision, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Step:
    """One node as it is run, with its roundings at each precision.

    ``reduced_in`` holds positions among ``inputs``, ``reduced_out`` among ``outputs``; ``frees``
    are the tensors that nobody reads after it.
    """

    index: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced_at: tuple[Precision, ...]
    reduced_in: Places
    reduced_out: Places
    frees: tuple[str, ...]

    def reduces(self, precision: Precision) -> bool:
        """True if the node is a layer that runs differently at ``precision``."""
        return precision in self.reduced_at


@dataclass
class Chain:
    """The live tensors of one history, their rounded versions, and what is rounded already."""

    values: dict[str, Value]
    versions: dict[tuple[str, Precision], Value] = field(default_factory=dict)
    state: dict[str, Precision] = field(default_factory=dict)
    held: tuple[ort.OrtValue, ...] = ()
    """The inputs' owners: ONNX Runtime's C values only borrow NumPy's memory."""

    def free(self, names: Sequence[str]) -> None:
        """Let go of tensors."""
        for name in names:
            self.values.pop(name, None)
        if self.versions:
            gone = set(names)
            for key in [k for k in self.versions if k[0] in gone]:
                del self.versions[key]


def compile_steps(graph: Graph, constants: ConstantStore) -> list[Step]:
    """The nodes of the main graph that are to be run, in order."""
    last_use: dict[str, int] = {}
    parts = []
    for index, node in enumerate(graph.proto.graph.node):
        if node.output and node.output[0] in constants:
            continue
        slots = tuple(i for i, tensor in enumerate(node.input) if tensor)
        inputs = tuple(map(intern, (*(node.input[i] for i in slots), *captured_names(node))))
        outputs = tuple(intern(o) for o in node.output if o)
        for tensor in (*inputs, *outputs):
            last_use[tensor] = index
        parts.append((index, slots, inputs, outputs))
    rounded = {p: list_roundings(graph, p) for p in Precision}
    steps = []
    for index, slots, inputs, outputs in parts:
        unread = {t for t in {*inputs, *outputs} if last_use[t] == index}
        here = {p: found[index] for p, found in rounded.items()}
        steps.append(
            Step(
                index,
                graph.names[index],
                inputs,
                outputs,
                tuple(p for p in Precision if graph.role(index, p).kind is Kind.LAYER),
                {p: tuple(map(slots.index, r.operands)) for p, r in here.items()},
                {
                    p: tuple(outputs.index(x.tensor) for x in r.results.values())
                    for p, r in here.items()
                },
                tuple(unread.difference(graph.outputs)),
            )
        )
    return steps


@dataclass(frozen=True)
class LayerValues:
    """A layer's float output: exact, with everything upstream reduced too, and reduced alone.

    ``in_range`` is true if whatever the layer reads and gives in FP32 fits into the reduced
    precision's range: values that are not finite then come from small ones that became zero.
    """

    layer: str
    tensor: str
    reference: NDArray[np.float32]
    accumulated: NDArray[np.float32]
    introduced: NDArray[np.float32]
    in_range: bool = False


class NodeByNode:
    """Runs ``graph`` step by step; ``constants`` are shared with whoever else executes it."""

    def __init__(self, graph: Graph, constants: ConstantStore, threads: int) -> None:
        self._graph = graph
        self._constants = constants
        self._threads = threads
        self._sessions = NodeSessions(graph.proto, threads)
        self._ready: dict[tuple[int, Precision], NodeSession] = {}
        self._compiled: Sequence[Step] | None = None

    def release(self) -> None:
        """Let the nodes' sessions go, and what is known of each node."""
        self._ready.clear()
        self._sessions = NodeSessions(self._graph.proto, self._threads)
        self._compiled = None

    @property
    def _steps(self) -> Sequence[Step]:
        """Who goes through them keeps them meanwhile."""
        found = self._compiled
        if found is None:
            found = self._compiled = compile_steps(self._graph, self._constants)
        return found

    def outputs(self, sample: Sample, plan: PrecisionPlan) -> Arrays:
        """The model's outputs on ``sample`` under ``plan``."""
        chain = self._start(sample)
        for step in self._steps:
            precision = plan.precision_of(step.name)
            self._keep(step, precision, self._execute(step, precision, chain), chain)
            chain.free(step.frees)
        return {name: self._fetch(name, chain) for name in self._graph.outputs}

    def trace(self, sample: Sample, plan: PrecisionPlan) -> Iterator[LayerValues]:
        """The float outputs of each layer that can run at the plan's base, in network order.

        Both histories advance together and are freed together: two networks' live tensors are in
        memory, never all activations.
        """
        exact, low = self._start(sample), self._start(sample)
        for step in self._steps:
            # In a generator of its own: what it holds of one layer is gone when the next is run.
            yield from self._traced(step, plan, exact, low)
            exact.free(step.frees)

    def exact(
        self, sample: Sample, precision: Precision
    ) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
        """Each float output of the layers that ``precision`` reduces, in FP32 and network order."""
        chain = self._start(sample)
        for step in self._steps:
            found = self._execute(step, Precision.FP32, chain)
            if step.reduces(precision):
                for tensor, value in zip(step.outputs, found, strict=True):
                    if value.data_type() == "tensor(float)":
                        yield step.name, tensor, viewed(value)
            self._keep(step, Precision.FP32, found, chain)
            chain.free(step.frees)

    def _traced(
        self, step: Step, plan: PrecisionPlan, exact: Chain, low: Chain
    ) -> Iterator[LayerValues]:
        """Run ``step`` on both histories, and where it is a layer show what became of it."""
        precision = plan.precision_of(step.name)
        reference = self._execute(step, Precision.FP32, exact)
        accumulated = self._execute(step, precision, low)
        self._keep(step, precision, accumulated, low)
        low.free(step.frees)
        if step.reduces(plan.base):
            introduced = reference
            if step.reduces(precision):
                introduced = self._execute(step, precision, exact)
            exact.versions.clear()  # nobody else reads the exact history rounded
            rows = zip(step.outputs, reference, accumulated, introduced, strict=True)
            for tensor, *values in rows:
                if values[0].data_type() != "tensor(float)":
                    continue
                true, both, own = (viewed(v) for v in values)
                in_range = not all_finite(own) and self._in_range(step, precision, exact, true)
                yield LayerValues(step.name, tensor, true, both, own, in_range)
        self._keep(step, Precision.FP32, reference, exact)

    @staticmethod
    def _start(sample: Sample) -> Chain:
        """A history that has run no step yet."""
        owners = {name: owned(array) for name, array in sample.arrays.items()}
        return Chain({n: value_of(o) for n, o in owners.items()}, held=tuple(owners.values()))

    def _execute(self, step: Step, precision: Precision, chain: Chain) -> list[Value]:
        if not step.reduces(precision):
            precision = Precision.FP32
        rounded = step.reduced_in[precision]
        held: list[ort.OrtValue] = []
        values = [
            self._rounded(name, precision, chain, held)
            if position in rounded
            else self._value(name, chain, held)
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
        self, step: Step, precision: Precision, exact: Chain, output: NDArray[Any]
    ) -> bool:
        """Whether neither ``output`` nor what ``step`` reads rounded leaves ``precision``'s range;
        of control flow nothing is known, since its bodies' values are not seen.
        """
        largest = LARGEST.get(precision)
        if largest is None or self._graph.proto.graph.node[step.index].op_type in CONTROL_FLOW:
            return False
        held: list[ort.OrtValue] = []
        inputs = (step.inputs[i] for i in step.reduced_in[precision])
        read = [viewed(self._value(name, exact, held)) for name in inputs]
        return all(largest_finite(a) <= largest for a in (output, *read))

    @staticmethod
    def _keep(step: Step, precision: Precision, results: Sequence[Value], chain: Chain) -> None:
        chain.values.update(zip(step.outputs, results, strict=True))
        if step.reduces(precision):
            for name in (step.outputs[i] for i in step.reduced_out[precision]):
                chain.state[name] = precision

    def _value(self, name: str, chain: Chain, held: list[ort.OrtValue]) -> Value:
        """A live tensor or a constant, whose owner joins ``held``: the C value only borrows it."""
        if name in chain.values:
            return chain.values[name]
        held.append(self._constants.owner(name))
        return value_of(held[-1])

    def _rounded(
        self, name: str, precision: Precision, chain: Chain, held: list[ort.OrtValue]
    ) -> Value:
        if name in self._constants:
            held.append(self._constants.owner(name, precision))
            return value_of(held[-1])
        if is_rounded(chain.state.get(name, Precision.FP32), precision):
            return chain.values[name]
        key = (name, precision)
        if key not in chain.versions:
            chain.versions[key] = self._round(chain.values[name], precision)
        return chain.versions[key]

    def _round(self, value: Value, precision: Precision) -> Value:
        return self._sessions.rounding(precision).run([value])[0]

    def _fetch(self, name: str, chain: Chain) -> NDArray[Any]:
        """A live tensor, or a copy of a constant."""
        held: list[ort.OrtValue] = []
        found = viewed(self._value(name, chain, held))
        return found.copy() if held else found
