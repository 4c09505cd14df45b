"""Builds, parses and executes engines; runs in a process of its own."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bisect_trt.base.errors import RunnerUnavailableError
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.trt_names import NetworkLayer
from bisect_trt.runners.tensorrt.buffers import Cuda, import_cuda
from bisect_trt.runners.tensorrt.build import (
    build_engine,
    make_logger,
    network_layers,
    node_types,
    parse,
)
from bisect_trt.runners.tensorrt.execute import LoadedEngine, run_repeatedly
from bisect_trt.runners.tensorrt.readback import engine_layers
from bisect_trt.runners.tensorrt.records import (
    EngineAnswer,
    EngineLayer,
    EngineRequest,
    cache_file,
    import_tensorrt,
)


@dataclass(frozen=True)
class _Engine:
    """A loaded engine.

    ``renamed`` maps the model's names of inputs to the engine's where they differ. ``built`` is an
    answer without outputs: what building showed.
    """

    key: Hashable
    loaded: LoadedEngine
    renamed: Mapping[str, str]
    built: EngineAnswer

    def run(self, samples: Sequence[Arrays], repeats: int) -> EngineAnswer:
        """Returns the engine's answers to ``samples``."""
        began, loaded = time.perf_counter(), self.loaded
        # A single run needs no second context, nor its memory.
        contexts = [loaded.first.run, loaded.second.run] if repeats > 1 else [loaded.first.run]
        answers = run_repeatedly(
            [_named(sample, self.renamed) for sample in samples], contexts, repeats
        )
        seconds = {**self.built.seconds, "run": time.perf_counter() - began}
        return replace(self.built, answers=answers, seconds=seconds)


class EngineWorker:
    """Builds and runs engines, and keeps the last one; ``caches`` is a folder for caches."""

    def __init__(self, module: str | None, caches: str | None = None) -> None:
        self._trt = import_tensorrt(module)
        self._cuda = Cuda(import_cuda())
        self._caches = Path(caches) if caches is not None else None
        self._kept: _Engine | None = None

    def describe(self, weak: bool = False) -> dict[str, str]:
        """Returns the versions and the GPU; refuses a typing that this TensorRT lacks."""
        trt = self._trt
        name, flags = f"{trt.__name__} {trt.__version__}", trt.NetworkDefinitionCreationFlag
        if weak and not hasattr(trt.BuilderFlag, "FP16"):
            raise RunnerUnavailableError(f"{name} has no weak typing; use --typing strong")
        if not weak and not hasattr(flags, "STRONGLY_TYPED"):
            raise RunnerUnavailableError(f"{name} has no strong typing; use --typing weak")
        return {trt.__name__: str(trt.__version__), **self._cuda.device()}

    def evaluate(
        self, request: EngineRequest, samples: Sequence[Arrays], repeats: int
    ) -> EngineAnswer:
        """Builds the engine unless it is the kept one, and runs every sample."""
        if self._kept is None or self._kept.key != request.key:
            if self._kept is not None:  # freed first: two engines may not fit on the GPU
                self._kept.loaded.close()
                self._kept = None
            self._kept = self._opened(request, samples[0])
        return self._kept.run(samples, repeats)

    def again(self, key: Hashable, samples: Sequence[Arrays], repeats: int) -> EngineAnswer | None:
        """As :meth:`evaluate`, with the kept engine; None if that has another key."""
        if self._kept is None or self._kept.key != key:
            return None
        return self._kept.run(samples, repeats)

    def _opened(self, request: EngineRequest, sample: Arrays) -> _Engine:
        if self._caches is not None:
            self._caches.mkdir(parents=True, exist_ok=True)
        timing, kernels = (
            cache_file(self._caches, self._trt, request, kind) for kind in ("timing", "kernels")
        )
        built = build_engine(self._trt, request, timing)
        logger = make_logger(self._trt)
        loaded = LoadedEngine(
            self._trt, self._cuda, logger, built.engine, kernels=kernels, options=request.options
        )
        renamed = {original: parsed for parsed, original in built.inputs.items()}
        began, latency_ms = time.perf_counter(), math.nan
        if request.measure_latency:
            latency_ms = loaded.first.latency_ms(_named(sample, renamed))
        seconds = {**built.seconds, **loaded.seconds, "latency": time.perf_counter() - began}
        if kernels is not None:  # after a run, which may compile further kernels
            loaded.keep_kernels(kernels)
        answer = EngineAnswer(
            answers=(),
            seconds=seconds,
            engine_bytes=len(built.engine),
            latency_ms=latency_ms,
            types=built.types,
            layers=_layers_of(loaded),
            messages=list(dict.fromkeys((*built.messages, *logger.messages))),
        )
        return _Engine(request.key, loaded, renamed, answer)


def _named(sample: Arrays, renamed: Mapping[str, str]) -> Arrays:
    return {renamed.get(name, name): array for name, array in sample.items()}


def _layers_of(loaded: LoadedEngine) -> Sequence[EngineLayer]:
    """The layers of a built engine; empty if its description cannot be read."""
    # Names may be cut inside a character. The layers explain a result and decide nothing.
    try:
        return engine_layers(json.loads(loaded.inspect()))
    except (ValueError, KeyError, TypeError):
        return []


class BuildWorker:
    """Parses and builds, which needs no GPU."""

    def __init__(self, module: str | None) -> None:
        self._trt = import_tensorrt(module)

    def describe(self) -> dict[str, str]:
        """Returns TensorRT's version."""
        return {self._trt.__name__: str(self._trt.__version__)}

    def build(self, request: EngineRequest) -> int:
        """Builds the engine and returns its size."""
        return len(build_engine(self._trt, request).engine)

    def types(self, request: EngineRequest) -> dict[str, tuple[str, ...]]:
        """Returns the output types of each ONNX node after parsing."""
        logger = make_logger(self._trt)
        network = parse(self._trt, self._trt.Builder(logger), logger, request)
        return node_types(self._trt, network, request.producers)

    def network(self, model: bytes | str) -> tuple[NetworkLayer, ...]:
        """Returns the layers that TensorRT's parser makes of ``model``, its bytes or its path."""
        logger = make_logger(self._trt)
        request = EngineRequest(model, {}, tf32=False)
        return network_layers(parse(self._trt, self._trt.Builder(logger), logger, request))
