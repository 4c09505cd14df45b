"""Grows a small set of pins where many layers share the blame, on predicted error vectors.

To first order the error of a plan is the sum of its reduced layers' errors, each measured alone.
So an evaluation's error vector minus a layer's predicts the error with that layer pinned, signs and
cancellations included. Each step evaluates the few best predictions and goes on from the best
measured vector, so that errors of prediction do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Trial:
    """An evaluated set: whether it passes, its score, and its signed errors in tolerances."""

    pinned: frozenset[str]
    passed: bool
    score: float
    vector: Vector | None


Evaluate = Callable[[Sequence[frozenset[str]]], list[Trial]]


def grow(
    start: Trial,
    sensitivities: Mapping[str, Vector],
    order: float,
    evaluate: Evaluate,
    *,
    max_trials: int,
) -> Trial:
    """The first passing set grown from ``start``, or the best one after ``max_trials``."""
    names = [n for n in sensitivities if np.isfinite(sensitivities[n]).all()]
    place = {name: number for number, name in enumerate(sensitivities)}
    matrix = np.asarray([sensitivities[n] for n in names], np.float32)
    here, best, spent = start, start, 0
    while (
        not here.passed
        and spent < max_trials
        and here.vector is not None
        and np.isfinite(here.vector).all()
    ):
        rest = np.asarray([i for i, n in enumerate(names) if n not in here.pinned], np.int64)
        if rest.size == 0:
            break
        # Four sets are evaluated, since the best prediction need not be the best set.
        firsts = rest[np.argsort(_norms(here.vector - matrix[rest], order), kind="stable")[:4]]
        extra = len(here.pinned) // 6  # large sets grow in larger steps
        wanted = [
            here.pinned.union(
                names[i] for i in _extend(int(f), extra, here.vector, matrix, rest, order)
            )
            for f in firsts
        ]
        trials = evaluate(wanted)
        spent += len(trials)
        # Ties go to the first in the network, as names must not decide.
        here = min(trials, key=lambda t: (t.score, sorted(place.get(n, -1) for n in t.pinned)))
        if here.score < best.score:
            best = here
    return here if here.passed else best


def _extend(
    first: int,
    extra: int,
    vector: Vector,
    matrix: Vector,
    rest: NDArray[np.int64],
    order: float,
) -> list[int]:
    """The layer ``first`` and the ``extra`` ones that the prediction takes next."""
    chosen, predicted = [first], vector - matrix[first]
    left = rest[rest != first]
    for _ in range(min(extra, left.size)):
        following = int(left[int(np.argmin(_norms(predicted - matrix[left], order)))])
        chosen.append(following)
        predicted = predicted - matrix[following]
        left = left[left != following]
    return chosen


def _norms(vectors: Vector, order: float) -> NDArray[np.float64]:
    """The norm of each row."""
    size = np.abs(vectors)
    # Scaled by the peak: eighth powers of large errors overflow.
    peak = np.maximum(size.max(axis=1, keepdims=True), 1e-30)
    norms: NDArray[np.float64] = peak[:, 0] * ((size / peak) ** order).sum(axis=1) ** (1.0 / order)
    return norms
