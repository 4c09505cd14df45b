"""Engines built and not run: what does not build can be looked into without a GPU, where the
builder needs none (TensorRT for RTX), and what will be run can be built beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph.files.runtime_forms import file_form
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.runners.tensorrt.build import build_engine, make_logger
from bisect_trt.runners.tensorrt.cuda import Cuda, import_cuda
from bisect_trt.runners.tensorrt.execute import LoadedEngine
from bisect_trt.runners.tensorrt.module import import_tensorrt
from bisect_trt.runners.tensorrt.profile import profile_of, values_of
from bisect_trt.runners.tensorrt.records import Built, EngineOptions, EngineRequest
from bisect_trt.runners.workers.process import IsolatedWorker

_ROOM_TIMES, _ROOM_BYTES = 3, 4 << 30
"""Of the GPU's memory, of which the engine in use and an emulator take their parts meanwhile."""

_MILDER = 10
"""Steps of 19."""

WORKER = "bisect_trt.runners.tensorrt.build_only:BuildWorker"


class BuildOnlyRunner:
    """Builds a model in a child process and gives no outputs.

    Args:
        graph: an FP32 model.
        samples: the inputs that the engine's profile has to cover.
        module: ``tensorrt`` or ``tensorrt_rtx``; None takes whichever imports.
        timeout_s: the seconds that a build may take.

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
        self._worker = IsolatedWorker(WORKER, {"module": module})
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

        Args:
            plan: what to build.
            samples: not run.

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

    def build_into(self, request: EngineRequest, path: str) -> Built:
        """Write the engine to ``path``.

        Returns:
            What building it showed, without the engine.

        Raises:
            RunnerFailedError: BUILD_FAILED.
        """
        built = build_engine(self._trt, request)
        Path(path).write_bytes(built.engine)
        return replace(built, engine=b"")

    def give_way(self) -> None:
        """Let other processes have the cores first, from here on."""
        with suppress(AttributeError):  # no POSIX
            os.nice(_MILDER)
        # Of a session of its own, as this process has, Linux may weigh the session in its place.
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_MILDER), encoding="ascii")

    def compile(self, path: str, options: EngineOptions, known: str | None, beside: int) -> str:
        """Compile the kernels of the engine in ``path`` where a GPU has room: making a context does
        it, in 2 to 10 s for an engine that is new.

        Args:
            path: of the engine.
            options: how it shall be run.
            known: kernels that were compiled before, if there is such a file.
            beside: how many processes may do so at a time.

        Returns:
            The file that holds them; "" where the GPU has no room.

        Raises:
            RunnerFailedError: the engine cannot be loaded.
            RunnerUnavailableError: there is no GPU.
        """
        cuda, size = Cuda(import_cuda()), Path(path).stat().st_size
        if cuda.free_bytes() <= beside * _ROOM_TIMES * size + _ROOM_BYTES:
            return ""
        logger, before = make_logger(self._trt), Path(known) if known else None
        engine = Path(path).read_bytes()
        loaded = LoadedEngine(self._trt, cuda, logger, engine, before, options)
        kernels = Path(f"{path}.kernels")
        loaded.keep_kernels(kernels)
        return str(kernels) if kernels.exists() else ""
