"""Leave out each pin until nothing goes: then the last round's answers are the proof."""

from __future__ import annotations

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
    """A subset of ``pins`` of which no single one can be left out.

    Args:
        pins: a passing set, in the order in which its pins are tried.
        ask: the answer for a set; may raise to give up, and then nothing is known.
        passed: whether an answer is a clear pass.
        ahead: tells which sets will be asked for next, so that idle workers can begin; hardly any
            removal passes, so little of it is wasted.
        workers: how many sets to tell of at a time.
    """
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
