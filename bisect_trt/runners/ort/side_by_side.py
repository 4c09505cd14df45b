"""Inferences side by side: most nodes of most networks have little work for a second core."""

from __future__ import annotations

from _thread import interrupt_main
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Timer
from typing import TypeVar

from bisect_trt.core.machine.cores import thread_count
from bisect_trt.core.machine.session_habits import habits
from bisect_trt.core.machine.threads import on_pool
from bisect_trt.core.sample import Sample
from bisect_trt.graph.inspection.activations import inference_bytes
from bisect_trt.graph.model.graph import Graph

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Shapes = Mapping[str, tuple[int, ...]]

_A_MOMENT_S = 0.01

ROOM_BYTES = 128 << 20
"""What inferences that are made side by side may hold in all."""


def fitting(each: int, most: int) -> int:
    """How many inferences that hold ``each`` bytes have room side by side, of ``most``."""
    return max(1, min(most, ROOM_BYTES // max(1, each)))


class Room:
    """How many inferences of ``graph`` are made side by side: as many as there are threads, or as
    their activations have room for.

    Two on two cores take 0.43 of the time of one after the other where each has both cores
    (PP-OCRv4 det and rec, nodes of 60 us, on a busy machine), and 0.6 for 20,000 nodes of 2 us.

    Args:
        graph: the model.
        threads: what they may use together; 0 is all that the process may.
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

    Args:
        work: called from several threads; whoever reads no further wastes what is in work.
        items: read as they are needed, in the caller's thread.
        at_once: how many of an item's kind; the least that was said counts from there on. Where the
            first says one, none is begun before it is asked for.
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
