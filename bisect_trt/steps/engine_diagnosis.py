"""Why an engine differs: rounding, runs that differ, or a fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Cause, Diagnosis, Finding, Reproducibility
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import Evaluation, Vector
from bisect_trt.metrics.errors import TensorError
from bisect_trt.metrics.requirements import times
from bisect_trt.runners.base import Patient, Restartable
from bisect_trt.steps.context import Context

OUT_OF_LINE = 1e-2
"""An error of a hundredth of a layer's range is none that FP32 or TF32 arithmetic makes."""


@dataclass(frozen=True)
class EngineTable:
    """``rows`` by layer: ``engine_max_abs``, ``engine_rmse``, ``engine_rel_range``,
    ``engine_finite``, ``engine_nonfinite``, ``engine_mean_over_samples_rmse``.

    ``how`` says where they come from. ``marked_score`` is the final score of the (first) marked
    engine, to be held against ``unmarked_score``, on the same samples; NaN where nothing was
    marked. ``note`` says why rows are missing, if they are.
    """

    rows: Mapping[str, Mapping[str, Any]]
    how: str
    marked_score: float
    batches: int
    note: str = ""
    unmarked_score: float = math.nan

    def joined(self, table: pd.DataFrame) -> pd.DataFrame:
        """``table`` with the engine's columns."""
        own = pd.DataFrame([{"layer": name, **row} for name, row in self.rows.items()])
        return table.merge(own, on="layer", how="left") if len(own) else table


def first_out_of_line(table: EngineTable) -> str | None:
    """The first layer in network order whose error is none that rounding explains; None if there is
    none.
    """
    return next(
        (name for name, row in table.rows.items() if not row["engine_rel_range"] <= OUT_OF_LINE),
        None,
    )


def marking_effect_matters(unmarked: float, marked: float) -> bool:
    """True if marking turned the verdict, or moved the score by more than half; NaN where nothing
    was marked never does.
    """
    if math.isnan(marked) or math.isnan(unmarked):
        return False
    if (unmarked <= 1.0) is not (marked <= 1.0) or math.isinf(unmarked) is not math.isinf(marked):
        return True
    return (
        math.isfinite(marked)
        and max(marked, unmarked) > 1.5 * max(min(marked, unmarked), 1e-9)
        and max(marked, unmarked) > 0.1
    )


def findings_of(table: EngineTable) -> list[Finding]:
    """Why rows are missing, if they are, and that marking moved the outputs, if it did."""
    found = [Finding("engine-layers", "", table.note)] if table.note else []
    if marking_effect_matters(table.unmarked_score, table.marked_score):
        message = (
            "marking all outputs changes this engine's result from "
            f"{times(table.unmarked_score)} to "
            f"{times(table.marked_score)}: the tables of layers explain, the unmarked engine "
            "decides"
        )
        found.append(Finding("marking-effect", "", message))
    return found


FURTHER_PROCESSES = 2

_CURE = (
    "No pin cures that: `bisect-trt reduce` finds the smallest piece that does it, `bisect-trt "
    "cure` what helps."
)
_ROOM = (
    "They differ by little, and the plan has no room for it: search with the tolerance a tenth "
    "smaller, or allow a tenth more."
)


class _InFurtherProcess:
    """``runner`` after it was started afresh, which the first evaluation does; ``number`` tells its
    answers from those of other processes in the cache.
    """

    def __init__(self, runner: Restartable, number: int) -> None:
        self._runner, self._started = runner, False
        self.name = runner.name
        self.versions: Mapping[str, str] = {**runner.versions, "process": str(number)}
        self.timeout_s = runner.timeout_s if isinstance(runner, Patient) else None

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        if not self._started:
            self._runner.start_afresh()
            self._started = True
        return self._runner.outputs(plan, samples)

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return self._runner.facts(plan)


def over_processes(context: Context, result: Evaluation) -> Reproducibility:
    """The runs of ``result``'s engine, and those of it built again in further processes, where the
    runner has some.
    """
    results, runner = [result], context.opened
    if not isinstance(runner, Restartable):
        return runs_of(results)
    # Where the budget ends it, what was seen until then counts, and the report says of how many.
    with suppress(BudgetSpentError):
        for evaluator in _further(context, runner):
            results.append(evaluator.evaluate(result.plan))
            taken_back = result.verdict.passed and not results[-1].verdict.passed
            if taken_back or runs_of(results).decides:
                break
    return runs_of(results)


