"""One row of the frontier: what a plan holds on, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bisect_trt.core.holds import CONFIDENCE, Holds, InputKind
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.confidence import lower_bound
from bisect_trt.probe.result import PanelResult, meets
from bisect_trt.stations.baselines.baselines import Baselines
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.fresh_test import set_size
from bisect_trt.stations.plans.traffic import relative_bytes

_QUANTILES = {"p50_score": 0.5, "p95_score": 0.95, "worst_score": 1.0}
_NAMED = 3


def as_tested(holds: Holds) -> dict[str, object]:
    """What a test counted, of every kind and by every judge."""
    found: dict[str, object] = {}
    worst: list[float] = []
    for kind in InputKind:
        holding = holds.of(kind)
        bound = holding.lower_bound if kind != InputKind.GIVEN and holding.tested else np.nan
        found |= _share(kind, holding.passed, holding.tested, bound)
        if holding.tested:
            worst.append(holding.worst_score)
    return found | {"worst_score": max(worst, default=np.nan)}


def row_of(
    case: Case,
    bench: Bench,
    baselines: Baselines,
    base: PrecisionPlan,
    plan: PrecisionPlan,
    source: str,
    kinds: dict[InputKind, Sequence[Sample]],
) -> dict[str, object]:
    """What ``plan`` holds on by the first emulator, its scores, and what it costs.

    Args:
        case: the inputs, and what is asked for.
        bench: what runs the plan.
        baselines: the layers' sizes.
        base: the plan without pins.
        plan: whose row it is.
        source: where it comes from: the answer, or the ranking.
        kinds: what it is judged on.
    """
    row: dict[str, object] = {"pins": len(plan.pinned), "set": source}
    scores: list[float] = []
    missed: dict[str, object] = {}
    bench.emulator.foretell(plan, sum(map(len, kinds.values())))
    for kind, samples in kinds.items():
        size = set_size(case)
        if kind == InputKind.HOLDOUT and size > 1:
            size = max(1, len(samples))
        found = bench.prober.judge(plan, samples, size=size)
        row |= _shares(kind, found)
        if kind == InputKind.GIVEN and size == 1:
            missed["given_missed"] = _missed(found)
        scores += [r.score for r in found.results]
    for name, share in _QUANTILES.items():
        ordered = sorted(scores)
        row[name] = ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else np.nan
    row["latency_ms"] = _latency(case, bench, plan)
    row["relative_bytes"] = relative_bytes(case, baselines.layers, plan)
    estimate = _by_traffic(case, bench, baselines, base, plan)
    return {**row, **missed, "estimated_latency_ms": estimate}


def _missed(found: PanelResult) -> str:
    """The names of the samples that missed, the worst first: a few, and how many more."""
    results = zip(found.names, found.results, strict=True)
    worst = sorted((-r.score, name) for name, r in results if not meets(r, 1.0))
    more = [f"{len(worst) - _NAMED} more"] if len(worst) > _NAMED else []
    return ", ".join([*(name for _, name in worst[:_NAMED]), *more])


def _shares(kind: InputKind, found: PanelResult) -> dict[str, object]:
    tested, passed = len(found.results), found.passed()
    drawn = kind != InputKind.GIVEN and tested > 0
    bound = lower_bound(passed, tested, CONFIDENCE) if drawn else np.nan
    return _share(kind, passed, tested, bound)


def _share(kind: InputKind, passed: int, tested: int, bound: float) -> dict[str, object]:
    return {
        f"{kind}_passed": passed,
        f"{kind}_tested": tested,
        f"{kind}_share": passed / tested if tested else np.nan,
        f"{kind}_lower_bound": bound,
    }


def _latency(case: Case, bench: Bench, plan: PrecisionPlan) -> float:
    """What the engine of ``plan`` takes, NaN where none was built."""
    if bench.engine is None:
        return math.nan
    asked = bench.plan_for(bench.engine, plan)
    if plan.pinned.issuperset(case.names) and not case.held_low:  # the same network
        asked = PrecisionPlan(Precision.FP32)
    built = bench.engine.done.get(asked)
    return float(built.facts.get("latency_ms", math.nan)) if built is not None else math.nan


def _by_traffic(
    case: Case, bench: Bench, baselines: Baselines, base: PrecisionPlan, plan: PrecisionPlan
) -> float:
    """What the engine of ``plan`` may take: between those of nothing and of everything pinned, by
    memory traffic (benchmarks/results/gpu.md). NaN where they were not built, or where pins
    save time: then launches are what takes it.
    """
    every = base.with_pins(case.names)
    least, most = _latency(case, bench, base), _latency(case, bench, every)
    if not most > least:
        return math.nan
    traffic, whole = (relative_bytes(case, baselines.layers, p) for p in (plan, every))
    return least + (traffic - 1.0) / (whole - 1.0) * (most - least)
