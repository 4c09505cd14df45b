"""Work on several threads whose answers are wanted in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from bisect_trt.core.cores import thread_count

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def in_order(work: Callable[[Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
    """The answer of each of ``items`` in order, as many of them in work as there may be threads.

    Args:
        work: called from several threads; it pays where it leaves Python for long.
        items: read as they are needed. A single one is worked on in the caller's thread.
    """
    stream = iter(items)
    first = list(islice(stream, 2))
    most = thread_count()
    if len(first) < 2 or most == 1:
        yield from map(work, first)
        yield from map(work, stream)
        return
    waiting: deque[Future[Answer]] = deque()
    with ThreadPoolExecutor(most) as pool:
        for several in (first, stream):
            for item in several:
                waiting.append(pool.submit(work, item))
                if len(waiting) > most:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
