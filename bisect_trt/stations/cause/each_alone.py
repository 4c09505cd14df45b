"""What each layer does alone: on which inputs that is measured, and what their table misses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample, evenly
from bisect_trt.stations.baselines.baselines import Baselines
from bisect_trt.stations.baselines.layer_errors import trace_layers
from bisect_trt.stations.baselines.traced_inputs import MOST_TRACED
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.sensitivity import Sensitivity, measure_sensitivity, time_allowed
from bisect_trt.stations.cause.unseen import Unseen
from bisect_trt.stations.draws.evidence import all_in_fp32, told_by_pins
from bisect_trt.stations.draws.fresh_test import set_size

_MOST_RANKED, _FEWEST_RANKED, _RANKED_ROWS = 8, 2, 800
"""Layers are ranked over as many samples as make so many rows: by count and not by the clock, so
that the same command gives the same answer. Four or eight samples rank the text models' layers no
better than two (benchmarks/results/search.md)."""

_ROW = 0.5
"""A row takes about half an inference: it starts at its layer, and some are made side by side."""

_NEAREST, _NEAR, _MOST_ASKED = 2, 0.5, 64
"""So many layers are asked about on all given inputs, from this share of the tolerance on, where
the inputs are no more than that: it decides what the cause is called, and no pin."""

_SHARE_OF_TIME = 0.4
"""Of what a run's budget leaves for the search."""


def measure_each_alone(
    case: Case,
    bench: Bench,
    emulated: Baselines,
    unseen: Unseen | None,
    suspicion: Mapping[str, float],
    heavy: frozenset[str],
) -> Sensitivity:
    """What each layer does alone, of those for which there is time: the most suspicious first.

    Beyond the given inputs what overflows by itself, or by a constant as the ``heavy`` ones do, is
    pinned meanwhile, for the others' effects to be seen.

    Args:
        case: the layers and what is asked for.
        bench: what runs each.
        emulated: the baselines, and the layers' table.
        unseen: what everything lowered shows beyond the given inputs; None where only these count.
        suspicion: by layer, the larger the sooner.
        heavy: layers with a constant beyond the range.
    """
    samples = ranked_on(case, bench, unseen)
    seconds = emulated.probe_seconds(len(case.samples))
    # By the clock a busy machine's rows would not fit: of 279 layers 95 were measured where there
    # is time for all of them, and all were pinned where 6 are enough.
    usual = min(seconds, bench.pace.usual_seconds)
    budget_s = time_allowed(len(case.names) * len(samples) * usual * _ROW)
    budget_s = min(budget_s, max(0.0, _SHARE_OF_TIME * bench.time.left_s))
    lowered = case.base
    if unseen is not None:
        finite = emulated.layers["introduced_finite"].astype(bool)
        overflowing = heavy.union(str(n) for n in emulated.layers.loc[~finite, "layer"])
        lowered = lowered.with_pins(overflowing.intersection(case.names))
    return measure_sensitivity(case, bench, suspicion, samples, lowered, budget_s, seconds)


def nearest_on_all(
    case: Case, bench: Bench, base: PrecisionPlan, sensitivity: Sensitivity
) -> Sensitivity:
    """``sensitivity`` with the scores on all given inputs of the layers that come nearest to
    missing the requirement alone on those that were measured, where none was seen to: the one on
    which a layer does may not be among so few.

    Args:
        case: the given inputs, each of which must meet the requirement.
        bench: what runs each.
        base: the plan without pins.
        sensitivity: what each layer does alone, on some of them.
    """
    if sensitivity.must_pin or len(case.samples) > _MOST_ASKED:
        return sensitivity
    scores = dict(sensitivity.scores)
    # Equal scores stay in the network's order: names must not decide.
    near = sorted((n for n in case.names if scores.get(n, 0.0) >= _NEAR), key=lambda n: -scores[n])
    names = case.held_low.union(case.names)
    for name in near[:_NEAREST]:
        found = bench.prober.probe(base.with_pins(names - {name}))
        scores[name] = max(scores[name], found.score)
    return replace(sensitivity, scores=scores)


