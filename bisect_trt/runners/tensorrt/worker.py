"""Builds and executes engines in a process of their own."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import file_form
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.process import IsolatedWorker
from bisect_trt.runners.tensorrt.buffers import Cuda, import_cuda
from bisect_trt.runners.tensorrt.build import build_engine, make_logger, node_types, parse
from bisect_trt.runners.tensorrt.execute import LoadedEngine
from bisect_trt.runners.tensorrt.profile import profile_of, values_of
from bisect_trt.runners.tensorrt.readback import engine_layers
from bisect_trt.runners.tensorrt.records import (
    Built,
    EngineAnswer,
    EngineLayer,
    EngineRequest,
    cache_file,
    import_tensorrt,
    run_repeatedly,
)


@dataclass(frozen=True)
class _Engine:
    """An engine that is loaded, and what building it showed, the ``size`` bytes of it apart."""

    key: str
    built: Built
    loaded: LoadedEngine
    messages: Sequence[tuple[str, str]]
    latency_ms: float
    layers: Sequence[EngineLayer]
    size: int


class EngineWorker:
    """Builds and runs engines; the last one is kept, for further samples of the same plan.

    ``caches`` is a folder for timing and kernel caches, one for each configuration.
    """

    def __init__(self, module: str | None, caches: str | None = None) -> None:
        self._trt = import_tensorrt(module)
        self._cuda = Cuda(import_cuda())
        self._caches = Path(caches) if caches is not None else None
        self._kept: _Engine | None = None

    def describe(self, weak: bool = False) -> dict[str, str]:
        """Versions and the GPU.

        Raises:
            RunnerUnavailableError: this TensorRT has no such typing.
        """
        trt = self._trt
        called, strong = f"{trt.__name__} {trt.__version__}", trt.NetworkDefinitionCreationFlag
        if weak and not hasattr(trt.BuilderFlag, "FP16"):
            raise RunnerUnavailableError(f"{called} has no weak typing; use --typing strong")
        if not weak and not hasattr(strong, "STRONGLY_TYPED"):
            raise RunnerUnavailableError(f"{called} has no strong typing; use --typing weak")
        return {self._trt.__name__: str(self._trt.__version__), **self._cuda.device()}

    def evaluate(
        self,
        request: EngineRequest,
        samples: Sequence[Mapping[str, NDArray[Any]]],
        repeats: int = 1,
    ) -> EngineAnswer:
        """Build the engine, or take the one kept, and run every sample.

        Raises:
            RunnerFailedError: with a verdict of its own.
        """
        began = time.perf_counter()
        return self._run(self._engine(request, samples[0]), request, samples, repeats, began)

    def again(
        self,
        request: EngineRequest,
        samples: Sequence[Mapping[str, NDArray[Any]]],
        repeats: int = 1,
    ) -> EngineAnswer | None:
        """As :meth:`evaluation` of the engine kept; None where that is another one."""
        if self._kept is None or self._kept.key != _key(request):
            return None
        return self._run(self._kept, request, samples, repeats, time.perf_counter())

    def _run(
        self,
        engine: _Engine,
        request: EngineRequest,
        samples: Sequence[Mapping[str, NDArray[Any]]],
        repeats: int,
        began: float,
    ) -> EngineAnswer:
        """Every sample, ``repeats`` times at least; ``began`` is when the work for it did."""
        ready = time.perf_counter()
        loaded, samples = engine.loaded, [_named(engine.built, s) for s in samples]
        contexts = [loaded.first.run, loaded.second.run] if repeats > 1 else [loaded.first.run]
        answers = run_repeatedly(samples, contexts, repeats)
        ran = time.perf_counter()
        debug = [loaded.first.debug_values(arrays) for arrays in samples] if request.debug else []
        seconds = {**engine.built.seconds, **loaded.seconds, "run": ran - ready}
        seconds |= {"latency": 0.0, "child": time.perf_counter() - began}
        built = engine.built
        return EngineAnswer(
            answers,
            seconds,
            engine.size,
            engine.latency_ms,
            built.types,
            engine.layers,
            engine.messages,
            debug,
        )

    def _engine(self, request: EngineRequest, sample: Mapping[str, NDArray[Any]]) -> _Engine:
        key = _key(request)
        if self._kept is not None and self._kept.key == key:
            return self._kept
        if self._kept is not None:  # two engines would be on the GPU for a moment
            self._kept.loaded.close()
            self._kept = None
        built = build_engine(self._trt, request, self._cache(request, "timing"))
        logger = make_logger(self._trt)
        kernels = self._cache(request, "kernels")
        loaded = LoadedEngine(self._trt, self._cuda, logger, built.engine, kernels, request.options)
        latency = float("nan")
        if request.measure_latency:
            latency = loaded.first.latency_ms(_named(built, sample))
        if kernels is not None:
            loaded.keep_kernels(kernels)
        messages = [*built.messages, *(m for m in logger.messages if m not in built.messages)]
        layers = _layers_of(loaded)
        size, known = len(built.engine), replace(built, engine=b"")
        self._kept = _Engine(key, known, loaded, messages, latency, layers, size)
        return self._kept

    def _cache(self, request: EngineRequest, kind: str) -> Path | None:
        if self._caches is not None:
            self._caches.mkdir(parents=True, exist_ok=True)
        module = self._trt
        return cache_file(self._caches, module.__name__, str(module.__version__), request, kind)


def _named(built: Built, sample: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """``sample`` by the engine's names."""
    called = {ours: its for its, ours in built.inputs.items()}
    return {called.get(name, name): array for name, array in sample.items()} if called else sample


