"""The cause of an engine's errors: rounding, runs that differ, or a fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Cause, Diagnosis, Finding, Reproducibility
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.result import Evaluation, Vector
from bisect_trt.metrics.errors import TensorError
from bisect_trt.metrics.requirements import times
from bisect_trt.runners.base import Patient, Restartable
from bisect_trt.steps.baselines import nothing_to_pin, tf32_to_blame
from bisect_trt.steps.context import Context
from bisect_trt.steps.engine_layer_errors import EngineTable

FURTHER_PROCESSES = 2
"""New processes in which an engine that passed is run again."""

_CURE = (
    "No pin cures that: `bisect-trt reduce` finds the smallest piece that does it, `bisect-trt "
    "cure` what helps."
)
_NO_ROOM = (
    "They differ by little, and the plan has no room for it: search with the tolerance a tenth "
    "smaller, or allow a tenth more."
)


class _InFurtherProcess:
    """``runner`` in a new process, which the first evaluation starts."""

    def __init__(self, runner: Restartable, number: int) -> None:
        self._runner, self._started = runner, False
        self.name = runner.name
        # Versions are part of the cache's keys, so that each process has answers of its own.
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
    """The runs of an evaluation's engine here, and in further processes where it has some."""
    results, runner = [result], context.opened
    if not isinstance(runner, Restartable):
        return runs_of(results)
    # Where the budget ends it, the processes so far count, and the report says how many they are.
    with suppress(BudgetSpentError):
        for number in range(2, 2 + FURTHER_PROCESSES):
            evaluator = context.evaluator_of(_InFurtherProcess(runner, number))
            results.append(evaluator.evaluate(result.plan))
            taken_back = result.verdict.passed and not results[-1].verdict.passed
            if taken_back or runs_of(results).decides:
                break
    return runs_of(results)


def runs_of(results: Sequence[Evaluation]) -> Reproducibility:
    """One engine's runs in several processes, an evaluation a process."""
    # Runners that repeat report how; one that ran once has an evaluation only.
    repeated = [r.reproducibility for r in results if r.reproducibility is not None]
    once = [r for r in results if r.reproducibility is None]
    inside = next((s for s in repeated if s.decides), None)
    widest = max(repeated, key=lambda s: s.apart, default=Reproducibility(0))
    scores = [inside.best, inside.worst] if inside is not None else [r.score for r in results]
    return Reproducibility(
        runs=sum(s.runs for s in repeated) + len(once),
        differing=sum(s.differing for s in repeated),
        passed=sum(s.passed for s in repeated) + sum(r.verdict.passed for r in once),
        best=min(scores),
        worst=max(scores),
        apart=widest.apart,
        output=widest.output,
        sample=widest.sample,
        processes=len(results),
        right=sum(r.verdict.passed for r in results),  # an evaluation's verdict is its worst run's
        broken=next((str(r.verdict) for r in once if not r.worst), ""),
    )


def not_reproducible(what: str, runs: Reproducibility) -> Diagnosis:
    """The diagnosis of an engine whose runs decide differently; ``what`` names it."""
    span, differ = f"from {runs.best:.3g} to {times(runs.worst)}", ""
    if runs.broken:
        span = f"from {times(runs.best)} to no answer: one process ended {runs.broken}"
    elif runs.apart > 0.0:
        differ = (
            f"; answers to {runs.sample!r} lie up to {runs.apart:.2g} of the range of output "
            f"{runs.output!r} apart"
        )
    where = f" in {runs.processes} processes" if runs.processes > 1 else ""
    return Diagnosis(
        Cause.NOT_REPRODUCIBLE,
        f"The {what} engine does not make up its mind: {runs.runs - runs.passed} of {runs.runs} "
        f"runs{where} miss the requirement ({span}{differ}). "
        f"{_CURE if runs.decides else _NO_ROOM}",
    )


def note_not_reproducible(what: str, runs: Reproducibility | None) -> list[Finding]:
    """A finding where runs differ, but not so that they decide differently."""
    if runs is None or runs.reproducible:
        return []
    met = {0: "none", runs.runs: "all"}.get(runs.passed, str(runs.passed))
    worth = "the worst one counts" if 0 < runs.passed < runs.runs else "so nothing hangs on it"
    message = (
        f"{runs.differing} of {runs.runs} runs of the {what} engine gave other bits than the usual "
        f"(up to {runs.apart:.2g} of the range of output {runs.output!r}); {met} of them "
        f"met the requirement, {worth}"
    )
    return [Finding("not-reproducible", "", message)]


