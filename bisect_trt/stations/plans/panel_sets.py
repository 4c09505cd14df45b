"""Sets of pins that pass a panel: the shortest prefix of a ranking, and what is left of it when no
pin can be spared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisect_trt.probe.result import ProbeResult
from bisect_trt.search import find_pins
from bisect_trt.search.one_minimal import one_minimal
from bisect_trt.search.prefix import longer, shortest_prefix
from bisect_trt.search.tolerance_share import Room
from bisect_trt.stations.draws.panel import Panel

_GLANCE = 4
"""Samples of each kind by which a prefix is told to be too short, or passed for now."""

SHRINK_PROBES = 32
"""Shrinking takes so many probes, and then one a pin to prove it: a count, and not the clock, so
that the same command gives the same answer. What they cannot bring to an end is not given, and a
prefix of so many pins that they could not is not shrunk: of two such sets that fresh draws passed,
one of 295 pins shrunk to 248 and one of 50 to 32, neither held on 95 % of unseen inputs."""

MOST_SHRUNK = SHRINK_PROBES - 2
"""Two of the probes are of all pins and of none."""


def shortest_passing(
    panel: Panel,
    ranking: Sequence[str],
    room: Room,
    shortest: int,
    strength: Sequence[float],
    guess: int = 0,
) -> int | None:
    """How many of the ranking, ``shortest`` at least, pass the panel with the room's margin by both
    emulators; all of it where only that passes, and without one, since what all pins leave is no
    rounding of a layer's.

    Most prefixes are told by the samples that did worst; what they pass all others must pass too.
    The second emulator, which opens a session for each plan, is asked about what is left. Draws
    that all pins miss are set aside where they stand in the way.

    Args:
        panel: asks about sets.
        ranking: the layers, most harmful first.
        room: the share of the tolerance that a prefix is held to.
        shortest: fewer are not asked for.
        strength: the mean square of each layer's effect, in the ranking's order.
        guess: so many are asked for first, if they are more.
    """

    def within(count: int) -> float:
        return room.limit if count == len(ranking) else room.kept

    def whole(count: int) -> bool:
        pins = frozenset(ranking[:count])
        passed = panel.ask(pins, within(count)).verdict.passed
        if passed:
            panel.keep(pins)
        return passed

    answered, begun = False, shortest

    def passes(count: int) -> bool:
        nonlocal answered
        # The first that passes is an answer at any time; all pins are one without being asked.
        answered = answered or count == len(ranking)
        if not answered:
            answered = whole(count)
            return answered
        return panel.ask(frozenset(ranking[:count]), within(count), _GLANCE).verdict.passed

    while True:
        length = shortest_prefix(len(ranking), passes, first=shortest, guess=guess)
        every = length == len(ranking)
        if length is None or (every and not whole(length)):
            if not panel.set_aside():
                return None
            shortest, answered = begun, False
        elif not every and not whole(length):
            shortest = length + 1
        else:
            second = panel.ask_second(frozenset(ranking[:length]), within(length))
            if second is None or second.verdict.passed or every:
                return length
            shortest = longer(strength, length, 1.0 / second.score)
            if shortest == len(ranking) and panel.set_aside():
                shortest = length
            panel.forget(below=shortest)
            answered = False


def shrunk(
    panel: Panel, ranked: Sequence[str], within: float, workers: int
) -> Mapping[str, ProbeResult] | None:
    """A part of ``ranked`` of which no single pin can be left out on the panel ``within`` that
    share of the tolerance, each with the probe that shows it; None where ``ranked`` does not keep
    to it itself, or nothing was proved in so many probes.

    Args:
        panel: asks about sets.
        ranked: the layers, most harmful first.
        within: the share.
        workers: probes at a time.
    """
    if not ranked:
        return {}
    if not panel.ask(frozenset(ranked), within).verdict.passed:
        return None
    suspicion = {name: float(len(ranked) - place) for place, name in enumerate(ranked)}
    found = find_pins(
        list(reversed(ranked)),
        lambda pins: panel.ask(pins, within).verdict,
        suspicion=suspicion,
        workers=workers,
        max_probes=SHRINK_PROBES,
    )
    if not found.complete:
        return None
    left = [name for name in reversed(ranked) if name in found.pinned]
    minimal = one_minimal(left, lambda p: panel.ask(p, within), lambda r: r.verdict.passed)
    second = panel.ask_second(minimal.pinned, within)
    if second is not None and not second.verdict.passed:
        return None
    return minimal.proof if set(minimal.proof) == minimal.pinned else None
