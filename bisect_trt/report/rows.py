"""Makes the rows of the choices from a run's answers, with their times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import AS_IS, BF16, FITTED, FP32, KNEE, PLAN, REPAIRED, Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.time_limits import saving_kept
from bisect_trt.model.cost import SAME_TIME, CostTable
from bisect_trt.report.choices import Choice, Passes, recommended
from bisect_trt.report.record import Record
from bisect_trt.steps.answer import RunState
from bisect_trt.steps.context import RunStatistics
from bisect_trt.steps.repair import Repair


def choices_of(state: RunState, own: Record, others: Mapping[str, Record]) -> list[Choice]:
    """The rows that there are, none of them recommended yet; ``others`` by their names."""
    judge, base = state.engine or state.baselines, state.base.with_pins(())
    if judge is None:
        return []
    names = [layer.name for layer in state.problem.layers]
    is_base = own.plan.base is base.base and not own.plan.chosen
    passes = Passes.GIVEN if own.base_score <= 1.0 else Passes.NO
    rows = [_choice(AS_IS, base, names, own.base_score, passes)]
    if is_base:
        rows = [_choice_of(AS_IS, own, names)]
    for name, other in others.items():
        if name == BF16:
            continue
        row = _choice_of(name, other, other.pinned)
        is_repaired = isinstance(state.repair, Repair)
        rows.append(replace(row, repaired=is_repaired, fitted=name == FITTED))
    all_fp32 = own.plan.base is Precision.FP32 or len(own.pinned) == len(names)
    if own.passed and not is_base and not all_fp32:
        rows.append(_choice_of(PLAN, own, names))
    if state.bf16 is not None:
        found, validation = state.bf16.evaluation, state.bf16.validation
        passes = Passes.of(found.verdict.passed, validation)
        layers = [layer.name for layer in state.problem.graph.layers_at(Precision.BF16)]
        rows.append(_choice(BF16, found.plan, layers, found.score, passes))
    if state.mixed is not None:
        mixed, verdict = state.mixed, state.mixed.evaluation.verdict
        passes = Passes.of(verdict.passed, mixed.validation)
        score = mixed.evaluation.score
        rows.append(_choice(mixed.label, mixed.plan, names, score, passes))
    if state.listed is not None:
        listed, verdict = state.listed, state.listed.evaluation.verdict
        passes = Passes.of(verdict.passed, listed.validation)
        score = listed.evaluation.score
        rows.append(_choice(listed.label, listed.plan, names, score, passes))
    fp32 = judge.fp32
    validation = own.validation if all_fp32 else None
    if state.fp32 is not None:
        validation = state.fp32.validation
    passes = Passes.of(fp32.verdict.passed, validation)
    everything = PrecisionPlan(Precision.FP32, frozenset(names))
    rows.append(_choice(FP32, everything, names, fp32.score, passes))
    return rows


def _choice(
    name: str, plan: PrecisionPlan, names: Sequence[str], score: float, passes: Passes
) -> Choice:
    pinned = tuple(layer for layer in names if layer in plan.pinned)
    return Choice(name, plan, pinned, repaired=False, worst_score=score, passes=passes)


def _choice_of(name: str, result: Record, names: Sequence[str]) -> Choice:
    """The row of an answer."""
    passes = Passes.of(result.passed and not result.is_refuted, result.validation)
    return _choice(name, result.plan, names, result.score, passes)


def timed(
    rows: Sequence[Choice],
    state: RunState,
    run_statistics: RunStatistics,
    others: Mapping[str, Record],
) -> list[Choice]:
    """``rows`` with their times."""
    if not rows or run_statistics.costs is None:
        return list(rows)
    tables = {name: table for name, table in _tables(state).items() if name in others}
    knee = next((row for row in rows if row.name == KNEE), None)
    if knee is not None and knee.repaired:
        tables[KNEE] = tables[REPAIRED]
    return _with_times(rows, run_statistics.costs, tables, _measured(state))


def with_knee(
    rows: Sequence[Choice], state: RunState, run_statistics: RunStatistics, of: Choice | None
) -> list[Choice]:
    """``rows`` with the knee of the recommended graph, whose row is ``of``, before the plan.

    With fitted weights there is none: model.fitted.onnx has the weights that its row asks for.
    """
    if of is not None and of.fitted:
        return list(rows)
    knee = state.tradeoff.knee if state.tradeoff is not None else None
    found = run_statistics.worst_of(knee, run_statistics.emulators) if knee is not None else None
    if knee is None or found is None:
        return list(rows)
    passes = Passes.GIVEN if found.verdict.passed else Passes.NO
    row = _choice(KNEE, knee, [layer.name for layer in state.problem.layers], found.score, passes)
    if of is not None:
        row = replace(row, repaired=of.repaired)
    if any(_is_same(row, other) for other in rows):
        return list(rows)
    place = next((k for k, other in enumerate(rows) if other.name in (PLAN, BF16, FP32)), len(rows))
    return [*rows[:place], row, *rows[place:]]


def _is_same(row: Choice, other: Choice) -> bool:
    """Whether two rows are of one plan on one graph."""
    # What pins are emulated in may differ.
    one, two = ((r.repaired, r.fitted, r.plan.base, r.plan.pinned) for r in (row, other))
    return one == two


def list_judged(state: RunState, rows: Sequence[Choice]) -> Finding | None:
    """What another tool's list is worth beside the answer; None where none was given."""
    listed = state.listed
    its = next((row for row in rows if listed is not None and row.name == listed.label), None)
    if its is None:
        return None
    count, score = counted(len(its.pinned), "layer"), f"score {its.worst_score:.3g}"
    said = f"{its.name}: {count} in FP32, {_passing(its.passes)} ({score})."
    best = recommended(rows)
    known = next((row for row in rows if row.name == PLAN), best)
    if known is not None and not known.repaired and known.name not in (FP32, its.name):
        needed = len(set(its.pinned).intersection(known.pinned))
        missing = len(set(known.pinned).difference(its.pinned))
        idle = len(its.pinned) - needed
        said += f" {needed} of them {_are(needed)} in the plan, {idle} {_are(idle)} not needed, "
        said += f"{missing} {_are(missing)} missing."
    if best is not None and best.name != its.name:
        kept = "" if best.saving_kept is None else f", {_saving(best)} of the saving kept"
        layers = counted(len(best.pinned), "layer")
        said += f" Recommended: {best.name}, {layers}, {_passing(best.passes)}{kept}."
    return Finding("list-judged", "", said, weighty=True)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _passing(passes: Passes) -> str:
    words = {Passes.VALIDATED: "validated", Passes.GIVEN: "passes your inputs", Passes.NO: "fails"}
    return words[passes]


