"""The ``emulated`` runner: reduced precision on any machine, without making a session for each
probe.

A probe is one call of a session that holds every plan (see ``switched``). What needs every layer's
values, the error table and the effects of single layers, walks node by node instead: each node is a
session of its own (see ``pieces``), made once, and values are freed after their last use, so that
memory does not grow with the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError, one_line
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.layers import list_layers
from bisect_trt.graph.passes.opset import with_new_nodes_pinned, with_roundings
from bisect_trt.graph.tensor_types import opset_of
from bisect_trt.runners.base import Sample
from bisect_trt.runners.emulator.constant_store import ConstantStore, Value
from bisect_trt.runners.emulator.node_sessions import Piece, PieceStore
from bisect_trt.runners.emulator.rtx_arithmetic import KERNELS, run_kernel
from bisect_trt.runners.emulator.steps import Chain, Step, compile_steps
from bisect_trt.runners.emulator.switched_session import SwitchedSession

_KEPT_SESSIONS = 2
"""Most runs need the base's session and once TF32's; each holds one network's activations."""


@dataclass(frozen=True)
class LayerValues:
    """A layer's float output under three histories: exact, everything upstream lowered too, only
    this layer lowered.
    """

    layer: str
    tensor: str
    reference: NDArray[np.float32]
    accumulated: NDArray[np.float32]
    introduced: NDArray[np.float32]


