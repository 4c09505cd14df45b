"""Engines built in processes of their own while others compute, loaded when they are asked for.

Only TensorRT for RTX's are: its builder needs no GPU and times no kernels on one, so that what runs
beside it changes nothing of what it builds.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from bisect_trt.core.disk.scratch import scratch
from bisect_trt.core.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.runners.tensorrt.build_only import WORKER
from bisect_trt.runners.tensorrt.records import Built, EngineRequest, Prebuilt
from bisect_trt.runners.workers.process import IsolatedWorker

TIMES_NOTHING = "tensorrt_rtx"
"""The module whose builder times nothing."""

_AGAIN_S = 0.1


class EnginesAhead:
    """Builds what will be asked for soon, a few engines at a time.

    Args:
        module: ``tensorrt_rtx``.
        timeout_s: the seconds that one build may take.
        most: processes at a time.
        kernels: the file with the kernels that were compiled for such an engine before.
    """

    def __init__(
        self,
        module: str,
        timeout_s: float | None,
        most: int,
        kernels: Callable[[EngineRequest], Path | None] = lambda _: None,
    ) -> None:
        self._timeout_s, self._kernels = timeout_s, kernels
        self._workers = [IsolatedWorker(WORKER, {"module": module}) for _ in range(most)]
        self._free: SimpleQueue[IsolatedWorker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._pool = ThreadPoolExecutor(most)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._begun: dict[Hashable, deque[Future[EngineRequest]]] = {}
        self._all: list[Future[EngineRequest]] = []
        self._closed = False

    def begin(
        self,
        what: Hashable,
        asked: Callable[[], AbstractContextManager[EngineRequest]],
        copies: int = 1,
        *,
        spare: bool = False,
    ) -> None:
        """Build an engine as soon as a process is free.

        Args:
            what: tells it from others.
            asked: gives the request; called in another thread.
            copies: how many shall be there, or in work, until they are taken.
            spare: whether it gives way to others, as all copies but the first do.
        """
        if self._folder is None:  # not before there is a run's folder to make it in
            self._folder = scratch("engines")
        begun = self._begun.setdefault(what, deque())
        while len(begun) < copies:
            path = Path(self._folder.name) / f"{len(self._all)}.engine"
            begun.append(self._pool.submit(self._build, asked, path, spare or bool(begun)))
            self._all.append(begun[-1])

    def take(self, what: Hashable) -> EngineRequest | None:
        """The request for ``what``, with the engine; waits for it. None where none was begun, or
        it failed: whoever builds it then will say why. Each is given once.
        """
        begun = self._begun.get(what)
        if not begun:
            return None
        try:
            return begun.popleft().result()
        except (Exception, CancelledError):
            return None

    def give_up(self, but: Hashable) -> None:
        """Drop what was begun and not taken, ``but`` one; a build in work goes on to its end."""
        for what, futures in self._begun.items():
            if what == but:
                continue
            for future in futures:
                if not future.cancel():
                    future.add_done_callback(_removed)
            futures.clear()

    def close(self) -> None:
        """End the processes, and remove what nobody took."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self._all):
            for worker in self._workers:  # one may have been started after the last time
                worker.kill()
            wait(self._all, timeout=_AGAIN_S)
        self._pool.shutdown()
        for worker in self._workers:
            worker.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _build(
        self, asked: Callable[[], AbstractContextManager[EngineRequest]], path: Path, spare: bool
    ) -> EngineRequest:
        """``spare`` if it will be asked for after another one, or not at all."""
        worker = self._free.get()
        try:
            if spare:
                worker.call("give_way", timeout_s=self._timeout_s)
            with asked() as request:
                if self._closed:
                    raise CancelledError
                built: Built = worker.call(
                    "build_into", request, str(path), timeout_s=self._timeout_s
                )
            request = replace(request, model=b"")
            kernels = self._compiled(worker, request, path)
            return replace(request, prebuilt=Prebuilt(str(path), built, kernels))
        finally:
            worker.close()  # with the memory of the GPU that it keeps
            self._free.put(worker)

    def _compiled(self, worker: IsolatedWorker, request: EngineRequest, path: Path) -> str:
        """The file of the engine's kernels; "" where they could not be compiled: whoever runs the
        engine does it then, or says why it cannot.
        """
        known = self._kernels(request)
        before, beside = str(known) if known else None, len(self._workers)
        arguments = str(path), request.options, before, beside
        if self._closed:
            raise CancelledError
        try:
            found: str = worker.call("compile", *arguments, timeout_s=self._timeout_s)
        except (RunnerFailedError, RunnerUnavailableError):
            return ""
        return found


def _removed(done: Future[EngineRequest]) -> None:
    """Remove the engine of a build that nobody waits for."""
    if done.exception() is None and (ahead := done.result().prebuilt) is not None:
        ahead.remove()
