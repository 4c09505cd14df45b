"""The shortest passing prefix of a ranking: the sets are nested, so there is little to overfit."""

from __future__ import annotations

from collections.abc import Callable

_PARTS = 1000
"""A set of fewer than twice as many layers is found exactly."""


def shortest_prefix(length: int, passes: Callable[[int], bool], *, first: int = 0) -> int | None:
    """The fewest of ``length`` ranked layers that pass pinned, ``first`` at least.

    Gallops in doubling steps, then bisects, as if more pins never hurt; where they do, the answer
    is a prefix that passes and whose predecessor was seen to fail. Of thousands of layers it is
    found to a thousandth: what is left costs as many questions again.

    Args:
        length: how many layers there are.
        passes: whether the first k pass.
        first: fewer are not asked for.

    Returns:
        The number of layers, None if not even all pass.
    """
    low, high, step = first - 1, first, 1  # low fails (or is not asked for), high is open
    while not passes(high):
        if high >= length:
            return None
        low, high = high, min(length, high + step)
        step *= 2
    while high - low > max(1, high // _PARTS):
        middle = (low + high) // 2
        if passes(middle):
            high = middle
        else:
            low = middle
    return high
