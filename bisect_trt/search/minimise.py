"""Makes a set one-minimal, and orders layers by their share of the tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class OneMinimal(Generic[Answer]):
    """``proof`` maps each of ``pinned`` to the answer for the set without it, which does not pass;
    ``removed`` counts the pins that went.
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
"""A scaled search aims a tenth below what the observed ratio asks for: the ratio moves a little
from plan to plan."""

_STEP = 0.7
"""A limit that did not do is reduced at least to this part of its room."""


def tightened(
    limit: float,
    engine_score: float,
    emulated_score: float,
    floors: tuple[float, float] = (0.0, 0.0),
) -> float:
    """The limit to search within next, where a set found within ``limit`` misses on the engine."""
    room = max(limit - floors[0], 0.0)
    if not math.isfinite(engine_score):
        return floors[0] + room / 2.0
    return min(floors[0] + _STEP * room, matching_limit(engine_score, emulated_score, floors))


def matching_limit(
    engine_score: float, emulated_score: float, floors: tuple[float, float] = (0.0, 0.0)
) -> float:
    """What the emulator scores where the engine just meets the tolerance, by the ratio seen above
    the floors; with a margin.
    """
    emulated_floor, engine_floor = floors
    allowed = max(1.0 - engine_floor, 1e-9)  # a limit of nothing could not be kept by anybody
    excess = max(engine_score - engine_floor, 1e-9)
    seen = max(emulated_score - emulated_floor, 1e-9)
    return emulated_floor + SCALED_MARGIN * seen * allowed / excess


@dataclass(frozen=True)
class Headroom:
    """What pins decide of a score: between ``floor``, that of all pins, and ``limit``, the share of
    the tolerance that may be used. ``margin`` is the part of it that sets are held to.

    A margin is a part of that room, and not of the limit: a metric of the user's own may score 0.95
    where nothing is wrong (an IoU of 1 where 0.95 is asked for), or 1 (the same text or not), and
    to keep below that all layers were pinned.
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