def _saving(row: Choice) -> str:
    share = row.saving_kept if row.saving_kept is not None else 0.0
    return f"{'~' if row.is_estimated else ''}{share:.0%}"


def _with_times(
    rows: Sequence[Choice],
    own: CostTable,
    others: Mapping[str, CostTable],
    measured: Mapping[str, float],
) -> list[Choice]:
    """``rows`` with their times and the shares of the saving that they keep.

    ``own`` is the table of the original graph, ``others`` those of other rows' graphs. ``measured``
    are latencies in ms by row; where one of those compared is missing, shares are estimated.
    """
    estimated = {row.name: _relative(row, own, others.get(row.name, own)) for row in rows}
    anchors = {row.name for row in rows} & {AS_IS, FP32}
    # Beside engines that save nothing an estimate of the saving would mislead.
    saves = not anchors <= measured.keys() or _saving_kept(AS_IS, measured) is not None
    found = []
    for row in rows:
        is_measured = anchors | {row.name} <= measured.keys() and len(anchors) == 2
        times = measured if is_measured else estimated
        found.append(
            replace(
                row,
                latency_ms=measured.get(row.name),
                saving_kept=_saving_kept(row.name, times) if saves or is_measured else None,
                is_estimated=not is_measured,
            )
        )
    return found


def _relative(row: Choice, own: CostTable, table: CostTable) -> float:
    """The estimated time of a row; everything reduced in the original graph takes 1."""
    if row.name == BF16:  # the same bytes, and tensor cores of the same rate
        return own.time(row.plan)
    if row.plan.base is Precision.FP32:
        return own.reduced + own.extra
    # Edits are such that everything reduced takes the same time in both graphs.
    return table.time(row.plan)


def _saving_kept(name: str, times: Mapping[str, float]) -> float | None:
    """The share of the reduced precision's saving that a row keeps; None if it saves nothing."""
    if AS_IS not in times or FP32 not in times:
        return None
    return saving_kept(times[name], times[AS_IS], times[FP32])


def is_slower(row: Choice, other: Choice) -> bool:
    """Whether ``row`` takes clearly more time than ``other``, by the shares that they keep."""
    if row.saving_kept is None or other.saving_kept is None:
        return False
    return row.saving_kept < other.saving_kept - SAME_TIME


def _tables(state: RunState) -> dict[str, CostTable]:
    """What plans cost on the graphs of other rows."""
    answers = {REPAIRED: state.repaired, FITTED: state.fitted}
    found = {name: a.run_statistics.costs for name, a in answers.items() if a is not None}
    return {name: table for name, table in found.items() if table is not None}


def _measured(state: RunState) -> dict[str, float]:
    """The latencies in ms of the rows whose engines were timed, beside each other if possible."""
    if state.timing is not None:
        beside = {name: state.timing.ms(name) for name in state.timing.plans}
        return {name: time for name, time in beside.items() if math.isfinite(time)}
    found: dict[str, Evaluation] = {}
    if state.engine is not None:
        found = {AS_IS: state.engine.base, FP32: state.engine.fp32}
    if state.judgement is not None:
        found[PLAN] = state.judgement.result
    if state.bf16 is not None:
        found[BF16] = state.bf16.evaluation
    for name, answered in ((REPAIRED, state.repaired), (FITTED, state.fitted)):
        its = answered.state if answered is not None else None
        if its is not None and its.judgement is not None:
            found[name] = its.judgement.result
        elif its is not None and its.engine is not None:
            found[name] = its.engine.base
    times = {name: float(e.facts.get("latency_ms", math.nan)) for name, e in found.items()}
    return {name: time for name, time in times.items() if math.isfinite(time)}
