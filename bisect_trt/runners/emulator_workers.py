"""The emulator on several workers, each with the whole model."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnx

from bisect_trt.base.errors import BadInputError, MachineError, RunnerFailedError, one_line
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import ExactConstant, Graph, as_graph
from bisect_trt.model.save import PROTOBUF_LIMIT_BYTES, held_size, weights_size, write_model
from bisect_trt.runners.device import CPU, Device
from bisect_trt.runners.device_check import DeviceChecker
from bisect_trt.runners.emulator import EmulatedRunner, versions_on
from bisect_trt.runners.process import WorkerPool

SERVER = "bisect_trt.runners.emulator_workers:EmulationServer"


class EmulatorPool:
    """The ``emulated`` runner on a pool of :class:`EmulationServer`."""

    name = EmulatedRunner.name

    def __init__(
        self, worker_pool: WorkerPool, timeout_s: float | None = None, device: Device = CPU
    ) -> None:
        self.versions: Mapping[str, str] = versions_on(device)
        self._worker_pool = worker_pool
        self.timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self._worker_pool)

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Arrays]:
        yield from self._call(len(samples), "outputs", plan, list(samples))

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def sensitivities(
        self, sample: Sample, precision: Precision, wanted: Sequence[str]
    ) -> Iterator[tuple[str, Arrays | None]]:
        """As :meth:`EmulatedRunner.sensitivities`, on all workers at once."""
        # Several layers a call, because each call sends the sample.
        parts = [wanted[i : i + 12] for i in range(0, len(wanted), 12)]

        def answer_to(part: Sequence[str]) -> Any:
            return self._call(len(part), "sensitivities", sample, precision, part)

        with ThreadPoolExecutor(len(self)) as threads:
            for answer in threads.map(answer_to, parts):
                yield from answer

    def _call(self, inferences: int, method: str, *arguments: Any) -> Any:
        """Returns a worker's answer; MachineError if workers were lost at every attempt."""
        # The time-out is that of one inference.
        limit = None if self.timeout_s is None else self.timeout_s * max(1, inferences)
        try:
            return self._worker_pool.call(method, *arguments, timeout_s=limit)
        except RunnerFailedError as error:
            if not error.lost:
                raise
            raise MachineError(
                f"--workers {len(self)}: an emulator's worker was lost again and again "
                f"({one_line(error, 120)}); nothing is concluded from it. Use fewer --workers or a "
                "machine with more memory, and run the same command again to go on from here"
            ) from error

    def close(self) -> None:
        """Ends the workers."""
        self._worker_pool.close()


def server_arguments(
    model: onnx.ModelProto | Graph,
    base: Precision,
    threads: int,
    device: Device = CPU,
    *,
    elsewhere: bool = False,
) -> dict[str, Any]:
    """The arguments of an :class:`EmulationServer`; ``elsewhere`` if it is on another machine.

    Raises:
        BadInputError: the model does not fit into one message.
    """
    graph = as_graph(model)
    model = graph.proto
    if (weights_size(model) if elsewhere else held_size(model)) >= PROTOBUF_LIMIT_BYTES:
        how = "to other machines; leave --ray out" if elsewhere else "from memory; give its file"
        raise BadInputError(f"--workers: a model above 2 GB cannot be sent {how}")
    stream = io.BytesIO()
    if elsewhere:
        write_model(model, stream)
    return {
        "model": stream.getvalue() or model.SerializeToString(),
        "base": base,
        "threads": threads,
        "device": device,
        "exact_constants": dict(graph.exact_constants),
    }


class EmulationServer:
    """The worker's side: an emulator of one model."""

    def __init__(
        self,
        model: bytes,
        base: Precision,
        threads: int,
        device: Device,
        exact_constants: Mapping[str, ExactConstant],
    ) -> None:
        if device != CPU:  # the worker may be on another machine: its own device is checked
            DeviceChecker(device).check()
        graph = Graph(onnx.load_from_string(model), exact_constants=exact_constants)
        self._runner = EmulatedRunner(graph, base, threads=threads, device=device)

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> list[Arrays]:
        """As :meth:`EmulatedRunner.outputs`, all in one answer."""
        return list(self._runner.outputs(plan, samples))

    def sensitivities(
        self, sample: Sample, precision: Precision, layers: Sequence[str]
    ) -> list[tuple[str, Arrays | None]]:
        """As :meth:`EmulatedRunner.sensitivities`, all in one answer."""
        return list(self._runner.sensitivities(sample, precision, layers))
