"""Makes a set one-minimal, and matches the emulator's tolerance to an engine's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class OneMinimal(Generic[Answer]):
    """A one-minimal set: ``proof`` has the answer without each of ``pinned``.

    ``removed`` counts the layers left out.
    """

    pinned: frozenset[str]
    proof: dict[str, Answer]
    removed: int


def one_minimal(
    pins: Sequence[str],
    ask: Callable[[frozenset[str]], Answer],
    passed: Callable[[Answer], bool],
    *,
    ahead: Callable[[list[frozenset[str]]], object] | None = None,
    workers: int = 1,
) -> OneMinimal[Answer]:
    """A subset of ``pins`` that fails without any single one; ``ahead`` prepares next sets."""
    pinned, removed = frozenset(pins), 0
    while True:
        # A removal voids the proofs so far: they were found beside one layer more.
        proof: dict[str, Answer] = {}
        names = [name for name in pins if name in pinned]
        for place, name in enumerate(names):
            if ahead is not None and place % workers == 0:
                ahead([pinned - {n} for n in names[place : place + workers]])
            answer = ask(pinned - {name})
            if passed(answer):
                pinned, proof, removed = pinned - {name}, {}, removed + 1
            else:
                proof[name] = answer
        if len(proof) == len(pinned):
            return OneMinimal(pinned, proof, removed)


SCALED_MARGIN = 0.9
"""The safety factor on an observed ratio of scores, which varies from plan to plan."""


def tightened(
    limit: float,
    engine_score: float,
    emulated_score: float,
    floors: tuple[float, float] = (0.0, 0.0),
) -> float:
    """The next limit of the search after a set within ``limit`` failed on the engine.

    At most 0.7 of the headroom remains. ``floors`` are the emulator's and the engine's scores with
    everything pinned.
    """
    room = max(limit - floors[0], 0.0)
    if not math.isfinite(engine_score):
        return floors[0] + room / 2.0
    return min(floors[0] + 0.7 * room, matching_limit(engine_score, emulated_score, floors))


def matching_limit(
    engine_score: float, emulated_score: float, floors: tuple[float, float] = (0.0, 0.0)
) -> float:
    """The emulator's score at which the engine just meets the tolerance, with a margin.

    It is extrapolated by the ratio of the scores above their floors.
    """
    emulated_floor, engine_floor = floors
    allowed = max(1.0 - engine_floor, 1e-9)  # with a limit of 0 nothing would pass
    engine_excess = max(engine_score - engine_floor, 1e-9)
    emulated_excess = max(emulated_score - emulated_floor, 1e-9)
    return emulated_floor + SCALED_MARGIN * emulated_excess * allowed / engine_excess


@dataclass(frozen=True)
class Headroom:
    """The range of scores that pins decide: from ``floor``, with all pinned, to ``limit``.

    ``margin``: the part of the range that the search may use.
    """

    # A part of the range, not of the limit: a user's metric may score 0.95 where nothing is wrong
    # (an IoU of 1 where 0.95 is required).

    limit: float
    floor: float
    margin: float

    @property
    def kept(self) -> float:
        """The score that sets must meet in the search."""
        return self.within(self.margin)

    def within(self, part: float) -> float:
        """The score at ``part`` of the range, from 0 to 1."""
        floor = min(self.floor, self.limit)
        return floor + part * (self.limit - floor)
