"""Builds engines into files, and loads and runs them; works in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bisect_trt.metrics.arrays import Arrays
from bisect_trt.runners.tensorrt.buffers import Cuda, import_cuda
from bisect_trt.runners.tensorrt.build import build_engine, make_logger
from bisect_trt.runners.tensorrt.execute import REPEATS, Counted, LoadedEngine, run_repeatedly
from bisect_trt.runners.tensorrt.records import EngineRequest, import_tensorrt

WORKER = "tests.fuzz.engine_worker:EngineWorker"
"""What a process of engines makes; see :class:`bisect_trt.runners.process.IsolatedWorker`."""


@dataclass(frozen=True)
class Saved:
    """An engine in the file ``path``.

    ``renamed`` maps the model's names of inputs to the engine's where they differ. ``seconds`` is
    the time of the build.
    """

    path: str
    renamed: Mapping[str, str]
    seconds: float


class EngineWorker:
    """The engines of one process."""

    def __init__(self) -> None:
        self._trt = import_tensorrt()
        self._cuda: Cuda | None = None

    def describe(self) -> str:
        """TensorRT and the GPU, in words.

        Raises:
            RunnerUnavailableError: there is no GPU.
        """
        return ", ".join([self.name(), *self._opened().device().values()])

    def name(self) -> str:
        """TensorRT's name and version, for which no GPU is needed."""
        return f"{self._trt.__name__} {self._trt.__version__}"

    def build(self, request: EngineRequest, path: str) -> Saved:
        """Builds an engine into the file ``path``.

        Raises:
            RunnerFailedError: TensorRT cannot.
        """
        built = build_engine(self._trt, request)
        Path(path).write_bytes(built.engine)
        renamed = {original: parsed for parsed, original in built.inputs.items()}
        return Saved(path, renamed, sum(built.seconds.values()))

    def run(self, saved: Saved, feeds: Sequence[Arrays]) -> tuple[list[Counted], float]:
        """Each input's different answers with their counts, and the seconds that all took.

        Raises:
            RunnerFailedError: the engine cannot be loaded or executed.
            RunnerUnavailableError: there is no GPU.
        """
        cuda, began = self._opened(), time.perf_counter()
        # Without a file of kernels: each process compiles its own.
        content = Path(saved.path).read_bytes()
        loaded = LoadedEngine(self._trt, cuda, make_logger(self._trt), content)
        try:
            named = [{saved.renamed.get(n, n): a for n, a in feed.items()} for feed in feeds]
            contexts = [loaded.first.run, loaded.second.run]
            answers = run_repeatedly(named, contexts, REPEATS)
        finally:
            loaded.close()
        return answers, time.perf_counter() - began

    def _opened(self) -> Cuda:
        """The stream of this process, made at the first use."""
        if self._cuda is None:
            self._cuda = Cuda(import_cuda())
        return self._cuda
