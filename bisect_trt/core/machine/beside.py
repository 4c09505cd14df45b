"""A piece of work in a thread of its own, beside what the caller does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

Answer = TypeVar("Answer")


class Beside:
    """Begins work whose answer is asked for later, a piece at a time."""

    def __init__(self) -> None:
        self._ended = Event()
        self._pool = ThreadPoolExecutor(1, "bisect-trt")

    def begin(self, work: Callable[[Callable[[], bool]], Answer]) -> Future[Answer]:
        """Begin ``work``.

        Args:
            work: asks what it is given now and then whether nobody wants its answer any more.
        """
        return self._pool.submit(work, self._ended.is_set)

    def close(self) -> None:
        """Nobody wants the answers any more; waits for none."""
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
