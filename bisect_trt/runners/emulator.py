"""The ``emulated`` runner: FP32 arithmetic, with every rounding of a plan as an operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.limits import give_back
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.opsets import with_new_nodes_pinned, with_roundings
from bisect_trt.runners.concurrency import side_by_side
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.device import CPU, Device, load_cuda_libraries
from bisect_trt.runners.node_by_node import LayerValues, NodeByNode
from bisect_trt.runners.switched_session import KeptActivations, SwitchedSession


def versions_on(device: Device) -> dict[str, str]:
    """What the emulator's answers depend on, where ``device`` computes them."""
    found = {"onnxruntime": ort.__version__, "onnx": onnx.__version__}
    return found if device == CPU else {**found, "emulated on": device.name}


class EmulatedRunner:
    """Executes a model with every rounding made explicit.

    ``base`` is the precision that most evaluations use, ``threads`` the limit of one call (0: all
    cores). ``device`` computes evaluations and sensitivities; what needs the values of every layer
    runs on the CPU. ``constants`` are shared with another emulator of the same model.
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
    ) -> None:
        self.versions: Mapping[str, str] = versions_on(device)
        self.graph = as_graph(model)
        self._capable = with_roundings(self.graph, base)
        self.constants = constants or ConstantStore(self._capable)
        self.device = device
        self._device_constants = self.constants
        if device != CPU:
            load_cuda_libraries()
            self._device_constants = ConstantStore(self._capable, device)
        self._base = base
        self._threads = threads
        # By base and pin precision: the usual pair's session, and at most one other.
        self._switched: dict[tuple[Precision, Precision], SwitchedSession] = {}
        self._node_by_node = NodeByNode(self._capable, self.constants, threads)
        self._kept = KeptActivations()
        self._last_reduced: tuple[PrecisionPlan, frozenset[str]] | None = None
        self._after_lookups: EmulatedRunner | None = None

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Arrays]:
        runs = ((*self._runner_of(sample)._session_for(plan), sample) for sample in samples)
        yield from side_by_side(_run, runs, lambda run: run[0].at_once(run[2]))

    @property
    def capable(self) -> Graph:
        """The model that is executed: the given one, at an opset that can express the roundings."""
        return self._capable

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def outputs_by_node(self, plan: PrecisionPlan, sample: Sample) -> Arrays:
        """Returns one sample's outputs, as :meth:`NodeByNode.outputs`."""
        runner = self._runner_of(sample)
        return runner._node_by_node.outputs(sample, runner._of_capable(plan))

    def trace(self, sample: Sample, plan: PrecisionPlan) -> Iterator[LayerValues]:
        """As :meth:`NodeByNode.trace`."""
        runner = self._runner_of(sample)
        return runner._node_by_node.trace(sample, runner._of_capable(plan))

    def exact(
        self, sample: Sample, precision: Precision
    ) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
        """As :meth:`NodeByNode.exact`."""
        return self._runner_of(sample)._node_by_node.exact(sample, precision)

    def sensitivities(
        self, sample: Sample, precision: Precision, wanted: Sequence[str]
    ) -> Iterator[tuple[str, Mapping[str, NDArray[Any]] | None]]:
        """Yields the outputs with one layer reduced, for each of ``wanted``; None if that fails."""
        session, _ = self._runner_of(sample)._session_for(PrecisionPlan(precision))
        return session.sensitivities(sample, wanted)

    def release(self) -> None:
        """Closes all sessions and forgets kept activations; the next plan opens its own."""
        self._switched.clear()
        self._kept.clear()
        self._node_by_node.release()
        if self._after_lookups is not None:
            self._after_lookups.release()

    def forget(self) -> None:
        """Forgets kept activations: the next run of any plan starts at the inputs."""
        self._kept.clear()

    @property
    def layers_on_cpu(self) -> list[str]:
        """The layers that ran on the CPU instead of the device, in all runs so far."""
        ran = {name for session in self._switched.values() for name in session.on_cpu}
        return [layer.name for layer in self.graph.layers if layer.name in ran]

    def _runner_of(self, sample: Sample) -> EmulatedRunner:
        """This runner, or one of the model behind its lookups where ``sample`` replaces these."""
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
            )
            self._after_lookups._device_constants = self._device_constants
        return self._after_lookups

    def _of_capable(self, plan: PrecisionPlan) -> PrecisionPlan:
        return with_new_nodes_pinned(self.graph, self._capable, plan)

    def _session_for(self, plan: PrecisionPlan) -> tuple[SwitchedSession, frozenset[str]]:
        """The session that can run ``plan``, and the layers that it reduces there."""
        reduced = self._reduced_by(plan)
        low = plan.base
        if not reduced and plan.pin_precision is Precision.FP32:
            low = self._base  # any session computes plain FP32: no other one need be opened
        key = (low, plan.pin_precision)
        if key not in self._switched:
            usual = (self._base, Precision.FP32)
            if key != usual:
                # At most two sessions of the model are open: the usual one stays.
                for other in [k for k in self._switched if k != usual]:
                    del self._switched[other]
                give_back()
            self._switched[key] = SwitchedSession(
                self._capable,
                self._device_constants,
                *key,
                threads=self._threads,
                device=self.device,
                kept=self._kept,
            )
        return self._switched[key], reduced

    def _reduced_by(self, plan: PrecisionPlan) -> frozenset[str]:
        """The layers that ``plan`` reduces, computed once for all samples."""
        last = self._last_reduced
        if last is None or last[0] != plan:
            names = {layer.name for layer in self.graph.layers_at(plan.base)}
            last = self._last_reduced = (plan, frozenset(names - plan.pinned))
        return last[1]


def _run(run: tuple[SwitchedSession, frozenset[str], Sample]) -> Arrays:
    session, reduced, sample = run
    return session.run(sample, reduced)
