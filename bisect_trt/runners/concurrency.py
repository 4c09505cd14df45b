"""How many inferences run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

from bisect_trt.base.limits import LARGE, on_pool, thread_count
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import weights_size
from bisect_trt.model.shapes import inference_bytes

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Shapes = Mapping[str, tuple[int, ...]]

HEADROOM_BYTES = 128 << 20
"""Memory for the activations of all inferences that run side by side."""


def is_large(graph: Graph) -> bool:
    """True if another copy of the weights matters: sessions are closed after use."""
    return weights_size(graph.proto) >= LARGE


class Headroom:
    """How many inferences of ``graph`` fit side by side: at most one for each thread."""

    def __init__(self, graph: Graph, threads: int = 0) -> None:
        # An abandoned inference keeps its session: of a large model only one may run.
        self._graph, self._threads = graph, 1 if is_large(graph) else threads
        self._largest: Shapes = {}

    def at_once(self, sample: Sample) -> int:
        """Returns how many inferences on samples like ``sample`` fit; 1 if that is unknown."""
        # Inferences on larger samples may still run: the largest shapes so far count.
        self._largest = _elementwise_max(self._largest, sample.shapes)
        size = inference_bytes(self._graph, self._largest)
        if size is None:
            return 1
        return max(1, min(self._threads or thread_count(), HEADROOM_BYTES // max(1, size)))


def _elementwise_max(one: Shapes, other: Shapes) -> Shapes:
    """The larger size of each dimension; ``other`` where inputs or ranks differ."""
    if {n: len(s) for n, s in one.items()} != {n: len(s) for n, s in other.items()}:
        return dict(other)
    return {n: tuple(map(max, s, other[n])) for n, s in one.items()}


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
            yield from on_pool(pool, threads, work, chain([first], stream), at_once)
        finally:
            # Without a wait: the interpreter drops a Ctrl-C that comes while it closes a generator.
            pool.shutdown(wait=False)