def layers_seen(
    case: Case,
    bench: Bench,
    emulated: Baselines,
    sensitivity: Sensitivity,
) -> pd.DataFrame:
    """The table of the layers; of one that breaks alone on another input than those of the table it
    says what it says of it there.

    Args:
        case: the layers and the given inputs.
        bench: what goes through the network.
        emulated: the baselines, with the table.
        sensitivity: what each layer does alone.
    """
    layers = emulated.layers
    finite = set(layers.loc[layers["introduced_finite"].astype(bool), "layer"])
    broken = sensitivity.breaks & finite
    samples = [s for s in sensitivity.samples if _breaks(case, bench, s)]
    if not broken or not samples:
        return layers
    there = trace_layers(case, bench, evenly(samples, MOST_TRACED)).set_index("layer")
    columns = ["introduced_finite", "overflows", "underflows"]
    rows = layers["layer"].isin(broken)
    layers = layers.copy()
    layers.loc[rows, columns] = there.loc[layers.loc[rows, "layer"], columns].to_numpy()
    return layers


def _breaks(case: Case, bench: Bench, sample: Sample) -> bool:
    """Whether everything lowered gives values there that are not finite."""
    found = bench.prober.known(case.base, sample)
    return found is not None and math.isinf(found.score)


def ranked_on(case: Case, bench: Bench, unseen: Unseen | None) -> tuple[Sample, ...]:
    """The samples on which each layer alone is measured: the given ones that everything lowered
    does worst on, for where it is hardly noticed no layer's effect is seen, and draws, spread over
    their kinds, among them what refused everything lowered.

    Args:
        case: the given inputs.
        bench: knows how they do.
        unseen: the draws; None where only the given inputs count.
    """
    if unseen is None:
        return case.samples
    of_each = _worst_of_each(case, bench, case.samples)
    count = max(ranked_count(len(case.layers)), min(_MOST_RANKED, 2 * len(of_each)))
    # From the end: variants disturb more than redrawn copies do.
    others = [*reversed(unseen.samples.variants), *reversed(unseen.samples.redrawn)]
    most = max(1, count // 2) if others else count
    first = [*of_each[:most], *_worst(case, bench, case.samples, most)]
    first = list({s.digest: s for s in first}.values())[:most]
    # What refused everything lowered shows what is wrong with it; the panel may not.
    refused = unseen.refused.samples if unseen.refused is not None else ()
    missed = evenly(refused, min(len(refused), -(-(count - len(first)) // 2)))
    # What everything lowered does worst on may be seen on no other: positions beyond 256, say. Of
    # infinities none is the worst.
    worst = _worst(case, bench, others, 1) if not missed else []
    known = [bench.prober.known(case.base, s) for s in worst]
    worst = worst if all(k is not None and math.isfinite(k.score) for k in known) else []
    left = [s for s in others if s not in worst]
    drawn = [*missed, *worst, *evenly(left, max(0, count - len(first) - len(missed) - len(worst)))]
    # Where FP32 misses, so does each layer alone.
    every = all_in_fp32(case, case.base) if set_size(case) == 1 else None
    return (*first, *told_by_pins(case, bench, [bench.prober], every, drawn))


def _worst_of_each(case: Case, bench: Bench, samples: Sequence[Sample]) -> list[Sample]:
    """Of each of several conditions that everything lowered misses, the sample that does so by
    most, each once: one that changes a decision may be far from missing a tolerance.
    """
    items = case.requirements.items
    known = [(s, bench.prober.known(case.base, s)) for s in samples]
    values = [(s, found.values) for s, found in known if found is not None and found.values]
    chosen: dict[str, Sample] = {}
    for place, item in enumerate(items if len(items) > 1 else ()):
        scores = [item.score_of(of_one[place]) for _, of_one in values]
        missed = [score for score in scores if score > 1.0]
        if missed and item.metric not in case.requirements.collective:
            sample = values[scores.index(max(missed))][0]
            chosen.setdefault(sample.digest, sample)
    return list(chosen.values())


def _worst(case: Case, bench: Bench, samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most ``most`` of ``samples`` with the largest scores; of equal ones some, spread."""
    by_score: dict[float, list[Sample]] = {}
    for sample in samples:
        found = bench.prober.known(case.base, sample)
        score = math.inf if found is None or math.isnan(found.score) else found.score
        by_score.setdefault(score, []).append(sample)
    chosen: list[Sample] = []
    for score in sorted(by_score, reverse=True):
        chosen += evenly(by_score[score], most - len(chosen))
    return chosen


def ranked_count(layers: int) -> int:
    """On how many samples of a panel so many layers are measured, each alone."""
    return max(_FEWEST_RANKED, min(_MOST_RANKED, _RANKED_ROWS // max(1, layers)))