def _further(context: Context, runner: Restartable) -> list[Evaluator]:
    numbers = range(2, 2 + FURTHER_PROCESSES)
    return [context.evaluator_of(_InFurtherProcess(runner, number)) for number in numbers]


def not_reproducible(what: str, seen: Reproducibility) -> Diagnosis:
    """The diagnosis of an engine whose runs decide differently; ``what`` names it."""
    bad, where = seen.runs - seen.passed, f" in {seen.processes} processes"
    span, differ = f"from {seen.best:.3g} to {times(seen.worst)}", ""
    if seen.broken:
        span = f"from {times(seen.best)} to no answer: one process ended {seen.broken}"
    elif seen.apart > 0.0:
        differ = (
            f"; answers to {seen.sample!r} lie up to {seen.apart:.2g} of the range of output "
            f"{seen.output!r} apart"
        )
    return Diagnosis(
        Cause.NOT_REPRODUCIBLE,
        f"The {what} engine does not make up its mind: {bad} of {seen.runs} runs"
        f"{where if seen.processes > 1 else ''} miss the requirement ({span}{differ}). "
        f"{_CURE if seen.decides else _ROOM}",
    )


def note_not_reproducible(what: str, seen: Reproducibility | None) -> list[Finding]:
    """A finding where runs differ, of an engine that is not called not reproducible for it."""
    if seen is None or seen.reproducible:
        return []
    met = {0: "none", seen.runs: "all"}.get(seen.passed, str(seen.passed))
    worth = "the worst one counts" if 0 < seen.passed < seen.runs else "so nothing hangs on it"
    message = (
        f"{seen.differing} of {seen.runs} runs of the {what} engine gave other bits than the usual "
        f"(up to {seen.apart:.2g} of the range of output {seen.output!r}); {met} of them "
        f"met the requirement, {worth}"
    )
    return [Finding("not-reproducible", "", message)]


def runs_of(results: Sequence[Evaluation]) -> Reproducibility:
    """One engine's runs in several processes, scores by process."""
    seen = [r.reproducibility for r in results if r.reproducibility is not None]
    once = [r for r in results if r.reproducibility is None]
    broken = next((str(r.verdict) for r in once if not r.worst), "")
    inside = next((s for s in seen if s.decides), None)
    widest = max(seen, key=lambda s: s.apart, default=Reproducibility(0))
    scores = [inside.best, inside.worst] if inside is not None else [r.score for r in results]
    return Reproducibility(
        runs=sum(s.runs for s in seen) + len(results) - len(seen),
        differing=sum(s.differing for s in seen),
        passed=sum(s.passed for s in seen) + sum(r.verdict.passed for r in once),
        best=min(scores),
        worst=max(scores),
        apart=widest.apart,
        output=widest.output,
        sample=widest.sample,
        processes=len(results),
        right=sum(r.verdict.passed for r in results),  # which is that of the worst runs
        broken=broken,
    )


class Fp32(StrEnum):
    """What an engine's FP32 turned out to be."""

    STRICT = "strict"
    TF32 = "tf32"
    OTHER = "other"


def what_fp32_is(engine: Evaluation, strict: Evaluation, tf32: Evaluation) -> Fp32:
    """Which emulated baseline the engine's FP32 errors look like, by their RMSE over the outputs.

    TF32 can only be recognised where it differs from FP32 tenfold (a model without matrix products
    cannot tell).
    """
    found, exact, rounded = (_relative_rmse(r) for r in (engine, strict, tf32))
    if not all(math.isfinite(e) for e in (found, exact, rounded)):
        return Fp32.OTHER
    if rounded > 10.0 * exact and rounded / 4.0 <= found <= rounded * 4.0:
        return Fp32.TF32
    return Fp32.STRICT if found <= max(30.0 * exact, 1e-6) else Fp32.OTHER


