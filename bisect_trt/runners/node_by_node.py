"""Executes a model node by node, to compare the values of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
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
from bisect_trt.metrics.arrays import all_finite, largest_finite
from bisect_trt.metrics.rounding import LARGEST
from bisect_trt.model.emulated import EmulationRewriter
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import CONTROL_FLOW
from bisect_trt.model.roundings import list_roundings
from bisect_trt.model.walk import captured_names
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.ort_session import failure_of_session, node_session
from bisect_trt.runners.values import Value, caller, owned, value_of, viewed


class NodeSession:
    """A session of one node; feeds and results are in the order of ``inputs`` and ``outputs``."""

    def __init__(
        self, session: ort.InferenceSession, inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        self._call = caller(session)
        self._inputs, self._outputs = inputs, outputs

    def run(self, values: Sequence[Value]) -> list[Value]:
        """Returns the results for ``values``, one for each input."""
        results = self._call(dict(zip(self._inputs, values, strict=True)), self._outputs, None)
        return [results[i] for i in range(len(self._outputs))]  # see ``caller``


def type_proto(text: str) -> onnx.TypeProto:
    """Parses ONNX Runtime's spelling of a type, such as ``seq(tensor(int64))``."""
    outer, _, inner = text.partition("(")
    inner = inner[:-1]
    if outer == "tensor":
        return helper.make_tensor_type_proto(TensorProto.DataType.Value(inner.upper()), None)
    if outer == "seq":
        return helper.make_sequence_type_proto(type_proto(inner))
    return helper.make_optional_type_proto(type_proto(inner))