class EmulatedRunner:
    """Executes ``model`` on ``samples`` with explicit roundings; ``base`` is the precision most
    probes will use.

    ``threads`` is what one call of ONNX Runtime may use; 0 leaves it to the machine.
    """

    name = "emulated"

    def __init__(
        self,
        model: onnx.ModelProto,
        samples: Sequence[Sample],
        base: Precision = Precision.FP16,
        *,
        threads: int = 0,
    ) -> None:
        self.versions: Mapping[str, str] = {
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
        }
        self._source = model
        self._samples = list(samples)
        self.model = with_roundings(model, base)
        self._pieces = PieceStore(self.model, threads)
        self.constants = ConstantStore(self.model.graph)
        self._base = base
        self._opset = opset_of(self.model)
        self._threads = threads
        self._switched: dict[tuple[Precision, Precision], SwitchedSession] = {}
        self._layer_names = frozenset(layer.name for layer in list_layers(model))
        self._ready: dict[tuple[int, Precision], Piece] = {}
        self._outputs = tuple(o.name for o in self.model.graph.output)
        self.steps = compile_steps(self.model, self.constants)

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
            self._switched[key] = SwitchedSession(self.model, self.constants, *key, self._threads)
        return self._switched[key], lowered

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def walk(self, plan: PrecisionPlan, *, kernels: bool) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Each sample's outputs, computed layer by layer; ``kernels`` as for :meth:`trace`."""
        plan = with_new_nodes_pinned(self._source, self.model, plan)
        for sample in self._samples:
            chain = self.start(sample)
            self.advance(self.steps, plan, chain, kernels)
            yield {name: self.fetch(name, chain) for name in self._outputs}

    def trace(
        self, sample: Sample, plan: PrecisionPlan, *, kernels: bool = False
    ) -> Iterator[LayerValues]:
        """Each lowered layer's float outputs on ``sample`` in network order, against the exact
        ones.

        Both histories advance together and are freed together: two networks' live tensors are in
        memory, never all activations. ``kernels`` asks for the sums of TensorRT for RTX (see
        :mod:`bisect_trt.runners.emulator.rtx_arithmetic`), which take longer.
        """
        plan = with_new_nodes_pinned(self._source, self.model, plan)
        exact, low = self.start(sample), self.start(sample)
        for step in self.steps:
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
        """The model's outputs on ``sample`` when only one layer is lowered, for each layer of
        ``wanted`` in network order.

        The exact history advances once; at each wanted layer a fork of it runs to the end. That
        costs half an inference a layer, and one more network's live tensors. None stands for
        outputs that could not be computed.
        """
        exact, asked = self.start(sample), frozenset(wanted)
        for position, step in enumerate(self.steps):
            if step.name in asked and step.lowers(precision):
                fork = exact.fork()
                try:
                    self.advance([step], PrecisionPlan(precision), fork)
                    self.advance(self.steps[position + 1 :], PrecisionPlan(Precision.FP32), fork)
                except RunnerFailedError:
                    yield step.name, None
                else:
                    yield step.name, {name: self.fetch(name, fork) for name in self._outputs}
            self.advance([step], PrecisionPlan(Precision.FP32), exact)

    def advance(
        self, steps: Sequence[Step], plan: PrecisionPlan, chain: Chain, kernels: bool = False
    ) -> None:
        """Run ``steps`` on ``chain``, each as ``plan`` has it. An exact step reads a constant from
        the chain if it is there.
        """
        for step in steps:
            precision = plan.precision_of(step.name)
            self._keep(step, precision, self._execute(step, precision, chain, kernels), chain)
            chain.free(step.frees)

    def start(self, sample: Sample) -> Chain:
        """A history that has run no step yet."""
        values = {
            n: ort.OrtValue.ortvalue_from_numpy(np.asarray(a, order="C"))
            for n, a in sample.arrays.items()
        }
        return Chain({n: v._ortvalue for n, v in values.items()}, held=tuple(values.values()))

    def _execute(
        self, step: Step, precision: Precision, chain: Chain, kernels: bool = False
    ) -> list[Value]:
        if not step.lowers(precision):
            precision = Precision.FP32
        rounded_positions = step.reduced_in[precision]
        values = [
            self._rounded(name, precision, chain)
            if position in rounded_positions
            else self._value(name, chain)
            for position, name in enumerate(step.inputs)
        ]
        try:
            if (
                kernels
                and precision is Precision.FP16
                and self.model.graph.node[step.index].op_type in KERNELS
            ):
                found = run_kernel(
                    self.model.graph.node[step.index], [v.numpy() for v in values], self._opset
                )
                if found is not None:
                    return [
                        self.round(ort.OrtValue.ortvalue_from_numpy(found)._ortvalue, precision)
                    ]
            piece = self._ready.get((step.index, precision))
            if piece is None:
                piece = self._pieces.node(
                    step.index, precision, [v.data_type() for v in values], rounded_positions
                )
                self._ready[(step.index, precision)] = piece
            results = piece.run(dict(zip(piece.inputs, values, strict=True)), piece.outputs, None)
            # By index: iterating this C++ vector to its end throws a C++ exception, which was seen
            # to cost 30 us a layer.
            return [results[i] for i in range(len(piece.outputs))]
        except Exception as error:
            op = self.model.graph.node[step.index].op_type
            raise RunnerFailedError(
                f"layer {step.name!r} ({op}): ONNX Runtime failed ({one_line(error)})"
            ) from error

    def _keep(
        self, step: Step, precision: Precision, results: Sequence[Value], chain: Chain
    ) -> None:
        chain.values.update(zip(step.outputs, results, strict=True))
        if step.lowers(precision):
            for name in step.reduced_out[precision]:
                chain.state[name] = precision

    def _value(self, name: str, chain: Chain) -> Value:
        return chain.values[name] if name in chain.values else self.constants.value(name)

    def _rounded(self, name: str, precision: Precision, chain: Chain) -> Value:
        if name in self.constants:
            return self.constants.value(name, precision)
        state = chain.state.get(name, Precision.FP32)
        if state is precision or (precision is Precision.TF32 and state.is_storage):
            return chain.values[name]
        key = (name, precision)
        if key not in chain.versions:
            chain.versions[key] = self.round(chain.values[name], precision)
        return chain.versions[key]

    def round(self, value: Value, precision: Precision) -> Value:
        """Any float tensor, rounded to ``precision``."""
        piece = self._pieces.rounding(precision)
        return piece.run({piece.inputs[0]: value}, piece.outputs, None)[0]

    def fetch(self, name: str, chain: Chain) -> NDArray[Any]:
        """A live tensor or a constant."""
        value: NDArray[Any] = self._value(name, chain).numpy()
        return value
