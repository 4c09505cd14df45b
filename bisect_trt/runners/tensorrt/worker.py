"""What runs in the child process: TensorRT and the GPU; requests in, plain records out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bisect_trt.runners.tensorrt.build import build_engine, make_logger
from bisect_trt.runners.tensorrt.cuda import Cuda, import_cuda
from bisect_trt.runners.tensorrt.execute import LoadedEngine
from bisect_trt.runners.tensorrt.module import import_tensorrt
from bisect_trt.runners.tensorrt.readback import engine_layers
from bisect_trt.runners.tensorrt.records import EngineAnswer, EngineRequest


class EngineWorker:
    """Builds and runs engines. ``caches`` is a folder for timing and kernel caches, one for each
    configuration.
    """

    def __init__(self, module: str | None, caches: str | None = None) -> None:
        self._trt = import_tensorrt(module)
        self._cuda = Cuda(import_cuda())
        self._caches = Path(caches) if caches is not None else None

    def describe(self) -> dict[str, str]:
        """Versions and the GPU."""
        return {self._trt.__name__: str(self._trt.__version__), **self._cuda.device()}

    def probe(
        self, request: EngineRequest, samples: Sequence[Mapping[str, NDArray[Any]]]
    ) -> EngineAnswer:
        """Build the engine, run every sample.

        Raises:
            RunnerFailedError: with a verdict of its own.
        """
        began = time.perf_counter()
        built = build_engine(self._trt, request, self._cache(request, "timing"))
        logger = make_logger(self._trt)
        kernels = self._cache(request, "kernels")
        loaded = LoadedEngine(self._trt, self._cuda, logger, built.engine, kernels)
        ready = time.perf_counter()
        outputs = [loaded.run(arrays) for arrays in samples]
        ran = time.perf_counter()
        debug = [loaded.debug_values(arrays) for arrays in samples] if request.debug else []
        latency = loaded.latency_ms(samples[0]) if request.measure_latency else float("nan")
        if kernels is not None:
            loaded.keep_kernels(kernels)
        seconds = {
            **built.seconds,
            **loaded.seconds,
            "run": ran - ready,
            "latency": time.perf_counter() - ran,
        }
        seconds["child"] = time.perf_counter() - began
        layers = engine_layers(json.loads(loaded.inspect()))
        messages = [*built.messages, *(m for m in logger.messages if m not in built.messages)]
        return EngineAnswer(
            outputs, seconds, len(built.engine), latency, built.types, layers, messages, debug
        )

    def _cache(self, request: EngineRequest, kind: str) -> Path | None:
        """One cache for each configuration: timing caches depend on the flags."""
        if self._caches is None:
            return None
        self._caches.mkdir(parents=True, exist_ok=True)
        typing = request.weak.base if request.weak else "strong"
        flags = f"{'tf32' if request.tf32 else 'strict'}-{typing}"
        return self._caches / f"{self._trt.__name__}-{self._trt.__version__}-{flags}.{kind}"
