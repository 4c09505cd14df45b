"""Work on several threads whose answers are wanted in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import chain, islice
from typing import TypeVar

from bisect_trt.core.machine.cores import thread_count

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def in_order(work: Callable[[Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
    """The answer of each of ``items`` in order, as many of them in work as there may be threads.

    Args:
        work: called from several threads; it pays where it leaves Python for long. It asks for no
            such work itself, which would wait for the threads that it holds, and waits for no lock
            whose holder may ask for some.
        items: read as they are needed. A single one is worked on in the caller's thread.
    """
    stream = iter(items)
    first = list(islice(stream, 2))
    most = thread_count()
    if len(first) < 2 or most == 1:
        yield from map(work, chain(first, stream))
    else:
        pool = _pool(most, os.getpid())
        yield from on_pool(pool, most, work, chain(first, stream), lambda _: most)


def on_pool(
    pool: ThreadPoolExecutor,
    most: int,
    work: Callable[[Item], Answer],
    items: Iterable[Item],
    at_once: Callable[[Item], int],
) -> Iterator[Answer]:
    """The answer of each of ``items`` in order; what is not asked for any more is not begun.

    Args:
        pool: does the work.
        most: its threads.
        work: called from them.
        items: read as they are needed, in the caller's thread.
        at_once: how many of an item's kind may be in work; the least that was said counts from
            there on.
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


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Kept: starting sixteen threads takes as long as many a piece of work. Of a process each, for
    one that forks takes none along.
    """
    return ThreadPoolExecutor(threads, "bisect-trt")