Positions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One node to execute; ``frees`` holds the tensors that no later node reads.

    ``reduced`` holds the precisions at which the node is a layer, each with the positions among
    ``inputs`` and among ``outputs`` that are rounded.
    """

    index: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced: Mapping[Precision, tuple[Positions, Positions]]
    frees: tuple[str, ...]


@dataclass
class Execution:
    """One execution of the model under one plan, as far as it has come.

    ``values`` are the live tensors, ``stored`` those with values of FP16 or BF16. ``owners`` hold
    the memory of the inputs.
    """

    values: dict[str, Value]
    owners: tuple[ort.OrtValue, ...]
    stored: set[str] = field(default_factory=set)

    def free(self, names: Sequence[str]) -> None:
        """Drops tensors."""
        for name in names:
            self.values.pop(name, None)


@dataclass(frozen=True)
class Begun:
    """An execution up to ``layer``, the node at ``place``."""

    layer: str
    place: int
    execution: Execution


def compile_steps(graph: Graph, constants: ConstantStore) -> list[Step]:
    """Lists the nodes of the main graph to execute, in order; constants are left out."""
    roundings = {p: list_roundings(graph, p) for p in Precision}
    steps: list[Step] = []
    seen: set[str] = set()
    for index in reversed(range(len(graph.names))):
        node = graph.proto.graph.node[index]
        if node.output and node.output[0] in constants:  # the store has its value
            continue
        slots = [i for i, tensor in enumerate(node.input) if tensor]
        inputs = (*(node.input[i] for i in slots), *captured_names(node))
        outputs = tuple(o for o in node.output if o)
        reduced = {}
        for precision, of_nodes in roundings.items():
            if graph.role(index, precision).kind is Kind.LAYER:
                rounded = [outputs.index(r.tensor) for r in of_nodes[index].results.values()]
                operands = tuple(map(slots.index, of_nodes[index].operands))
                reduced[precision] = (operands, tuple(rounded))
        frees = tuple({*inputs, *outputs} - seen)
        seen.update(frees)
        steps.append(Step(index, graph.names[index], inputs, outputs, reduced, frees))
    return steps[::-1]


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
        # Equal nodes share a session: deep models repeat a block many times.
        self._sessions: dict[tuple[bytes, Precision, Positions], NodeSession] = {}
        # The session of each node, without the cost of comparing its bytes.
        self._ready: dict[tuple[int, Precision, Positions], NodeSession] = {}

    @cached_property
    def _steps(self) -> Sequence[Step]:
        return compile_steps(self._graph, self._constants)

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
            if precision in step.reduced:
                for tensor, value in zip(step.outputs, results, strict=True):
                    if value.data_type() == "tensor(float)":
                        yield step.name, tensor, viewed(value)
            self._keep(step, Precision.FP32, results, execution)
            execution.free(step.frees)

    def introduced(
        self, sample: Sample, precision: Precision
    ) -> Iterator[tuple[Step, list[Value], list[Value]]]:
        """Yields each node with its exact results, and those of its layer reduced alone.

        The two are the same list for a node that is no layer.
        """
        execution = self._start(sample)
        for step in self._steps:
            exact = self._execute(step, Precision.FP32, execution)
            low = exact
            if precision in step.reduced:
                low = self._execute(step, precision, execution)
            yield step, exact, low
            self._keep(step, Precision.FP32, exact, execution)
            execution.free(step.frees)

    def begun_alone(
        self, sample: Sample, precision: Precision, layers: Set[str]
    ) -> Iterator[Begun]:
        """Yields the FP32 execution up to each of ``layers``, which alone is reduced, in order.

        Raises:
            RunnerFailedError: a layer cannot be computed.
        """
        execution = self._start(sample)
        for place, step in enumerate(self._steps):
            exact = self._execute(step, Precision.FP32, execution)
            if step.name in layers and precision in step.reduced:
                low = self._execute(step, precision, execution)
                begun = Execution(dict(execution.values), execution.owners)
                self._keep(step, Precision.FP32, low, begun)
                self._free(step, begun)
                yield Begun(step.name, place, begun)
            self._keep(step, Precision.FP32, exact, execution)
            self._free(step, execution)

    def finished(self, begun: Begun) -> dict[str, NDArray[Any]]:
        """Returns the outputs where the layers that are left run in FP32; thread-safe.

        Raises:
            RunnerFailedError: a layer cannot be computed.
        """
        execution = begun.execution
        for step in self._steps[begun.place + 1 :]:
            results = self._execute(step, Precision.FP32, execution)
            self._keep(step, Precision.FP32, results, execution)
            self._free(step, execution)
        owners: list[ort.OrtValue] = []
        values = {n: self._value(n, execution, owners) for n in self._graph.outputs}
        # An input that is also an output is the caller's memory, which may be freed: copied.
        return {name: viewed(value).copy() for name, value in values.items()}

    def _free(self, step: Step, execution: Execution) -> None:
        """Drops what is not read after ``step``, and is no output of the model."""
        execution.free([name for name in step.frees if name not in self._graph.outputs])

    def _traced(
        self, step: Step, plan: PrecisionPlan, exact: Execution, low: Execution
    ) -> Iterator[LayerValues]:
        """Executes ``step`` in both executions, and yields its outputs where it is a layer."""
        precision = plan.precision_of(step.name)
        reference = self._execute(step, Precision.FP32, exact)
        accumulated = self._execute(step, precision, low)
        self._keep(step, precision, accumulated, low)
        low.free(step.frees)
        if plan.base in step.reduced:
            introduced = reference  # of a pinned layer: nothing is rounded
            if precision in step.reduced:
                introduced = self._execute(step, precision, exact)
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
        """Starts an execution at the inputs."""
        owners = {name: owned(array) for name, array in sample.arrays.items()}
        return Execution({n: value_of(o) for n, o in owners.items()}, tuple(owners.values()))

    def _execute(self, step: Step, precision: Precision, execution: Execution) -> list[Value]:
        if precision not in step.reduced:
            precision = Precision.FP32
        owners: list[ort.OrtValue] = []  # must live until the call is done
        values = [self._value(name, execution, owners) for name in step.inputs]
        # Rounding again changes nothing, but for an infinity of FP16, which TF32 makes NaN.
        rounded: Positions = ()
        if precision is Precision.TF32:
            operands, _ = step.reduced[precision]
            rounded = tuple(i for i in operands if step.inputs[i] in execution.stored)
        try:
            key = (step.index, precision, rounded)
            if key not in self._ready:
                types = [v.data_type() for v in values]
                self._ready[key] = self._session_of(step.index, precision, types, rounded)
            return self._ready[key].run(values)
        except Exception as error:
            node = self._graph.proto.graph.node[step.index]
            where = f"layer {step.name!r} ({node.op_type})"
            raise failure_of_session(where, error) from error

    def _session_of(
        self, index: int, precision: Precision, types: Sequence[str], rounded: Positions
    ) -> NodeSession:
        """Returns node ``index``'s session; it rounds its inputs, but for those at ``rounded``."""
        source = self._graph.proto
        captures = captured_names(source.graph.node[index])
        # Tensors are renamed by their slots, which makes equal nodes equal bytes.
        node = onnx.NodeProto()
        node.CopyFrom(source.graph.node[index])
        node.name = "node"
        for kind, names in (("in", node.input), ("out", node.output)):
            names[:] = [name and f"__node_{kind}_{slot}" for slot, name in enumerate(names)]
        takes, gives = (*filter(None, node.input), *captures), tuple(filter(None, node.output))
        inputs = [
            helper.make_value_info(n, type_proto(t)) for n, t in zip(takes, types, strict=True)
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in gives]
        graph = helper.make_graph([node], "node", inputs, outputs)
        key = (graph.SerializeToString(deterministic=True), precision, rounded)
        if key not in self._sessions:
            model = onnx.ModelProto(ir_version=max(source.ir_version, 4), graph=graph)
            model.opset_import.extend(source.opset_import)
            model.functions.extend(source.functions)
            already_rounded = frozenset(takes[i] for i in rounded)
            plan = PrecisionPlan(precision)
            rewriter = EmulationRewriter(Graph(model), plan, rounded_inputs=already_rounded)
            session = node_session(rewriter.rewrite(), self._threads)
            self._sessions[key] = NodeSession(session, takes, gives)
        return self._sessions[key]

    def _in_range(
        self, step: Step, precision: Precision, exact: Execution, output: NDArray[Any]
    ) -> bool:
        """True if ``output`` and the rounded operands of ``step`` are in ``precision``'s range."""
        # The values inside the bodies of control flow are not known here.
        largest = LARGEST.get(precision)
        if largest is None or self._graph.proto.graph.node[step.index].op_type in CONTROL_FLOW:
            return False
        owners: list[ort.OrtValue] = []
        inputs = (step.inputs[i] for i in step.reduced[precision][0])
        read = [viewed(self._value(name, exact, owners)) for name in inputs]
        return all(largest_finite(a) <= largest for a in (output, *read))

    @staticmethod
    def _keep(
        step: Step, precision: Precision, results: Sequence[Value], execution: Execution
    ) -> None:
        execution.values.update(zip(step.outputs, results, strict=True))
        if precision in step.reduced and precision.is_storage:
            _, results_rounded = step.reduced[precision]
            execution.stored.update(step.outputs[i] for i in results_rounded)

    def _value(self, name: str, execution: Execution, owners: list[ort.OrtValue]) -> Value:
        """A live tensor, or a constant; appends the constant's owner to ``owners``."""
        if name in execution.values:
            return execution.values[name]
        owners.append(self._constants.owner(name))
        return value_of(owners[-1])
