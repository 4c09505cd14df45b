"""Which inferences run side by side, and which sessions are open at a time."""

from __future__ import annotations

from _thread import interrupt_main
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Lock, Timer
from typing import Protocol, TypeVar, runtime_checkable

from bisect_trt.base.limits import LARGE, on_pool, thread_count
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import weights_size
from bisect_trt.model.shapes import inference_bytes

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Shapes = Mapping[str, tuple[int, ...]]

ROOM_BYTES = 128 << 20
"""What the activations of inferences that are made side by side may take in all."""


def fitting(each: int, most: int) -> int:
    """How many inferences that hold ``each`` bytes have room side by side, of ``most``."""
    return max(1, min(most, ROOM_BYTES // max(1, each)))


class Headroom:
    """How many inferences of ``graph`` are made side by side: as many as there are threads, or as
    their activations have room for.
    """

    def __init__(self, graph: Graph, threads: int = 0) -> None:
        self._graph, self._threads = graph, threads
        self._largest: Shapes = {}

    def at_once(self, sample: Sample) -> int:
        """One where it is unknown what an inference on ``sample`` holds. Of samples of several
        shapes the largest says it for those after it.
        """
        self._largest = _larger(self._largest, sample.shapes)
        each = inference_bytes(self._graph, self._largest)
        return 1 if each is None else fitting(each, self._threads or thread_count())


def _larger(one: Shapes, other: Shapes) -> Shapes:
    """The larger size of each dimension; ``other`` where inputs or ranks are not the same."""
    if {n: len(s) for n, s in one.items()} != {n: len(s) for n, s in other.items()}:
        return dict(other)
    return {n: tuple(map(max, s, other[n])) for n, s in one.items()}


def side_by_side(
    work: Callable[[Item], Answer], items: Iterable[Item], at_once: Callable[[Item], int]
) -> Iterator[Answer]:
    """The answer of each of ``items`` in order, a few of them in work at a time. Where one cannot
    be read, those before it are answered first, as they are one after the other.
    """
    failed: list[Exception] = []
    stream = _until_failed(items, failed)
    for first in stream:
        most = at_once(first)
        if most == 1:
            yield work(first)
            yield from map(work, stream)
            break
        # Threads of its own: what is in work may ask for the shared ones.
        pool = ThreadPoolExecutor(most)
        try:
            yield from on_pool(pool, most, work, chain([first], stream), at_once)
        except GeneratorExit:
            _end_unread(pool)
            raise
        except BaseException:
            pool.shutdown()
            raise
        pool.shutdown()
    if failed:
        raise failed[0]


_INTERRUPT_AGAIN_S = 0.01


def _end_unread(pool: ThreadPoolExecutor) -> None:
    """Wait for what is in work where the reader went away.

    It may be the interpreter that ends the generator, which drops what is raised meanwhile, Ctrl-C
    too. So that is raised again a moment later.
    """
    try:
        pool.shutdown()
    except KeyboardInterrupt:
        again = Timer(_INTERRUPT_AGAIN_S, interrupt_main)
        again.daemon = True
        again.start()


def _until_failed(items: Iterable[Item], failed: list[Exception]) -> Iterator[Item]:
    """``items`` up to one that cannot be read; why it cannot is put into ``failed``."""
    try:
        yield from items
    except Exception as error:
        failed.append(error)


@runtime_checkable
class Holder(Protocol):
    """Has sessions open, each of which holds a copy of the model's weights."""

    def release(self) -> None:
        """Close the sessions; they are opened again when they are needed."""


class Turns:
    """Limits a large model to one session that holds a copy of its weights, to bound memory."""

    def __init__(self, graph: Graph) -> None:
        self._constants = graph.constants
        self.is_large = weights_size(graph.proto) >= LARGE
        self._holder: Holder | None = None
        self._lock = Lock()

    def take(self, holder: Holder) -> None:
        """Called before ``holder`` opens a session: the one before it closes its own, and the pages
        of mapped weights go back to the system, which reads them again when needed.
        """
        if not self.is_large:
            return
        with self._lock:
            before, self._holder = self._holder, holder
        if before is not None and before is not holder:
            before.release()
        self._constants.let_go()
