"""A walk through the network that lets rounding errors cancel: each layer is decided by the error it really adds.

Where hundreds of layers share the blame, the error of a plan is mostly chance: every rounding adds a vector that no prediction
knows, because it hangs on the last bits of what came before. But in network order it can be seen. With the layers so far
decided and the rest exact, one look tells what lowering the next layer adds to the outputs. So a beam of partial plans walks
from the inputs to the outputs; each tries the next layer lowered and pinned, and those are kept that promise the smallest error
for the fewest pins: the error so far and what the plan of the rest is predicted to add. Errors that meet are made to cancel,
which a search over whole sets cannot do: there, each change upstream draws all later errors anew. (A beam search; that signs can be
chosen so that vectors nearly cancel is the vector balancing problem of Spencer 1977.)

The result holds for the arithmetic it was seen in, bit by bit. So every look is taken in each arithmetic that has to pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bisect_trt.search.spread import Mask, Spread, Vector, fewest_pins, peak, width

State = TypeVar("State")

PLANNED_WIDTH = 1.35
"""How wide the errors of the plan that the walk starts from may be, in tolerances, as predicted: the walk makes up for the rest."""

_UNSEEN = 0.04
"""A layer that alone errs by less (root mean square, in tolerances) is lowered without a look."""

_AHEAD = 0.5
"""How much of the predicted standard deviation of what is to come counts: what comes can be steered too."""

PRICES = (2.4, 1.9, 1.5, 1.1)
"""A pin must take away this many times the share of the errors that a pin of the plan does in the mean. The first finds the fewest
pins, but where errors resist it ends above the tolerance: then the next may do."""

_AIM, _BELOW = 0.95, 0.1
"""The error that is aimed at, in tolerances, and the share of its worth that getting further below has."""

_PLAN_STEPS = 40_000
_LATE, _WIDEST = 0.15, 4
"""Looks late in the network are cheap, so the beam grows: as the inverse of the share that is left and a bit, four times at most."""


@dataclass(frozen=True)
class Look:
    """What the outputs are when the layers decided so far are lowered or pinned and the rest is exact.

    ``errors`` at the watched elements, in tolerances, a row for each arithmetic; ``score`` the worst of more elements.
    """

    errors: NDArray[np.float64]
    score: float


@dataclass(frozen=True)
class Move(Generic[State]):
    """Run ``layer``, the next one of ``state``, lowered or exact; ``look`` asks for the outputs as well."""

    state: State
    layer: str
    lowered: bool
    look: bool


Follow = Callable[[Sequence[Move[State]]], list[tuple[State, Look | None]]]
"""Makes moves: the states they lead to, and the looks asked for; None where the outputs are not finite."""


@dataclass(frozen=True)
class Steered:
    """A set the walk arrived at, and the worst error it saw with it, in tolerances."""

    pinned: frozenset[str]
    score: float


@dataclass
class _Partial(Generic[State]):
    planned: Mask
    state: State
    look: Look
    mean: Vector
    variance: Vector

    @property
    def pins(self) -> int:
        return int((~self.planned).sum())


def steer(
    spread: Spread, must: frozenset[str], start: State, follow: Follow[State], *, beam_width: int, arithmetics: int, price: float
) -> list[Steered]:
    """Sets of pins that pass as far as the walk saw, fewest pins first, then those that do not, best first.

    ``must`` are pinned in any case, ``start`` is the state before the first layer, ``beam_width`` the size of the beam at the first layer,
    ``price`` one of :data:`PRICES`.
    Deterministic for given looks.
    """
    plan = fewest_pins(spread, must, PLANNED_WIDTH, _PLAN_STEPS)
    mean, variance = spread.totals(plan)
    nothing = Look(np.zeros((arithmetics, mean.size)), 0.0)
    beam = [_Partial(plan, start, nothing, mean, variance)]
    worth = price * _price(spread, must, plan)
    count = len(spread.layers)
    for layer, name in enumerate(spread.layers):
        unseen = name not in must and layer + 1 < count and spread.alone(layer) < _UNSEEN
        children = _children(spread, beam, layer, follow, name in must, unseen)
        if not unseen:
            share = 1.0 - layer / count + _LATE
            children = _best(children, worth, layer, min(_WIDEST * beam_width, int(beam_width / share)))
        beam = children
    found = [Steered(frozenset(n for n, low in zip(spread.layers, p.planned, strict=True) if not low), p.look.score) for p in beam]
    return sorted(set(found), key=lambda s: (s.score > 1.0, len(s.pinned) if s.score <= 1.0 else s.score, sorted(s.pinned)))


def _price(spread: Spread, must: frozenset[str], plan: Mask) -> float:
    """What a pin of ``plan`` takes away of the width of the errors, in the mean and in logarithms."""
    most = np.asarray([name not in must for name in spread.layers])
    gone = math.log(max(width(spread.totals(most)[1]) / PLANNED_WIDTH, 1.0 + 1e-6))
    return gone / max(1, int((~plan).sum()) - len(must))


def _children(
    spread: Spread, beam: Sequence[_Partial[State]], layer: int, follow: Follow[State], pinned: bool, unseen: bool
) -> list[_Partial[State]]:
    """Every partial plan with ``layer`` decided in each way that is open."""
    choices = (False,) if pinned else (True,) if unseen else (True, False)
    moves = [Move(p.state, spread.layers[layer], choice, choice and not unseen) for p in beam for choice in choices]
    parents = [p for p in beam for _ in choices]
    children = []
    for parent, move, (state, look) in zip(parents, moves, follow(moves), strict=True):
        if move.look and look is None:
            continue
        planned = parent.planned.copy()
        mean, variance = spread.decide(planned, layer, move.lowered)
        children.append(_Partial(planned, state, look or parent.look, parent.mean + mean, parent.variance + variance))
    return children


def _best(children: Sequence[_Partial[State]], price: float, layer: int, most: int) -> list[_Partial[State]]:
    """The ``most`` most promising ones; of those that cannot be told apart, the one with the fewest pins."""

    def cost(partial: _Partial[State]) -> float:
        errors = np.abs(partial.look.errors + partial.mean) + _AHEAD * np.sqrt(np.maximum(partial.variance, 0.0))
        error = math.log(max(float(peak(errors).max()), 1e-30) / _AIM)
        return (error if error > 0.0 else _BELOW * error) / price + partial.pins

    ranked = sorted(((cost(p), i) for i, p in enumerate(children)))
    kept: dict[tuple[bytes, bool], _Partial[State]] = {}
    for _, index in ranked:
        partial = children[index]
        kept.setdefault((partial.look.errors.tobytes(), bool(partial.planned[layer])), partial)
        if len(kept) == most:
            break
    return list(kept.values())
