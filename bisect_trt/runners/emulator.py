"""The ``emulated-kernels`` runner: the network with the FP16 sums of TensorRT for RTX, as far as
they are known.

It takes several times as long as the plain emulator, so it is no runner to search with. It is the
second opinion on an answer before an engine is built: a set that only passes with sums in FP32
would come back from the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from threading import Lock
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.limits import habits
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.roundings import with_new_nodes_pinned, with_roundings
from bisect_trt.model.save import weights_size
from bisect_trt.runners.concurrency import Sessions, Turns, side_by_side
from bisect_trt.runners.constants import ConstantStore, DeviceConstants
from bisect_trt.runners.device import CPU, Device, load_cuda_libraries
from bisect_trt.runners.node_by_node import LayerValues, NodeByNode
from bisect_trt.runners.switched_session import KeptActivations, SwitchedSession, room_beside

_KEPT_SESSIONS = 2
"""Most runs need the base's session and once TF32's; each holds one network's activations."""


def versions_on(device: Device) -> dict[str, str]:
    """What the emulator's answers depend on where ``device`` computes them."""
    found = {"onnxruntime": ort.__version__, "onnx": onnx.__version__}
    return found if device == CPU else {**found, "emulated on": device.name}


class EmulatedRunner:
    """Executes a model with explicit roundings.

    Args: model: an FP32 model, or its :class:`Graph`. base: the precision that most evaluations
        will use. threads: what one call of ONNX Runtime may use; 0 leaves it to the machine.
        device: what computes the evaluations and the effects of single layers; what needs every
        layer's values is run on the CPU. constants: those of the same model, where another emulator
        holds them already. turns: shared with who else opens sessions of the model; None where
        nobody does.
    """

    name = "emulated"

    def __init__(
        self,
        model: onnx.ModelProto | Graph,
        base: Precision = Precision.FP16,
        *,
        threads: int = 0,
        device: Device = CPU,
        constants: ConstantStore | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.versions: Mapping[str, str] = versions_on(device)
        self.graph = as_graph(model)
        self._capable = with_roundings(self.graph, base)
        self.constants = constants or ConstantStore(self._capable)
        self.device = device
        self._placed: ConstantStore | DeviceConstants = self.constants
        if device != CPU:
            load_cuda_libraries()
            self._placed = DeviceConstants(self._capable, device)
        self._base = base
        self._threads = threads
        self._turns = turns or Turns(self.graph)
        self._switched: dict[tuple[Precision, Precision], SwitchedSession] = {}
        self._baseline_is_open = False
        weights = weights_size(self.graph.proto)
        self._node_by_node = NodeByNode(self._capable, self.constants, threads)
        for holder in (self._node_by_node, self.constants):
            self._turns.introduce(holder, Sessions.SHARED)
        self._kept = KeptActivations(0 if habits().frees_activations else room_beside(weights))
        self._reduced: tuple[PrecisionPlan, frozenset[str]] | None = None
        self._after_lookups: EmulatedRunner | None = None

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Arrays]:
        ready = ((*self._taking(sample)._session_for(plan), sample) for sample in samples)
        for first in islice(ready, 1):
            # A plan that fails, fails on the first; and one thread opens its sessions.
            alone = not first[0].is_ready(first[1])
            if alone:
                yield _run(first)
            left = ready if alone else chain([first], ready)
            yield from side_by_side(_run, left, lambda asked: asked[0].at_once(asked[2]))

    @property
    def capable(self) -> Graph:
        """The model that is run: the given one, or the same at the opset that roundings need."""
        return self._capable

    def foretell(self, plan: PrecisionPlan, runs: int) -> None:
        """Hear that ``plan`` will be run on so many samples at least, which makes it quicker."""
        session = self._switched.get((plan.base, plan.pin_precision))
        if session is not None:
            session.foretell(self._reduced_by(plan), runs)
        if self._after_lookups is not None:
            self._after_lookups.foretell(plan, runs)

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def outputs_by_node(self, plan: PrecisionPlan, sample: Sample, *, rtx_sums: bool) -> Arrays:
        """One sample's outputs, as :meth:`NodeByNode.outputs`."""
        runner = self._taking(sample)
        plan = runner._of_capable(plan)
        return runner._node_by_node.outputs(sample, plan, rtx_sums=rtx_sums)

    def trace(
        self, sample: Sample, plan: PrecisionPlan, *, rtx_sums: bool = False
    ) -> Iterator[LayerValues]:
        """As :meth:`NodeByNode.trace`."""
        runner = self._taking(sample)
        plan = runner._of_capable(plan)
        return runner._node_by_node.trace(sample, plan, rtx_sums=rtx_sums)

    def exact(
        self, sample: Sample, precision: Precision
    ) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
        """As :meth:`NodeByNode.exact`."""
        runner = self._taking(sample)
        return runner._node_by_node.exact(sample, precision)

    def sensitivities(
        self, sample: Sample, precision: Precision, wanted: Sequence[str]
    ) -> Iterator[tuple[str, Mapping[str, NDArray[Any]] | None]]:
        """The model's outputs when only one layer is reduced, for each of ``wanted``."""
        runner = self._taking(sample)
        return runner._session_for(PrecisionPlan(precision))[0].sensitivities(sample, wanted)

    def release(self) -> None:
        """Let all sessions and kept activations go; the next plan opens its own."""
        self._switched.clear()
        self._kept.clear()
        self._node_by_node.release()
        if self._after_lookups is not None:
            self._after_lookups.release()

    def forget(self) -> None:
        """Let kept activations go: the next run of any plan starts at the inputs."""
        self._kept.clear()

    @property
    def layers_on_cpu(self) -> list[str]:
        """The layers that the CPU ran in place of the device, as far as anything was run."""
        ran = {name for session in self._switched.values() for name in session.on_cpu}
        return [layer.name for layer in self.graph.layers if layer.name in ran]

    def _taking(self, sample: Sample) -> EmulatedRunner:
        """Who runs ``sample``: this one, or where it brings what the model would look up, one of
        the model that begins there.
        """
        graph = self.graph.taking(sample.arrays)
        if graph is self.graph:
            return self
        if self._after_lookups is None:
            self._after_lookups = EmulatedRunner(
                graph,
                self._base,
                threads=self._threads,
                device=self.device,
                constants=self.constants,
                turns=self._turns,
            )
            self._after_lookups._placed = self._placed
        return self._after_lookups

    def _of_capable(self, plan: PrecisionPlan) -> PrecisionPlan:
        return with_new_nodes_pinned(self.graph, self._capable, plan)

    def _session_for(self, plan: PrecisionPlan) -> tuple[SwitchedSession, frozenset[str]]:
        """A session that holds ``plan``, and the layers it lowers there."""
        reduced = self._reduced_by(plan)
        low = plan.base
        if not reduced and plan.pin_precision is Precision.FP32:
            low = self._base  # any session computes plain FP32
        key = (low, plan.pin_precision)
        if low is not self._base:
            self._baseline_is_open = self._turns.many_nodes and self.device == CPU
        elif self._baseline_is_open:  # TF32's is asked once
            self._baseline_is_open = False
            for other, session in list(self._switched.items()):
                if other[0] is not self._base:
                    session.release()
        if key not in self._switched:
            if len(self._switched) == _KEPT_SESSIONS:
                del self._switched[next(iter(self._switched))]
            self._switched[key] = SwitchedSession(
                self._capable,
                self._placed,
                *key,
                self._threads,
                self.device,
                kept=self._kept,
                turns=self._turns,
            )
        return self._switched[key], reduced

    def _reduced_by(self, plan: PrecisionPlan) -> frozenset[str]:
        """The layers that ``plan`` lowers, found once for all samples."""
        known = self._reduced
        if known is None or known[0] != plan:
            names = {layer.name for layer in self.graph.layers_at(plan.base)}
            known = self._reduced = (plan, frozenset(names - plan.pinned))
        return known[1]


def _run(asked: tuple[SwitchedSession, frozenset[str], Sample]) -> Arrays:
    session, reduced, sample = asked
    return session.run(sample, reduced)


class RtxRunner:
    """Executes the model of ``emulator``."""

    name = "emulated-kernels"

    def __init__(self, emulator: EmulatedRunner) -> None:
        self.versions: Mapping[str, str] = emulator.versions
        self._emulator = emulator
        # A history borrows the constants that its emulator keeps, at one precision at a time: two
        # histories would free each other's.
        self._alone = Lock()

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        with self._alone:
            for sample in samples:
                yield self._emulator.outputs_by_node(plan, sample, rtx_sums=True)

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}
