"""The ``emulated`` runner: FP32 arithmetic, with every rounding of a plan as an operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.limits import Limits, give_back
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.opsets import with_new_nodes_pinned, with_roundings
from bisect_trt.model.switched import to_switched
from bisect_trt.runners.concurrency import Headroom, side_by_side
from bisect_trt.runners.constants import ConstantStore, before_fitting
from bisect_trt.runners.device import CPU, Device, load_cuda_libraries
from bisect_trt.runners.node_by_node import Begun, LayerValues, NodeByNode
from bisect_trt.runners.ort_session import failure_of_session, session_as_written
from bisect_trt.runners.reverse_pass import FirstOrderEffects, first_order_effects
from bisect_trt.runners.values import caller, owned, value_of, viewed

_WHERE = "the emulated model"


def versions_on(device: Device) -> dict[str, str]:
    """Returns what the emulator's answers depend on if ``device`` computes them."""
    found = {"onnxruntime": ort.__version__, "onnx": onnx.__version__}
    return found if device == CPU else {**found, "emulated on": device.name}


class SwitchedSession:
    """Executes a model with any of its layers reduced to ``low``, and the others in ``pin``."""

    def __init__(
        self,
        graph: Graph,
        constants: ConstantStore,
        low: Precision,
        pin: Precision,
        *,
        threads: int = 0,
        device: Device = CPU,
        large_bytes: int = Limits.large_bytes,
    ) -> None:
        # Weights are fed like inputs: rounded once outside, they cost an evaluation nothing.
        self._constants, self._device = constants, device
        self._headroom = Headroom(graph, threads, large_bytes=large_bytes)
        switched = to_switched(graph, low, pin, selects=device != CPU)
        self._takes, self._gives = switched.takes, graph.outputs
        self._flags, self._weights = switched.flags, switched.weights
        self._exact_constants = graph.exact_constants
        self._call = caller(session_as_written(switched.model, _WHERE, threads, device))
        self._states = [
            owned(np.array(state), device.memory, device.number) for state in (False, True)
        ]

    def at_once(self, sample: Sample) -> int:
        """Returns how many inferences on samples like ``sample`` fit side by side."""
        # One inference fills a GPU, whose memory is limited too.
        return self._headroom.at_once(sample) if self._device == CPU else 1

    def run(self, sample: Sample, reduced: Set[str]) -> Arrays:
        """Returns one sample's outputs with the layers ``reduced``; thread-safe.

        Raises:
            RunnerFailedError: ONNX Runtime cannot run the model.
        """
        # The values borrow the memory of their owners, which must live until the call is done.
        owners = {name: owned(sample.arrays[name]) for name in self._takes}
        for name, flag in self._flags.items():
            is_on = any(n in reduced for n in flag.on) and not any(n in reduced for n in flag.off)
            owners[name] = self._states[is_on]
        for name, weight in self._weights.items():
            precision = weight.reduced if weight.layer in reduced else weight.pinned
            owners[name] = self._constants.owner(self._read(weight.tensor, reduced), precision)
        feed = {name: value_of(owner) for name, owner in owners.items()}
        try:
            results = self._call(feed, self._gives, None)
        except Exception as error:
            raise failure_of_session(_WHERE, error) from error
        outputs = {name: viewed(results[i]) for i, name in enumerate(self._gives)}
        # An input that is also an output is the caller's memory, which may be freed: copied.
        return outputs | {n: outputs[n].copy() for n in self._takes if n in outputs}

    def _read(self, tensor: str, reduced: Set[str]) -> str:
        """The store's name of a constant: one rounded to fit is for its reduced layer alone."""
        exact = self._exact_constants.get(tensor)
        fits = exact is None or exact.layer in reduced
        return tensor if fits else before_fitting(tensor)


