"""How many inferences run side by side, and which sessions of a large model stay open."""

from __future__ import annotations

from _thread import interrupt_main
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from threading import Lock, Timer
from typing import Protocol, TypeVar, runtime_checkable

from bisect_trt.base.limits import LARGE, thread_count
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import weights_size
from bisect_trt.model.shapes import inference_bytes

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Shapes = Mapping[str, tuple[int, ...]]

HEADROOM_BYTES = 128 << 20
"""Memory for the activations of all inferences that run side by side."""


class Headroom:
    """How many inferences of ``graph`` fit side by side: at most one for each thread."""

    def __init__(self, graph: Graph, threads: int = 0) -> None:
        self._graph, self._threads = graph, threads
        self._largest: Shapes = {}

    def at_once(self, sample: Sample) -> int:
        """Returns how many inferences on samples like ``sample`` fit; 1 if that is unknown."""
        # Inferences on larger samples may still run: the largest shapes so far count.
        self._largest = _elementwise_max(self._largest, sample.shapes)
        size = inference_bytes(self._graph, self._largest)
        if size is None:
            return 1
        return max(1, min(thread_count(self._threads), HEADROOM_BYTES // max(1, size)))


def _elementwise_max(one: Shapes, other: Shapes) -> Shapes:
    """The larger size of each dimension; ``other`` where inputs or ranks differ."""
    if {n: len(s) for n, s in one.items()} != {n: len(s) for n, s in other.items()}:
        return dict(other)
    return {n: tuple(map(max, s, other[n])) for n, s in one.items()}


def side_by_side(
    work: Callable[[Item], Answer], items: Iterable[Item], at_once: Callable[[Item], int]
) -> Iterator[Answer]:
    """Yields the answers in the order of ``items``, computed on up to ``at_once(item)`` threads."""
    # Where an item cannot be read, the answers before it come first, as in a serial loop.
    failed: list[Exception] = []
    stream = _until_failed(items, failed)
    for first in stream:
        threads = at_once(first)
        if threads == 1:
            yield work(first)
            yield from map(work, stream)
            break
        # A pool of its own: ``work`` may use the shared one, and would wait for itself.
        pool = ThreadPoolExecutor(threads)
        try:
            yield from _on_pool(pool, threads, work, chain([first], stream), at_once)
        except GeneratorExit:
            _shut_down_abandoned(pool)
            raise
        except BaseException:
            pool.shutdown()
            raise
        pool.shutdown()
    if failed:
        raise failed[0]


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


def _shut_down_abandoned(pool: ThreadPoolExecutor) -> None:
    """Waits for the pool after the reader abandoned the generator; Ctrl-C is not lost."""
    try:
        pool.shutdown()
    except KeyboardInterrupt:
        # The interpreter drops exceptions while it closes a generator: interrupt again afterwards.
        again = Timer(0.01, interrupt_main)
        again.daemon = True
        again.start()


def _until_failed(items: Iterable[Item], failed: list[Exception]) -> Iterator[Item]:
    """Yields ``items`` until reading one fails; appends that error to ``failed``."""
    try:
        yield from items
    except Exception as error:
        failed.append(error)


@runtime_checkable
class Holder(Protocol):
    """Has sessions open, each with a copy of the model's weights."""

    def release(self) -> None:
        """Closes the sessions; they are opened again when needed."""


class Turns:
    """Limits a large model to one holder of sessions at a time, to bound memory."""

    def __init__(self, graph: Graph) -> None:
        self._constants = graph.constants
        self.is_large = weights_size(graph.proto) >= LARGE
        self._holder: Holder | None = None
        self._lock = Lock()

    def take(self, holder: Holder) -> None:
        """Releases the sessions of the previous holder, before ``holder`` opens its own."""
        if not self.is_large:
            return
        with self._lock:
            previous, self._holder = self._holder, holder
        if previous is not None and previous is not holder:
            previous.release()
        # Pages of memory-mapped weights return to the system, which reads them again when needed.
        self._constants.let_go()
