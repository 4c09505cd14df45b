"""Runs inferences side by side, as many as memory allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

from bisect_trt.base.limits import Limits, thread_count
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import weights_size
from bisect_trt.model.shapes import inference_bytes

Item = TypeVar("Item")
Answer = TypeVar("Answer")

HEADROOM_BYTES = 128 << 20
"""Memory for the activations of all inferences that run side by side."""


def is_large(graph: Graph, large_bytes: int = Limits.large_bytes) -> bool:
    """True if the weights take ``large_bytes`` or more: sessions are closed after use."""
    return weights_size(graph.proto) >= large_bytes


class Headroom:
    """Counts how many inferences of ``graph`` fit side by side: at most one for each thread.

    Their activations share ``room_bytes``. With weights of ``large_bytes`` or more it is one.
    """

    def __init__(
        self,
        graph: Graph,
        threads: int = 0,
        *,
        large_bytes: int = Limits.large_bytes,
        room_bytes: int = HEADROOM_BYTES,
    ) -> None:
        # An abandoned inference keeps its session: of a large model only one may run.
        self._graph, self._threads = graph, 1 if is_large(graph, large_bytes) else threads
        self._room_bytes = room_bytes

    def at_once(self, sample: Sample) -> int:
        """Returns how many inferences on samples like ``sample`` fit; 1 if that is unknown."""
        size = inference_bytes(self._graph, sample.shapes)
        if size is None:
            return 1
        return max(1, min(thread_count(self._threads), self._room_bytes // max(1, size)))


def side_by_side(
    work: Callable[[Item], Answer], items: Iterable[Item], at_once: Callable[[Item], int]
) -> Iterator[Answer]:
    """Yields the answers in the order of ``items``, computed on up to ``at_once(item)`` threads."""
    stream = iter(items)
    for first in stream:
        threads = at_once(first)
        if threads == 1:
            yield work(first)
            yield from map(work, stream)
            return
        # A pool of its own: ``work`` may use the shared one, and would wait for itself.
        pool = ThreadPoolExecutor(threads)
        try:
            yield from _on_pool(pool, threads, work, chain([first], stream), at_once)
        finally:
            # Without a wait: the interpreter drops a Ctrl-C that comes while it closes a generator.
            pool.shutdown(wait=False)


def _on_pool(
    pool: ThreadPoolExecutor,
    most: int,
    work: Callable[[Item], Answer],
    items: Iterable[Item],
    at_once: Callable[[Item], int],
) -> Iterator[Answer]:
    """The answer of each of ``items`` in order; closing the iterator cancels the rest.

    At most ``most`` run at a time, or fewer from an item on whose ``at_once`` is smaller.
    """
    waiting: deque[Future[Answer]] = deque()
    fit = most
    try:
        for item in items:
            fit = min(fit, at_once(item))
            while waiting and fit < most and len(waiting) >= fit:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, item))
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