def reproducibility_of_failure(
    context: Context, fp32: Evaluation, base: Evaluation
) -> Reproducibility | None:
    """The reproducibility of a failing baseline; None where its runs do not decide the failure."""
    if not fp32.verdict.passed and fp32.worst:
        runs = runs_of([fp32])
        return runs if runs.decides else over_processes(context, fp32)
    # An engine that misses in every run needs pins first; the answer's engine is run again.
    may_pass = base.best_score is not None and base.best_score <= 1.0
    if not base.verdict.passed and may_pass and base.reproducibility is not None:
        return base.reproducibility if base.reproducibility.decides else None
    return None


class Fp32(StrEnum):
    """The arithmetic that an engine's FP32 runs in."""

    STRICT = "strict"
    TF32 = "tf32"
    OTHER = "other"


def what_fp32_is(engine: Evaluation, strict: Evaluation, tf32: Evaluation) -> Fp32:
    """The emulated baseline that the engine's FP32 errors look like, by their RMSE."""
    found, exact, rounded = (_relative_rmse(r) for r in (engine, strict, tf32))
    if not all(math.isfinite(e) for e in (found, exact, rounded)):
        return Fp32.OTHER
    # TF32 is recognised only where its errors are ten times those of FP32; an engine sums in other
    # orders, which may cost FP32 a factor of 30, and TF32, whose roundings prevail, one of 4.
    if rounded > 10.0 * exact and rounded / 4.0 <= found <= rounded * 4.0:
        return Fp32.TF32
    return Fp32.STRICT if found <= max(30.0 * exact, 1e-6) else Fp32.OTHER


def _relative_rmse(result: Evaluation) -> float:
    """The worst output's RMSE over its range, or where that is 0 over the largest magnitude."""

    # By its range, as an offset would make every error look small.
    def scale(error: TensorError) -> float:
        spread = error.ref_max - error.ref_min
        return max(spread or max(abs(error.ref_max), abs(error.ref_min)), 1e-30)

    return max((e.rmse / scale(e) for e in result.worst.values()), default=math.nan)


def agreement(one: Vector | None, other: Vector | None) -> float:
    """The cosine between two evaluations' signed errors; NaN if unknown."""
    if one is None or other is None or len(one) != len(other):
        return math.nan
    # One infinite element would hide all others.
    both = np.isfinite(one) & np.isfinite(other)
    a, b = one[both].astype(np.float64), other[both].astype(np.float64)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else math.nan


def diagnose(
    tf32: Evaluation, base: Evaluation, precision: Precision, *, overfitted: bool
) -> Diagnosis | None:
    """The diagnosis by the engine's baselines, where its FP32 passes; None if layers are to blame.

    ``overfitted``: new copies refused what the given inputs pass.
    """
    if base.verdict.passed:
        return None if overfitted else nothing_to_pin(base, precision, " on the engine")
    return tf32_to_blame(tf32, " on the engine") if precision is Precision.TF32 else None


def diagnose_fp32(
    fp32: Evaluation,
    identity: Fp32,
    marked_fp32: Callable[[], EngineTable | None],
    on_which: str,
) -> Diagnosis:
    """The diagnosis where the engine's FP32 misses; ``on_which`` is a sentence on the inputs."""
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
            "TF32), and TF32 misses the requirement: no plan can pass on it. Set "
            "NVIDIA_TF32_OVERRIDE=0 here and in production, which turns TF32 off in NVIDIA's "
            f"libraries, or allow TF32's error.{on_which}",
        )
    table = marked_fp32()
    where = table.first_out_of_line if table is not None else None
    first = f" The first layer out of line is {where!r}." if where else ""
    return Diagnosis(
        Cause.NOT_PRECISION,
        "Strict FP32 already misses the requirement on the engine "
        f"({times(fp32.score, fp32.verdict)}): not a precision problem, the engine or its parser "
        "computes something else. `bisect-trt reduce` finds the smallest piece that does it, "
        f"`bisect-trt cure` what helps.{on_which}{first}",
    )