def agreement(one: Vector | None, other: Vector | None) -> float:
    """The cosine between two evaluations' sampled signed errors: near 1 if they make the same
    roundings; NaN if unknown.
    """
    if one is None or other is None or len(one) != len(other):
        return math.nan
    both = np.isfinite(one) & np.isfinite(other)
    a, b = one[both].astype(np.float64), other[both].astype(np.float64)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else math.nan


def _relative_rmse(result: Evaluation) -> float:
    """The worst output's RMSE over its range, or where that is 0 over the largest magnitude."""

    def scale(error: TensorError) -> float:
        spread = error.ref_max - error.ref_min
        return max(spread or max(abs(error.ref_max), abs(error.ref_min)), 1e-30)

    return max((e.rmse / scale(e) for e in result.worst.values()), default=math.nan)


def reproducibility_of_failure(
    context: Context, fp32: Evaluation, base: Evaluation
) -> Reproducibility | None:
    """The reproducibility of the baseline that fails, FP32 first, where it is the engine's to
    blame.

    FP32 that misses the requirement is run in further processes too: it may be right there.
    """
    if not fp32.verdict.passed and fp32.worst:
        seen = runs_of([fp32])
        if seen.decides:
            return seen
        return over_processes(context, fp32)
    # What misses in every run needs pins first; the answer's engine is looked at again.
    may_pass = base.best_score is not None and base.best_score <= 1.0
    if not base.verdict.passed and may_pass and base.reproducibility is not None:
        return base.reproducibility if base.reproducibility.decides else None
    return None


def diagnose(
    fp32: Evaluation,
    tf32: Evaluation,
    base: Evaluation,
    identity: Fp32,
    precision: Precision,
    marked_fp32: Callable[[], EngineTable | None],
    *,
    overfitted: bool,
    on_which: str,
) -> Diagnosis | None:
    """What the engine's own baselines settle; None if the reduced precision is to blame."""
    if not fp32.verdict.passed:
        return _fp32_fails(fp32, identity, marked_fp32, on_which)
    if base.verdict.passed and not overfitted:
        held = len(base.plan.pinned)
        but = f" with what is held in FP32 (layers: {held})" if held else ""
        return Diagnosis(
            Cause.NONE,
            f"The {precision.value.upper()} engine{but} meets the requirement "
            f"({times(base.score)}); nothing {'else ' if held else ''}needs to be pinned.",
        )
    if base.verdict.passed:
        return None  # on new copies it does not: something has to be pinned
    if precision is Precision.TF32:
        return Diagnosis(
            Cause.TF32,
            f"TF32 misses the requirement on the engine ({times(tf32.score, tf32.verdict)}) "
            "and strict FP32 meets it: turn TF32 off (clear_flag(BuilderFlag.TF32), trtexec "
            "--noTF32).",
        )
    return None


def _fp32_fails(
    fp32: Evaluation,
    identity: Fp32,
    marked_fp32: Callable[[], EngineTable | None],
    on_which: str,
) -> Diagnosis:
    if not fp32.worst:
        return Diagnosis(
            Cause.ENGINE_FAILED,
            f"The FP32 engine cannot be built or run ({fp32.verdict}): {fp32.note}. `bisect-trt "
            "reduce` finds the smallest piece of the model that does it.",
        )
    if identity is Fp32.TF32:
        return Diagnosis(
            Cause.TF32,
            f"This runtime's FP32 is TF32 (its errors, {times(fp32.score)}, are those of emulated "
            "TF32), and TF32 misses the requirement: no plan can pass on it. Use a runtime that "
            f"honours a cleared TF32 flag, or allow TF32's error.{on_which}",
        )
    table = marked_fp32()
    where = first_out_of_line(table) if table is not None else None
    first = f" The first layer out of line is {where!r}." if where else ""
    return Diagnosis(
        Cause.NOT_PRECISION,
        "Strict FP32 already misses the requirement on the engine "
        f"({times(fp32.score, fp32.verdict)}): not a precision problem, the engine or its parser "
        "computes something else. `bisect-trt reduce` finds the smallest piece that does it, "
        f"`bisect-trt cure` what helps.{on_which}{first}",
    )
