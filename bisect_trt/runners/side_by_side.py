"""Inferences of small nodes side by side: ONNX Runtime computes each on one core."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from bisect_trt.core.cores import thread_count

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_SMALL_NODE_S = 3e-5
"""A node that takes less has no work for a second core, and its tensors are small. Nodes of 10 us
gain half of the time on two cores (20,000 nodes), those of 60 us nothing (PP-OCRv4 det)."""


class Pace:
    """How long the nodes of a model of ``nodes`` nodes take, as its inferences show."""

    def __init__(self, nodes: int) -> None:
        self._nodes = max(1, nodes)
        self._node_s = float("inf")

    def timed(self, infer: Callable[[], Answer]) -> Answer:
        """What ``infer`` gives; the fastest inference counts."""
        began = time.perf_counter()
        answer = infer()
        self._node_s = min(self._node_s, (time.perf_counter() - began) / self._nodes)
        return answer

    @property
    def at_once(self) -> int:
        """How many inferences gain from being made side by side; one until one was timed."""
        return thread_count() if self._node_s < _SMALL_NODE_S else 1


def side_by_side(
    work: Callable[[Item], Answer], items: Iterable[Item], at_once: int
) -> Iterator[Answer]:
    """The answer of each of ``items`` in order, a few of them in work at a time.

    Args:
        work: called from several threads; whoever reads no further wastes what is in work.
        items: read as they are needed, in the caller's thread.
        at_once: how many; with one, none is begun before it is asked for.
    """
    if at_once == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[Answer]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > at_once:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
