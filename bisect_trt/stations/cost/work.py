"""How much work a run will be, counted by the search's own figures: how many inferences of each
kind, whatever one of them takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bisect_trt.stations.baselines.traced_inputs import MOST_TRACED, ranges_asked
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.each_alone import ranked_count
from bisect_trt.stations.cause.sensitivity import affordable
from bisect_trt.stations.draws.fresh_test import asked, planned_test, set_size
from bisect_trt.stations.draws.panel import panel_draws
from bisect_trt.stations.draws.redrawn import movable
from bisect_trt.stations.draws.varied import wants_variants
from bisect_trt.stations.plans.frontier import frontier_size
from bisect_trt.stations.plans.panel_sets import MOST_SHRUNK, SHRINK_PROBES

_BASELINES = 3
_USUAL = 0.25
"""The share of a ranking that a prefix usually needs."""

_FAILING, _PASSING = 0.1, 0.25
"""The part of a panel that a failing probe sees, and of the shrinking probes those that pass."""

_PROBES_A_PIN = 8
"""To grow a set of k pins takes about four probes a pin, to shrink and prove it as many again."""

FITTED_SHARE = 0.02
"""The pins of a set that is fitted to the given inputs, of all layers."""


@dataclass(frozen=True)
class Work:
    """Counts of what a run executes: ``traces`` of all layers, ``emulations`` by the first
    emulator, ``drawn`` samples that were made (each with a reference and an emulation that are not
    counted there), ``second_asked`` inferences of the second emulator, ``rows`` of single layers,
    ``probes`` sets asked about.
    """

    traces: int
    emulations: int
    drawn: int
    second_asked: int
    rows: int
    probes: int


def expected_probes(pins: int) -> int:
    """How many sets are asked about to find, shrink and prove a fitted one of so many pins."""
    return 2 * _BASELINES + _PROBES_A_PIN * pins


def expected_sets(case: Case) -> int:
    """How many sets of pins a search asks about, baselines apart.

    Args:
        case: the layers, and whether a set is fitted to the given inputs.
    """
    layers = len(case.names)
    if case.settings.fitted:
        return _PROBES_A_PIN * max(2, round(FITTED_SHARE * layers))
    return round(2 * _steps(layers)) + _shrunk(layers)


def _steps(layers: int) -> float:
    """Of the search for a prefix."""
    return math.log2(max(2.0, _USUAL * layers))


def _shrunk(layers: int) -> int:
    """The sets that are asked about to make a prefix smaller."""
    return SHRINK_PROBES if _USUAL * layers <= MOST_SHRUNK else 0


def expected_work(
    case: Case, *, passes: bool, hopeless: bool, probe_seconds: float, usual_seconds: float
) -> Work:
    """What a run of ``case`` is expected to execute.

    Args:
        case: the layers, the inputs and what is asked for.
        passes: whether everything lowered passes: then little is searched.
        hopeless: whether strict FP32 misses: then a run ends there.
        probe_seconds: what one emulated inference takes; it decides how many layers are measured.
        usual_seconds: what one usually takes; it decides the number of draws.
    """
    given, size, layers = len(case.samples), set_size(case), len(case.names)
    test = asked(case, planned_test(case, 0, usual_seconds, last=case.settings.fitted))
    kinds = movable(case, emulated=True) + wants_variants(case)
    draws = kinds * test.enough * size
    held_out = len(case.holdout)
    emulations = _BASELINES * given + held_out
    # One that is asked for ranges goes through the network once, not by two histories.
    traces = min(given, MOST_TRACED) + ranges_asked(case, usual_seconds) // 2
    if hopeless:
        return Work(traces, emulations, 0, 0, 0, _BASELINES)
    if case.settings.fitted:
        if passes:
            return Work(traces, emulations, draws, draws + 2 * given, 0, _BASELINES)
        rows = affordable(layers, probe_seconds * given) * given
        probes = 2 * _BASELINES + expected_sets(case)
        return Work(traces, emulations + probes * given, draws, draws + 2 * given, rows, probes)
    made = kinds * panel_draws(case, usual_seconds)
    if passes:
        return Work(traces, emulations, made + draws, draws + 2 * given, 0, _BASELINES)
    panel, steps = given + made, _steps(layers)
    prefix = panel * (1.0 + steps / 2.0) + _FAILING * panel * 1.5 * steps
    shrinking = _shrunk(layers) * panel * (_PASSING + (1.0 - _PASSING) * _FAILING)
    frontier_rows, seen = frontier_size(layers, usual_seconds)
    emulations += round(prefix + shrinking) + frontier_rows * (seen + held_out)
    ranked = ranked_count(len(case.layers))
    rows = ranked * affordable(layers, probe_seconds * ranked)
    probes = 2 * _BASELINES + expected_sets(case) + frontier_rows
    return Work(traces, emulations, made + draws + seen, draws + 2 * given, rows, probes)
