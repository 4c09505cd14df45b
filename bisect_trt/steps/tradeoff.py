"""How many inputs each number of pins holds on: from the luckiest few to all, along the ranking."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import CONFIDENCE, Finding, InputKind, Validation
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.cache import Row
from bisect_trt.evaluate.result import SearchSetResult, meets
from bisect_trt.metrics.statistics import lower_bound
from bisect_trt.steps.baselines import MOST_TRACED, Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.samples import augmented, perturbs
from bisect_trt.steps.validation_inputs import TRADEOFF, TRADEOFF_COPIES, set_size


def relative_bytes(problem: Problem, table: pd.DataFrame, plan: PrecisionPlan) -> float:
    """The bytes that all layers read and write under ``plan``, in those of everything reduced: 1
    without pins, 2 with all of them. NaN where the precision changes no storage, or a layer's size
    is not known.
    """
    if not plan.base.is_storage or "elements" not in table:
        return math.nan
    sizes = _sizes(problem, table)
    reduced = under = 0.0
    for layer in problem.layers:
        count = sum(sizes.get(tensor, 0.0) for tensor in (*layer.inputs, *layer.outputs))
        reduced += 2.0 * count
        under += (4.0 if layer.name in plan.pinned else 2.0) * count
    return under / reduced if reduced else math.nan


def _sizes(problem: Problem, table: pd.DataFrame) -> Mapping[str, float]:
    """The elements of each tensor that a layer gives, or finds in the file or an input."""
    traced = evenly(problem.samples, MOST_TRACED)
    sizes: dict[str, float] = {n: float(a.size) for n, a in problem.graph.float_constants.items()}
    for name in traced[0].arrays:
        counted = [s.arrays[name] for s in traced]
        sizes[name] = sum(a.size for a in counted if a.dtype.kind == "f") / len(traced)
    elements = dict(zip(table["layer"], table["elements"], strict=True))
    for layer in problem.layers:
        for tensor in layer.outputs:
            sizes[tensor] = float(elements[layer.name]) / len(traced) / len(layer.outputs)
    return sizes


_QUANTILES = {"p50_score": 0.5, "p95_score": 0.95, "worst_score": 1.0}
_NAMED = 3


def as_tested(validation: Validation) -> dict[str, object]:
    """What a test counted, of every kind and by every judge."""
    found: dict[str, object] = {}
    worst: list[float] = []
    for kind in InputKind:
        holding = validation.of(kind)
        bound = holding.lower_bound if kind != InputKind.GIVEN and holding.tested else np.nan
        found |= _share(kind, holding.passed, holding.tested, bound)
        if holding.tested:
            worst.append(holding.worst_score)
    return found | {"worst_score": max(worst, default=np.nan)}


def row_of(
    problem: Problem,
    context: Context,
    baselines: Baselines,
    base: PrecisionPlan,
    plan: PrecisionPlan,
    source: str,
    kinds: dict[InputKind, Sequence[Sample]],
) -> dict[str, object]:
    """What ``plan`` holds on by the first emulator, its scores, and what it costs."""
    row: dict[str, object] = {"pins": len(plan.pinned), "set": source}
    scores: list[float] = []
    missed: dict[str, object] = {}
    for kind, samples in kinds.items():
        size = set_size(problem)
        if kind == InputKind.HOLDOUT and size > 1:
            size = max(1, len(samples))
        found = context.evaluator.judge(plan, samples, size=size)
        row |= _shares(kind, found)
        if kind == InputKind.GIVEN and size == 1:
            missed["given_missed"] = _missed(found)
        scores += [r.score for r in found.results]
    for name, share in _QUANTILES.items():
        ordered = sorted(scores)
        row[name] = ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else np.nan
    row["latency_ms"] = _latency(problem, context, plan)
    row["relative_bytes"] = relative_bytes(problem, baselines.layers, plan)
    estimate = _by_moved_bytes(problem, context, baselines, base, plan)
    return {**row, **missed, "estimated_latency_ms": estimate}


def _missed(found: SearchSetResult) -> str:
    """The names of the samples that missed, the worst first: a few, and how many more."""
    results = zip(found.names, found.results, strict=True)
    worst = sorted((-r.score, name) for name, r in results if not meets(r, 1.0))
    more = [f"{len(worst) - _NAMED} more"] if len(worst) > _NAMED else []
    return ", ".join([*(name for _, name in worst[:_NAMED]), *more])


def _shares(kind: InputKind, found: SearchSetResult) -> dict[str, object]:
    tested, passed = len(found.results), found.passed()
    copied = kind != InputKind.GIVEN and tested > 0
    bound = lower_bound(passed, tested, CONFIDENCE) if copied else np.nan
    return _share(kind, passed, tested, bound)


def _share(kind: InputKind, passed: int, tested: int, bound: float) -> dict[str, object]:
    return {
        f"{kind}_passed": passed,
        f"{kind}_tested": tested,
        f"{kind}_share": passed / tested if tested else np.nan,
        f"{kind}_lower_bound": bound,
    }


def _latency(problem: Problem, context: Context, plan: PrecisionPlan) -> float:
    """What the engine of ``plan`` takes, NaN where none was built."""
    if context.engine is None:
        return math.nan
    asked = context.plan_for(context.engine, plan)
    if plan.pinned.issuperset(problem.names) and not problem.kept_reduced:  # the same network
        asked = PrecisionPlan(Precision.FP32)
    built = context.engine.done.get(asked)
    return float(built.facts.get("latency_ms", math.nan)) if built is not None else math.nan


def _by_moved_bytes(
    problem: Problem,
    context: Context,
    baselines: Baselines,
    base: PrecisionPlan,
    plan: PrecisionPlan,
) -> float:
    """What the engine of ``plan`` may take: between those of nothing and of everything pinned, by
    memory traffic (benchmarks/results/gpu.md). NaN where they were not built, or where pins
    save time: then launches are what takes it.
    """
    every = base.with_pins(problem.names)
    least, most = _latency(problem, context, base), _latency(problem, context, every)
    if not most > least:
        return math.nan
    moved_bytes, whole = (relative_bytes(problem, baselines.layers, p) for p in (plan, every))
    return least + (moved_bytes - 1.0) / (whole - 1.0) * (most - least)


STEPS = (0, 2, 8, 32, 128, 512, 2048)
"""How many of the ranked layers are pinned; the answer, what lies between it and the next of these,
and all layers are shown beside them."""

_GIVEN, _HARD, _PERTURBED, _AUGMENTED = 24, 8, 16, 8
_ALIKE = 0.1
"""Plans of so nearly as many pins as the answer tell nothing beside it."""

TIME_BUDGET_S = 12.0
"""Of a slow model each row is judged on fewer copies, of which there are a few at least; when the
time is over, the rows that are left are left out, and that is said."""


@dataclass(frozen=True)
class Tradeoff:
    """``table`` has a row for each number of pins; of ``rows`` there was time for so many."""

    table: pd.DataFrame
    rows: int

    def cut_short(self) -> list[Finding]:
        """That rows were left out, where some were."""
        if len(self.table) == self.rows:
            return []
        message = (
            f"tradeoff.csv has {len(self.table)} of {self.rows} rows, those next to the answer: "
            f"this model's take longer than the {TIME_BUDGET_S:.0f} s that it may take"
        )
        return [Finding("tradeoff", "", message)]


def measure_tradeoff(
    problem: Problem,
    context: Context,
    baselines: Baselines,
    base: PrecisionPlan,
    ranking: Sequence[str],
    answer: PrecisionPlan,
    validation: Validation | None = None,
    *,
    again: bool = False,
) -> Tradeoff:
    """For each number of pins the share of each kind of input that meets the requirement, its
    bound, and the scores; judged by the first emulator. The answer's row says what its test did,
    on the copies of that: others would be a second test, of which nobody is told.
    """
    lengths = _lengths(len(ranking), min(len(answer.chosen), len(ranking)))
    prefixes = (base.with_pins(ranking[:n]).pinned for n in lengths)
    sets = [(pins, "ranking") for pins in prefixes if pins != answer.pinned]
    # The answer first, and then those around it: these are what it is compared with.
    sets.sort(key=lambda s: abs(len(s[0]) - len(answer.pinned)))
    sets.insert(0, (answer.pinned, "answer"))
    tested = (
        validation
        if context.engine is None and validation is not None and validation.copies
        else None
    )
    # Where nothing was searched the test has said it all.
    said = tested is not None and not ranking
    kinds = _samples(problem, context, 0 if said else len(sets), answer)
    key = context.evaluator.key(
        "tradeoff", answer.digest, *(base.with_pins(s[0]).digest for s in sets)
    )
    before = context.cache.recall(key)
    # A repeated command asks no further than the first one did.
    most = int(before[0]) if before is not None else len(sets)
    rows, deadline = [], time.monotonic() + TIME_BUDGET_S
    number = 0
    with context.counting(lambda: (number, len(sets))):
        for number, (pins, source) in enumerate(sets[:most]):
            if before is None and number and time.monotonic() > deadline:
                if not again:
                    context.cache.record([Row(key, "tradeoff", number)])
                break
            context.tell(counted(len(pins), "pin"))
            judged = kinds
            if source == "answer" and context.evaluator.knows(answer):
                judged = {**kinds, InputKind.GIVEN: problem.samples}
            by_test = tested if source == "answer" else None
            if by_test is not None and by_test.copies is not None:
                judged |= _as_tested(problem, context, kinds, *by_test.copies)
            plan = answer if source == "answer" else base.with_pins(pins)
            row = row_of(problem, context, baselines, base, plan, source, judged)
            row |= as_tested(by_test) if by_test is not None else {}
            rows.append((len(pins), source == "answer", row))
    ordered = [row for *_, row in sorted(rows, key=lambda r: r[:2])]
    return Tradeoff(pd.DataFrame(ordered), len(sets))


def _lengths(every: int, answer: int) -> list[int]:
    """How many of ``every`` ranked layers are pinned: steps, and between the answer and the next of
    these on either side, where that tells another plan than the answer.
    """
    steps = {n for n in STEPS if n < every} | {every}
    below = max((n for n in steps if n < answer), default=answer)
    above = min((n for n in steps if n > answer), default=answer)
    between = {(below + answer) // 2, (answer + above) // 2}
    return sorted(steps.union(n for n in between if abs(n - answer) > _ALIKE * answer))


def tradeoff_size(layers: int, usual_seconds: float) -> tuple[int, int]:
    """About how many rows the trade-off curve of so many layers has, and on how many samples each
    is judged where one input was given.
    """
    rows = sum(steps < layers for steps in STEPS) + 4
    return rows, 1 + sum(_copies(rows, usual_seconds))


def _copies(rows: int, usual_seconds: float) -> tuple[int, int]:
    """How many perturbed copies and augmented inputs each of ``rows`` rows is judged on."""
    wanted = (_PERTURBED + _AUGMENTED) * rows * usual_seconds / TIME_BUDGET_S
    fewer = max(1.0, wanted)
    return max(TRADEOFF_COPIES, int(_PERTURBED / fewer)), max(
        TRADEOFF_COPIES, int(_AUGMENTED / fewer)
    )


def _some_given(problem: Problem, context: Context, answer: PrecisionPlan) -> list[Sample]:
    """A few of the given inputs, those that everything reduced misses by most, and some of those
    that are known to miss under ``answer``: a row that left these out would promise more.
    """

    def score(plan: PrecisionPlan, sample: Sample) -> float:
        found = context.evaluator.known(plan, sample)
        return 0.0 if found is None or meets(found, 1.0) else found.score

    chosen = {sample.digest: sample for sample in evenly(problem.samples, _GIVEN)}
    hard = sorted(problem.samples, key=lambda sample: -score(problem.base, sample))[:_HARD]
    missed = evenly([s for s in problem.samples if score(answer, s) > 0.0], _GIVEN)
    chosen |= {
        s.digest: s for s in (*hard, *missed) if score(problem.base, s) + score(answer, s) > 0
    }
    return [sample for sample in problem.samples if sample.digest in chosen]


def _samples(
    problem: Problem, context: Context, rows: int, answer: PrecisionPlan
) -> dict[InputKind, Sequence[Sample]]:
    """What each of ``rows`` rows is judged on; without copies where there is none."""
    size = set_size(problem)
    perturbed, varied = _copies(rows, context.pace.usual_seconds)
    sets = [max(1, perturbed // size), max(1, varied // size)] if rows else [0, 0]
    return {
        InputKind.GIVEN: problem.samples if size > 1 else _some_given(problem, context, answer),
        InputKind.HOLDOUT: evenly(problem.holdout, _GIVEN),
        InputKind.PERTURBED: list(
            perturbs(problem, context, TRADEOFF, sets[0] * size, emulated=True)
        ),
        InputKind.AUGMENTED: list(augmented(problem, context, TRADEOFF, sets[1] * size)),
    }


def _as_tested(
    problem: Problem,
    context: Context,
    kinds: dict[InputKind, Sequence[Sample]],
    stream: int,
    count: int,
) -> dict[InputKind, Sequence[Sample]]:
    """As many copies as ``kinds`` has, of those that a test asked about."""
    perturbed, varied = (len(kinds[kind]) for kind in (InputKind.PERTURBED, InputKind.AUGMENTED))
    copies = perturbs(problem, context, stream, count, emulated=True)
    return {
        InputKind.PERTURBED: list(islice(copies, perturbed)),
        InputKind.AUGMENTED: list(islice(augmented(problem, context, stream, count), varied)),
    }
