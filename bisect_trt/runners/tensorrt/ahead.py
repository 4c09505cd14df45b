"""Engines built in processes of their own while others compute, loaded when they are asked for.

Only TensorRT for RTX's are: its builder needs no GPU and times no kernels on one, so that what runs
beside it changes nothing of what it builds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from bisect_trt.core.scratch import scratch
from bisect_trt.runners.tensorrt.records import EngineRequest, Prebuilt
from bisect_trt.runners.workers.process import IsolatedWorker

TIMES_NOTHING = "tensorrt_rtx"
"""The module whose builder times nothing."""

_WORKER = "bisect_trt.runners.tensorrt.build_only:BuildWorker"


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
        self._workers = [IsolatedWorker(_WORKER, {"module": module}) for _ in range(most)]
        self._free: SimpleQueue[IsolatedWorker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._pool = ThreadPoolExecutor(most)
        self._folder = scratch("engines")
        self._begun: dict[Hashable, deque[Future[EngineRequest]]] = {}
        self._count = 0
        self._closed = False

    def begin(
        self,
        what: Hashable,
        asked: Callable[[], AbstractContextManager[EngineRequest]],
        copies: int = 1,
    ) -> None:
        """Build an engine as soon as a process is free.

        Args:
            what: tells it from others.
            asked: gives the request; called in another thread.
            copies: how many shall be there, or in work, until they are taken.
        """
        begun = self._begun.setdefault(what, deque())
        while len(begun) < copies:
            path = Path(self._folder.name) / f"{self._count}.engine"
            self._count += 1
            begun.append(self._pool.submit(self._build, asked, path))

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

    def give_up(self) -> None:
        """Drop what was begun and not taken; a build in work goes on to its end."""
        for futures in self._begun.values():
            for future in futures:
                if not future.cancel():
                    future.add_done_callback(_removed)
            futures.clear()

    def close(self) -> None:
        """End the processes, and remove what nobody took."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._pool.shutdown()
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()

    def _build(
        self, asked: Callable[[], AbstractContextManager[EngineRequest]], path: Path
    ) -> EngineRequest:
        worker = self._free.get()
        try:
            with asked() as request:
                if self._closed:
                    raise CancelledError
                known = self._kernels(request)
                arguments = request, str(path), str(known) if known else None
                prebuilt: Prebuilt = worker.call(
                    "build_into", *arguments, timeout_s=self._timeout_s
                )
            return replace(request, model=b"", prebuilt=prebuilt)
        finally:
            self._free.put(worker)


def _removed(done: Future[EngineRequest]) -> None:
    """Remove the engine of a build that nobody waits for."""
    if done.exception() is None and (ahead := done.result().prebuilt) is not None:
        ahead.remove()
