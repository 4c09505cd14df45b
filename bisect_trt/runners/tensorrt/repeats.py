"""One run of an engine is no observation: every sample is run several times, in two contexts and
in another order, and as often as it takes where the answers are not all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.confidence import draws_needed

Counted = tuple[tuple[Arrays, int], ...]
Run = Callable[[Arrays], Arrays]

REPEATS = 3
"""How often each sample is run at least: forwards, backwards in the other context, forwards."""

ENOUGH = draws_needed(0.95)
"""Runs of which all must meet the requirement to bound the share that does by 95 %: 59."""

_MOST_S = 30.0
_MOST_ANSWERS = 16


class Answers:
    """The answers that one sample was given, each once with how often it came."""

    def __init__(self) -> None:
        self._found: list[tuple[Arrays, int]] = []

    def add(self, outputs: Arrays) -> None:
        """One more run's outputs."""
        for place, (known, count) in enumerate(self._found):
            if same_bits(known, outputs):
                self._found[place] = (known, count + 1)
                return
        self._found.append((outputs, 1))

    @property
    def counted(self) -> Counted:
        """The most frequent first; the earliest of several that are."""
        return tuple(sorted(self._found, key=lambda answer: -answer[1]))

    @property
    def differ(self) -> bool:
        """Whether there are two."""
        return len(self._found) > 1


def same_bits(one: Arrays, other: Arrays) -> bool:
    """Whether two runs gave the same outputs to the last bit; NaNs of one pattern are the same."""
    return one.keys() == other.keys() and all(
        array.shape == other[name].shape
        and array.dtype == other[name].dtype
        and bool(np.array_equal(_bytes_of(array), _bytes_of(other[name])))
        for name, array in one.items()
    )


def run_repeatedly(
    samples: Sequence[Arrays], contexts: Sequence[Run], repeats: int
) -> list[Counted]:
    """Each sample ``repeats`` times, every other time in the next context and in reverse order.

    Where an answer differs from another to the same sample, all are run on until there are enough
    runs to bound the share of bad ones, for half a minute at most.

    Args:
        samples: inputs by name.
        contexts: what runs one sample.
        repeats: passes over the samples.

    Returns:
        For each sample its answers with their counts, the most frequent first.
    """
    answers = [Answers() for _ in samples]
    deadline = time.perf_counter() + _MOST_S
    passes = 0
    while passes < repeats or (
        repeats > 1
        and any(a.differ for a in answers)
        and passes < max(2 * repeats, -(-ENOUGH // len(samples)))
        and max(len(a.counted) for a in answers) < _MOST_ANSWERS
        and time.perf_counter() < deadline
    ):
        order = range(len(samples)) if passes % 2 == 0 else reversed(range(len(samples)))
        run = contexts[passes % len(contexts)]
        for number in order:
            answers[number].add(run(samples[number]))
        passes += 1
    return [a.counted for a in answers]


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
