"""The steered walk on a world where every error is chance, but can be seen in network order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bisect_trt.search.spread import Rounding, Spread, fewest_pins
from bisect_trt.search.steer import PRICES, Look, Move, steer

LAYERS, ELEMENTS, JUDGES = 120, 6, 2


@dataclass(frozen=True)
class State:
    lowered: tuple[bool, ...]
    errors: np.ndarray


class World:
    """Lowering a layer adds a vector that hangs on all that was decided before; ``sizes`` are their standard deviations."""

    def __init__(self, seed: int, sizes: np.ndarray, broken: frozenset[int] = frozenset()) -> None:
        self.names = [f"l{i}" for i in range(len(sizes))]
        self.seed, self.sizes, self.broken = seed, sizes, broken
        self.looks = 0

    @property
    def start(self) -> State:
        return State((), np.zeros((JUDGES, ELEMENTS)))

    def after(self, state: State, lowered: bool) -> State:
        layer, errors = len(state.lowered), state.errors
        if lowered:
            history = int.from_bytes(np.packbits(state.lowered or (False,)).tobytes(), "little")
            chance = np.random.default_rng([self.seed, layer, history])
            errors = errors + self.sizes[layer] * chance.standard_normal((JUDGES, ELEMENTS))
            if layer in self.broken:
                errors = errors + np.inf
        return State((*state.lowered, lowered), errors)

    def follow(self, moves):
        made = []
        for move in moves:
            assert move.layer == self.names[len(move.state.lowered)]
            state = self.after(move.state, move.lowered)
            finite = bool(np.isfinite(state.errors).all())
            self.looks += move.look
            look = Look(state.errors, float(np.abs(state.errors).max())) if move.look and finite else None
            made.append((state, look))
        return made

    def replay(self, pinned: frozenset[str]) -> float:
        state = self.start
        for name in self.names:
            state = self.after(state, name not in pinned)
        return float(np.abs(state.errors).max())

    def spread(self) -> Spread:
        nothing = np.zeros(ELEMENTS)
        return Spread(self.names, [Rounding((n,), (), nothing, nothing + s * s) for n, s in zip(self.names, self.sizes, strict=True)])


def sizes(seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(size=LAYERS, sigma=0.5)
    return drawn / np.sqrt((drawn**2).sum()) * 3.0


def test_it_finds_what_no_plan_can_promise() -> None:
    steered, promised, lucky = [], [], 0
    for seed in range(4):
        world = World(seed, sizes(seed))
        found = steer(world.spread(), frozenset(), world.start, world.follow, beam_width=16, arithmetics=JUDGES, price=PRICES[0])
        assert 0.5 < found[0].score <= 1.0, "passes, and leaves little of the tolerance unused"
        for one in found:
            assert world.replay(one.pinned) == one.score, "the walk saw what the set gives"
        steered.append(len(found[0].pinned))
        # Two standard deviations at most: what a plan needs that is to pass without a look.
        promised.append(int((~fewest_pins(world.spread(), frozenset(), 0.5, 20_000)).sum()))
        # Whole sets of as many pins, each as good a plan as there is: hardly one passes by chance.
        random = np.random.default_rng(seed)
        ranked = np.argsort(-world.sizes * np.exp(0.05 * random.standard_normal((400, LAYERS))), axis=1)[:, : steered[-1]]
        lucky += sum(world.replay(frozenset(world.names[i] for i in row)) <= 1.0 for row in ranked)
    assert sum(steered) <= 0.65 * sum(promised), (steered, promised)
    assert lucky <= 0.01 * 4 * 400


def test_looks_are_bounded_and_the_walk_is_deterministic() -> None:
    first, second = World(0, sizes(0)), World(0, sizes(0))
    one = steer(first.spread(), frozenset(), first.start, first.follow, beam_width=4, arithmetics=JUDGES, price=PRICES[0])
    two = steer(second.spread(), frozenset(), second.start, second.follow, beam_width=4, arithmetics=JUDGES, price=PRICES[0])
    assert one == two
    assert first.looks <= LAYERS * 4 * 4


def test_layers_that_must_be_pinned_and_those_that_break_the_outputs_are() -> None:
    world = World(1, sizes(1), broken=frozenset({40}))
    found = steer(world.spread(), frozenset({"l7"}), world.start, world.follow, beam_width=4, arithmetics=JUDGES, price=PRICES[0])
    assert found and all({"l7", "l40"} <= s.pinned for s in found)


def test_small_layers_are_lowered_without_a_look() -> None:
    tiny = sizes(2)
    tiny[10:110] = 1e-4
    world = World(2, tiny)
    found = steer(world.spread(), frozenset(), world.start, world.follow, beam_width=4, arithmetics=JUDGES, price=PRICES[0])
    assert found[0].pinned.isdisjoint(world.names[10:110])
    assert world.looks <= (LAYERS - 100) * 4 * 4
    assert Move(world.start, "l0", True, False).look is False