class EmulatedRunner:
    """Executes a model with every rounding made explicit.

    ``base`` is the precision that most evaluations use, ``threads`` the limit of one call (0: all
    cores). ``device`` computes evaluations and sensitivities; what needs the values of every layer
    runs on the CPU. ``constants`` are shared with another emulator of the same model. Inferences
    run one by one if the weights take ``large_bytes`` or more.
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
        large_bytes: int = Limits.large_bytes,
    ) -> None:
        self.versions: Mapping[str, str] = versions_on(device)
        self.graph = as_graph(model)
        # At an opset that can express the roundings.
        self.capable = with_roundings(self.graph, base)
        self.constants = constants or ConstantStore(self.capable)
        self.device = device
        self._device_constants = self.constants
        if device != CPU:
            load_cuda_libraries()
            self._device_constants = ConstantStore(self.capable, device)
        self._base = base
        self._threads = threads
        self._large_bytes = large_bytes
        # By base and pin precision: the usual pair's session, and at most one other.
        self._switched: dict[tuple[Precision, Precision], SwitchedSession] = {}
        self._node_by_node = NodeByNode(self.capable, self.constants, threads)
        self._after_lookups: EmulatedRunner | None = None
        self._headroom = Headroom(self.capable, threads, large_bytes=large_bytes)

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Arrays]:
        runs = ((*self._runner_of(sample)._session_for(plan), sample) for sample in samples)
        yield from side_by_side(_run, runs, lambda run: run[0].at_once(run[2]))

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def release(self) -> None:
        """Closes the sessions, and frees rounded weights; both are made again at the next use."""
        self._switched.clear()
        self._after_lookups = None
        self._device_constants.forget_rounded()
        self.constants.forget_rounded()
        give_back()

    def trace(self, sample: Sample, plan: PrecisionPlan) -> Iterator[LayerValues]:
        """As :meth:`NodeByNode.trace`."""
        runner = self._runner_of(sample)
        capable = with_new_nodes_pinned(runner.graph, runner.capable, plan)
        return runner._node_by_node.trace(sample, capable)

    def exact(
        self, sample: Sample, precision: Precision
    ) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
        """As :meth:`NodeByNode.exact`."""
        return self._runner_of(sample)._node_by_node.exact(sample, precision)

    def sensitivities(
        self, sample: Sample, precision: Precision, wanted: Sequence[str]
    ) -> Iterator[tuple[str, Arrays | None]]:
        """Yields the outputs with one layer reduced, for each of ``wanted``; None if that fails."""
        session, _ = self._runner_of(sample)._session_for(PrecisionPlan(precision))

        def alone(layer: str) -> Arrays | None:
            try:
                return session.run(sample, {layer})
            except RunnerFailedError:
                return None

        outputs = side_by_side(alone, wanted, lambda _: session.at_once(sample))
        yield from zip(wanted, outputs, strict=True)

    def sensitivities_from_there(
        self, sample: Sample, precision: Precision, wanted: Sequence[str]
    ) -> Iterator[tuple[str, Arrays | None]]:
        """As :meth:`sensitivities`, in any order: each run begins at its layer, on the CPU.

        This halves the work, but the interpreter handles every node, one thread at a time.
        """
        runner = self._runner_of(sample)
        nodes, at_once = runner._node_by_node, runner._headroom.at_once(sample)

        def outputs(begun: Begun) -> tuple[str, Arrays]:
            return begun.layer, nodes.finished(begun)

        left = dict.fromkeys(wanted)
        with suppress(RunnerFailedError):
            begun = nodes.begun_alone(sample, precision, left.keys())
            for layer, found in side_by_side(outputs, begun, lambda _: at_once):
                del left[layer]
                yield layer, found
        # From one on that cannot be computed so, and what is no node of the main graph.
        yield from self.sensitivities(sample, precision, list(left))

    def first_order_effects(
        self, sample: Sample, precision: Precision, weighings: Sequence[Arrays]
    ) -> FirstOrderEffects:
        """As :func:`first_order_effects`, of the layers of this runner's model."""
        runner = self._runner_of(sample)
        return first_order_effects(
            runner.capable,
            runner._node_by_node,
            runner.constants,
            sample,
            precision,
            weighings,
            self._threads,
        )

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
                large_bytes=self._large_bytes,
            )
            self._after_lookups._device_constants = self._device_constants
        return self._after_lookups

    def _session_for(self, plan: PrecisionPlan) -> tuple[SwitchedSession, frozenset[str]]:
        """The session that can run ``plan``, and the layers that it reduces there."""
        layers = self.graph.layers_at(plan.base)
        reduced = frozenset(layer.name for layer in layers) - plan.pinned
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
                self.capable,
                self._device_constants,
                *key,
                threads=self._threads,
                device=self.device,
                large_bytes=self._large_bytes,
            )
        return self._switched[key], reduced


def _run(run: tuple[SwitchedSession, frozenset[str], Sample]) -> Arrays:
    session, reduced, sample = run
    return session.run(sample, reduced)
