"""Which inferences run side by side, and which sessions take turns."""

from __future__ import annotations

from _thread import interrupt_main
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from itertools import chain
from threading import Lock, Timer
from typing import Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

from bisect_trt.base.limits import LARGE, MANY, give_back, habits, on_pool, thread_count
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import weights_size
from bisect_trt.model.shapes import inference_bytes

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Shapes = Mapping[str, tuple[int, ...]]

_A_MOMENT_S = 0.01

ROOM_BYTES = 128 << 20
"""What inferences that are made side by side may hold in all."""


def fitting(each: int, most: int) -> int:
    """How many inferences that hold ``each`` bytes have room side by side, of ``most``."""
    return max(1, min(most, ROOM_BYTES // max(1, each)))


class Headroom:
    """How many inferences of ``graph`` are made side by side: as many as there are threads, or as
    their activations have room for.

    Two on two cores take 0.43 of the time of one after the other where each has both cores
    (PP-OCRv4 det and rec, nodes of 60 us, on a busy machine), and 0.6 for 20,000 nodes of 2 us.
    """

    def __init__(self, graph: Graph, threads: int = 0) -> None:
        self._graph, self._threads = graph, threads
        self._largest: Shapes = {}

    def at_once(self, sample: Sample) -> int:
        """One where it is unknown what an inference on ``sample`` holds, or memory is short. Of
        samples of several shapes the largest says it for those after it.
        """
        if habits().frees_activations:
            return 1
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
    stream = until_failed(items, failed)
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


def _end_unread(pool: ThreadPoolExecutor) -> None:
    """Wait for what is in work where the reader went away: it may be the interpreter that ends the
    generator, which drops what is raised meanwhile, Ctrl-C too. So that comes again, a moment
    after it.
    """
    try:
        pool.shutdown()
    except KeyboardInterrupt:
        again = Timer(_A_MOMENT_S, interrupt_main)
        again.daemon = True
        again.start()


def until_failed(items: Iterable[Item], failed: list[Exception]) -> Iterator[Item]:
    """``items`` up to one that cannot be read; why it cannot is put into ``failed``."""
    try:
        yield from items
    except Exception as error:
        failed.append(error)


MANY_NODES = 5000
"""A session takes 4 to 12 kB a node, those that hold every plan 20: from so many on they are not
open at a time, which costs seconds of a run's minutes and spares a third of its memory."""


class Sessions(Enum):
    """What sessions are of: the reference, every plan (``SHARED`` by many segments, or not), the
    plan that the emulator has in work, or the one that the second emulator was asked about.
    """

    REFERENCE = auto()
    EVERY_PLAN = auto()
    SHARED = auto()
    ONE_PLAN = auto()
    SECOND = auto()


_APART = {
    Sessions.REFERENCE: (Sessions.SECOND, Sessions.SHARED),
    Sessions.EVERY_PLAN: (Sessions.ONE_PLAN, Sessions.SECOND),
    Sessions.ONE_PLAN: (Sessions.EVERY_PLAN,),
    Sessions.SECOND: (Sessions.EVERY_PLAN, Sessions.SHARED, Sessions.REFERENCE),
}
"""Of many nodes, what is let go before sessions are opened: what is not asked beside them, and what
is opened in no time. For those nothing is let go."""


@runtime_checkable
class Holder(Protocol):
    """Who opens sessions, which hold a copy of the weights in the order that kernels like; or holds
    what they are fed with.
    """

    def release(self) -> None:
        """Let its own go; they are opened again when they are needed."""


class Turns:
    """Lets the sessions of one model be open together, or where its weights are many in turn.

    ``one_at_a_time`` says which; ``is_large`` that even one copy, kept while others work, would be
    too much. ``many_nodes`` says that some are open in turn (:meth:`make_room`).
    """

    def __init__(self, graph: Graph) -> None:
        self._constants = graph.constants
        size = weights_size(graph.proto)
        self.one_at_a_time, self.is_large = size >= MANY, size >= LARGE
        self.many_nodes = len(graph.proto.graph.node) >= MANY_NODES
        self._holder: Holder | None = None
        self._holders = {sessions: WeakSet[Holder]() for sessions in Sessions}
        self._lock = Lock()

    @property
    def apart(self) -> bool:
        """Whether the reference's session and the second emulator's are open in turn."""
        return self.one_at_a_time or self.many_nodes

    def take(self, holder: Holder) -> None:
        """Called before ``holder`` opens a session: the one before it lets its own go, and the
        pages of mapped weights go back to the system, which reads them again when needed.
        """
        if not self.one_at_a_time:
            return
        with self._lock:
            before, self._holder = self._holder, holder
        if before is not None and before is not holder:
            before.release()
        self._constants.let_go()

    def introduce(self, holder: Holder, sessions: Sessions) -> None:
        """Hear what the sessions of ``holder`` are of."""
        with self._lock:
            self._holders[sessions].add(holder)

    def make_room(self, sessions: Sessions) -> None:
        """Called before ``sessions`` are opened: of many nodes others are let go."""
        if not self.many_nodes:
            return
        with self._lock:  # releasing may wait for whoever runs
            holders = [holder for other in _APART[sessions] for holder in self._holders[other]]
        for holder in holders:
            holder.release()
        give_back()

    def trim(self) -> None:
        """Called after work that took much for a while, such as opening sessions: of many nodes
        that goes back to the system.
        """
        if self.many_nodes:
            give_back()
