"""Reads a stored engine back, in a process of its own: loading an engine can run its code."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.metrics.arrays import Arrays
from bisect_trt.runners.tensorrt.buffers import Cuda, import_cuda
from bisect_trt.runners.tensorrt.build import make_logger
from bisect_trt.runners.tensorrt.execute import LoadedEngine
from bisect_trt.runners.tensorrt.records import import_tensorrt

INSPECTING_WORKER = "bisect_trt.runners.tensorrt.inspecting:InspectingWorker"

TIMED_RUNS = 10
"""Runs that the median time of a layer is of."""


@dataclass(frozen=True)
class Inspected:
    """What a stored engine says of itself.

    ``information`` is the inspector's JSON. ``times_ms`` is the median time of each engine layer,
    empty where it was not executed.
    """

    information: str
    times_ms: Mapping[str, float]


class InspectingWorker:
    """Loads stored engines.

    Raises:
        RunnerUnavailableError: TensorRT, cuda-python or a GPU is missing.
    """

    def __init__(self, module: str) -> None:
        self._trt = import_tensorrt(module)
        self._cuda = Cuda(import_cuda())

    def inspect(self, file: str, run: bool) -> Inspected:
        """Loads the engine in ``file``; executes it only with ``run``, on zeros.

        Raises:
            RunnerFailedError: it cannot be loaded or executed.
        """
        loaded = LoadedEngine(
            self._trt, self._cuda, make_logger(self._trt), Path(file).read_bytes()
        )
        return Inspected(loaded.inspect(), self._times_ms(loaded) if run else {})

    def _times_ms(self, loaded: LoadedEngine) -> Mapping[str, float]:
        """The median time of each layer, as TensorRT's profiler reports it."""
        profiler = _make_profiler(self._trt)
        runs = []
        with loaded.first.ready(self._zeros(loaded.engine)) as enqueue:
            loaded.first.context.profiler = profiler
            for _ in range(TIMED_RUNS):
                profiler.times_ms = {}
                enqueue()
                self._cuda.synchronise()
                runs.append(profiler.times_ms)
        return {name: statistics.median(run.get(name, 0.0) for run in runs) for name in runs[0]}

    def _zeros(self, engine: Any) -> Arrays:
        """Inputs of the shapes, and shape values, that the engine was tuned for."""
        arrays: dict[str, NDArray[Any]] = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            if engine.get_tensor_mode(name) != self._trt.TensorIOMode.INPUT:
                continue
            shape = tuple(engine.get_tensor_shape(name))
            if -1 in shape:
                shape = tuple(engine.get_tensor_profile_shape(name, 0)[1])
            arrays[name] = np.zeros(shape, np.float32)
            if engine.is_shape_inference_io(name):
                values = engine.get_tensor_profile_values(0, name)[1]
                arrays[name] = np.asarray(values).reshape(shape)
        return arrays


def _make_profiler(trt: Any) -> Any:
    """A profiler that adds up the times of one run by layer in ``times_ms``."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times_ms: dict[str, float] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times_ms[layer_name] = self.times_ms.get(layer_name, 0.0) + ms

    return Profiler()
