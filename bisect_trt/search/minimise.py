"""Makes a set one-minimal, and orders layers by their share of the tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class OneMinimal(Generic[Answer]):
    """``proof`` maps each of ``pinned`` to the answer without it; ``removed`` counts those gone."""

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
    """A subset of ``pins`` of which no single one can be left out."""
    pinned, removed = frozenset(pins), 0
    while True:
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
"""The part of what an observed ratio allows that is used: it moves a little from plan to plan."""


def tightened(
    limit: float,
    engine_score: float,
    emulated_score: float,
    floors: tuple[float, float] = (0.0, 0.0),
) -> float:
    """The limit to search within next, where a set found within ``limit`` misses on the engine.

    At most 0.7 of its headroom is left of it.
    """
    room = max(limit - floors[0], 0.0)
    if not math.isfinite(engine_score):
        return floors[0] + room / 2.0
    return min(floors[0] + 0.7 * room, matching_limit(engine_score, emulated_score, floors))


def matching_limit(
    engine_score: float, emulated_score: float, floors: tuple[float, float] = (0.0, 0.0)
) -> float:
    """What the emulator scores where the engine just meets the tolerance, with a margin.

    By the ratio of what they score above their floors.
    """
    emulated_floor, engine_floor = floors
    allowed = max(1.0 - engine_floor, 1e-9)  # a limit of nothing could not be kept by anybody
    excess = max(engine_score - engine_floor, 1e-9)
    seen = max(emulated_score - emulated_floor, 1e-9)
    return emulated_floor + SCALED_MARGIN * seen * allowed / excess


@dataclass(frozen=True)
class Headroom:
    """What pins decide of a score: between ``floor``, that of all pins, and the ``limit``.

    ``margin`` is the part of it that sets are held to. It is no part of the limit itself: a metric
    of the user's own may score 0.95 where nothing is wrong (an IoU of 1 where 0.95 is asked for).
    """

    limit: float
    floor: float
    margin: float

    @property
    def kept(self) -> float:
        """The share of the tolerance that sets are held to."""
        return self.within(self.margin)

    def within(self, part: float) -> float:
        """The share of the tolerance that leaves so much of the room used, from 0 to 1."""
        floor = min(self.floor, self.limit)
        return floor + part * (self.limit - floor)
