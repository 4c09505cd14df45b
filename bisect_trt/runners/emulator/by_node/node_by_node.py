"""The network run node by node, for what needs every layer's values: errors by layer.

Each node is a session of its own (see ``node_sessions``), made once; values are freed after their
last use, so that memory does not grow with the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.roundings import is_rounded
from bisect_trt.graph.tensors.operator_rules import CONTROL_FLOW
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.blocks import all_finite, largest_finite
from bisect_trt.numerics.rounding import LARGEST
from bisect_trt.runners.emulator.by_node.node_sessions import NodeSession, NodeSessions
from bisect_trt.runners.emulator.by_node.steps import Chain, Step, compile_steps
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.rtx.operators import OPERATORS, run_operator
from bisect_trt.runners.ort.sessions import failure_of_session
from bisect_trt.runners.ort.values import Value, bytes_of, owned, value_of, viewed

_SMALL, _LARGE = 1 << 17, 32 << 20
"""Bytes that a node reads, between which two histories run it beside each other: most operators
leave cores idle for a part of their time. Below, the thread costs more; above, memory counts."""


@dataclass(frozen=True)
class LayerValues:
    """A layer's float output under three histories: exact, everything upstream lowered too, only
    this layer lowered.

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
    """Runs ``graph`` step by step; ``constants`` are shared with whoever else executes it.

    ``rtx_sums`` of its methods asks for the sums of TensorRT for RTX (see
    :mod:`bisect_trt.runners.emulator.rtx.arithmetic`), which take longer.
    """

    def __init__(self, graph: Graph, constants: ConstantStore, threads: int) -> None:
        self._graph = graph
        self._constants = constants
        self._threads = threads
        self._sessions = NodeSessions(graph.proto, threads)
        self._beside = ThreadPoolExecutor(1, "bisect-trt")
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

    def outputs(self, sample: Sample, plan: PrecisionPlan, *, rtx_sums: bool) -> Arrays:
        """The model's outputs on ``sample`` under ``plan``.

        Args:
            sample: the inputs.
            plan: which layers are lowered, and to what.
            rtx_sums: whether sums are formed as TensorRT for RTX forms them.

        Returns:
            Float32 arrays by output name, of the model's shapes.
        """
        chain = self._start(sample)
        self._advance(self._steps, plan, chain, rtx_sums)
        return {name: self._fetch(name, chain) for name in self._graph.outputs}

    def trace(
        self, sample: Sample, plan: PrecisionPlan, *, rtx_sums: bool
    ) -> Iterator[LayerValues]:
        """Each layer's float outputs on ``sample`` in network order, beside the exact ones: of
        those that can run at the plan's base, pinned or not.

        Both histories advance together and are freed together: two networks' live tensors are in
        memory, never all activations.

        Args:
            sample: the inputs.
            plan: which layers are lowered, and to what.
            rtx_sums: as for :meth:`outputs`.
        """
        exact, low = self._start(sample), self._start(sample)
        for step in self._steps:
            # In a generator of its own: what it holds of one layer is gone when the next is run.
            yield from self._traced(step, plan, exact, low, rtx_sums)
            exact.free(step.frees)

    def exact(
        self, sample: Sample, precision: Precision
    ) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
        """Each float output of the layers that ``precision`` lowers, in FP32 and network order.

        Args:
            sample: the inputs.
            precision: which layers are shown, no more.

        Returns:
            (layer, tensor, values), as :meth:`trace` has them.
        """
        chain = self._start(sample)
        for step in self._steps:
            found = self._execute(step, Precision.FP32, chain)
            if step.lowers(precision):
                for tensor, value in zip(step.outputs, found, strict=True):
                    if value.data_type() == "tensor(float)":
                        yield step.name, tensor, viewed(value)
            self._keep(step, Precision.FP32, found, chain)
            chain.free(step.frees)

    def _traced(
        self, step: Step, plan: PrecisionPlan, exact: Chain, low: Chain, rtx_sums: bool
    ) -> Iterator[LayerValues]:
        """Run ``step`` on both histories, and where it is a layer show what became of it."""
        precision = plan.precision_of(step.name)
        lowered = partial(self._execute, step, precision, low, rtx_sums)
        read = sum(bytes_of(self._value(name, low, [])) for name in step.inputs)
        begun = self._beside.submit(lowered) if _SMALL < read < _LARGE else None
        introduced: list[Value] = []
        try:
            reference = self._execute(step, Precision.FP32, exact)
            if begun is not None and step.lowers(precision):
                introduced = self._execute(step, precision, exact, rtx_sums)
        finally:
            if begun is not None:  # it reads constants that the next who asks may replace
                wait([begun])
        accumulated = lowered() if begun is None else begun.result()
        self._keep(step, precision, accumulated, low)
        low.free(step.frees)
        if step.lowers(plan.base):
            if step.lowers(precision):
                introduced = introduced or self._execute(step, precision, exact, rtx_sums)
            else:
                introduced = reference
            exact.versions.clear()  # nobody else reads the exact history rounded
            rows = zip(step.outputs, reference, accumulated, introduced, strict=True)
            for tensor, *values in rows:
                if values[0].data_type() != "tensor(float)":
                    continue
                true, both, own = (viewed(v) for v in values)
                in_range = not all_finite(own) and self._in_range(step, precision, exact, true)
                yield LayerValues(step.name, tensor, true, both, own, in_range)
        self._keep(step, Precision.FP32, reference, exact)

    def _advance(
        self, steps: Sequence[Step], plan: PrecisionPlan, chain: Chain, rtx_sums: bool = False
    ) -> None:
        """Run ``steps`` on ``chain``, each as ``plan`` has it."""
        for step in steps:
            precision = plan.precision_of(step.name)
            self._keep(step, precision, self._execute(step, precision, chain, rtx_sums), chain)
            chain.free(step.frees)

    @staticmethod
    def _start(sample: Sample) -> Chain:
        """A history that has run no step yet."""
        owners = {name: owned(array) for name, array in sample.arrays.items()}
        return Chain({n: value_of(o) for n, o in owners.items()}, held=tuple(owners.values()))

    def _execute(
        self, step: Step, precision: Precision, chain: Chain, rtx_sums: bool = False
    ) -> list[Value]:
        if not step.lowers(precision):
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
            if rtx_sums and precision is Precision.FP16 and node.op_type in OPERATORS:
                found = run_operator(node, [v.numpy() for v in values], self._graph.opset)
                if found is not None:
                    # It is rounded; this copies it to where it outlives the array.
                    return [self._round(value_of(owned(found)), precision)]
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
        if step.lowers(precision):
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
