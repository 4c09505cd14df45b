"""Inferences of small nodes side by side: ONNX Runtime computes each on one core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


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