def _layers_of(loaded: LoadedEngine) -> Sequence[EngineLayer]:
    """What the engine says that it is made of; nothing where that cannot be read, for it explains
    and decides nothing: names may be cut in the middle of a character.
    """
    try:
        return engine_layers(json.loads(loaded.inspect()))
    except (ValueError, KeyError, TypeError):
        return []


def _key(request: EngineRequest) -> str:
    """What the engine is made of."""
    model = request.model if isinstance(request.model, bytes) else request.model.encode()
    known = request.key or hashlib.sha256(model).hexdigest()
    flags = repr(
        (
            request.tf32,
            request.weak,
            request.debug,
            sorted(request.profile.items()),
            request.options,
        )
    )
    return hashlib.sha256((known + flags).encode()).hexdigest()


BUILD_WORKER = "bisect_trt.runners.tensorrt.worker:BuildWorker"


class BuildOnlyRunner:
    """Builds a model in a child process and gives no outputs.

    Raises:
        RunnerUnavailableError: TensorRT is missing.
    """

    name = "tensorrt-build"

    def __init__(
        self,
        graph: Graph,
        samples: Sequence[Sample],
        module: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._graph = graph
        self._profile = profile_of(graph.proto, samples, ())
        self._values = values_of(samples)
        self._timeout_s = timeout_s
        self._worker = IsolatedWorker(BUILD_WORKER, {"module": module})
        try:
            described: dict[str, str] = self._worker.call("describe", timeout_s=timeout_s)
        except RunnerFailedError:
            self._worker.close()
            raise
        self.versions: Mapping[str, str] = described

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Nothing, once the engine is built.

        Raises:
            RunnerFailedError: it does not build.
        """
        with file_form(to_typed(self._graph, plan)) as form:
            request = EngineRequest(
                form.source,
                self._profile,
                plan.base is Precision.TF32,
                values=self._values,
                key=form.key,
            )
            self._worker.call("build", request, timeout_s=self._timeout_s)
        return iter(())

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        """None."""
        return {}

    def close(self) -> None:
        """End the child process."""
        self._worker.close()


class BuildWorker:
    """The child's side: TensorRT, which needs a GPU to compile kernels alone."""

    def __init__(self, module: str | None) -> None:
        self._trt = import_tensorrt(module)

    def describe(self) -> dict[str, str]:
        """The version."""
        return {self._trt.__name__: str(self._trt.__version__)}

    def build(self, request: EngineRequest) -> int:
        """The engine's bytes.

        Raises:
            RunnerFailedError: BUILD_FAILED.
        """
        return len(build_engine(self._trt, request).engine)


class ParsingWorker:
    """TensorRT's parser."""

    def __init__(self, module: str | None) -> None:
        self._trt = import_tensorrt(module)

    def types(self, request: EngineRequest) -> dict[str, Sequence[str]]:
        """The output types of each ONNX node after parsing.

        Raises:
            RunnerFailedError: BUILD_FAILED.
        """
        logger = make_logger(self._trt)
        builder = self._trt.Builder(logger)
        return dict(
            node_types(self._trt, parse(self._trt, builder, logger, request), request.producers)
        )
