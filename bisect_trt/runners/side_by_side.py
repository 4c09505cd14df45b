"""Inferences side by side: most nodes of most networks have little work for a second core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from bisect_trt.core.cores import thread_count
from bisect_trt.core.memory import frees_activations
from bisect_trt.core.sample import Sample
from bisect_trt.graph.activations import inference_bytes
from bisect_trt.graph.graph import Graph

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_ROOM_BYTES = 128 << 20
"""What inferences that are made side by side may hold in all."""


class Room:
    """How many inferences of ``graph`` are made side by side: as many as there are threads, or as
    their activations have room for.

    Two on two cores take 0.43 of the time of one after the other where each has both cores
    (PP-OCRv4 det and rec, nodes of 60 us, on a busy machine), and as much for 20,000 nodes of 2 us.

    Args:
        graph: the model.
        threads: what they may use together; 0 is all that the process may.
    """

    def __init__(self, graph: Graph, threads: int = 0) -> None:
        self._graph, self._threads = graph, threads

    def at_once(self, sample: Sample) -> int:
        """One where it is unknown what an inference on ``sample`` holds, or memory is short."""
        if frees_activations():
            return 1
        each = inference_bytes(self._graph, sample.shapes)
        threads = self._threads or thread_count()
        return 1 if each is None else max(1, min(threads, _ROOM_BYTES // max(1, each)))


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
