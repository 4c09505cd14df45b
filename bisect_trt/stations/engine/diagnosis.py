"""What an engine's own baselines say: what its FP32 is, and whether they settle the case."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum

import numpy as np

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.precision import Precision
from bisect_trt.core.steadiness import Steadiness
from bisect_trt.numerics.errors.tensor_error import TensorError
from bisect_trt.numerics.scores import times
from bisect_trt.probe.result import ProbeResult, Vector
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.engine.steadiness import begin_further, over_processes, runs_of
from bisect_trt.stations.engine.table import EngineTable, first_out_of_line


class Fp32(StrEnum):
    """What an engine's FP32 turned out to be."""

    STRICT = "strict"
    TF32 = "tf32"
    OTHER = "other"


def what_fp32_is(engine: ProbeResult, strict: ProbeResult, tf32: ProbeResult) -> Fp32:
    """Which emulated baseline the engine's FP32 errors look like, by their RMSE over the outputs.

    TF32 can only be recognised where it differs from FP32 tenfold (a model without matrix products
    cannot tell).

    Args:
        engine: FP32 on the engine.
        strict: FP32 on the emulator.
        tf32: TF32 on the emulator.
    """
    found, exact, rounded = (_relative_rmse(r) for r in (engine, strict, tf32))
    if not all(math.isfinite(e) for e in (found, exact, rounded)):
        return Fp32.OTHER
    if rounded > 10.0 * exact and rounded / 4.0 <= found <= rounded * 4.0:
        return Fp32.TF32
    return Fp32.STRICT if found <= max(30.0 * exact, 1e-6) else Fp32.OTHER


def agreement(one: Vector | None, other: Vector | None) -> float:
    """The cosine between two probes' sampled signed errors: near 1 if they make the same roundings;
    NaN if unknown.

    Args:
        one: signed errors of a plan, (elements,) float32; None where there are none.
        other: those of another, or of another runner, at the same elements.
    """
    if one is None or other is None or len(one) != len(other):
        return math.nan
    both = np.isfinite(one) & np.isfinite(other)
    a, b = one[both].astype(np.float64), other[both].astype(np.float64)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else math.nan


def _relative_rmse(result: ProbeResult) -> float:
    """The worst output's RMSE over its range, or where that is 0 over the largest magnitude."""

    def scale(error: TensorError) -> float:
        spread = error.ref_max - error.ref_min
        return max(spread or max(abs(error.ref_max), abs(error.ref_min)), 1e-30)

    return max((e.rmse / scale(e) for e in result.worst.values()), default=math.nan)


def steadiness_of_failure(bench: Bench, fp32: ProbeResult, base: ProbeResult) -> Steadiness | None:
    """The steadiness of the baseline that fails, FP32 first, where it is the engine's to blame.

    FP32 that misses the requirement is run in further processes too: it may be right there.

    Args:
        bench: what builds.
        fp32: the engine's FP32.
        base: all layers lowered.

    Returns:
        None where FP32 and the runs of ``base`` are steady, or nothing could be run.
    """
    if not fp32.verdict.passed and fp32.worst:
        seen = runs_of([fp32])
        if seen.decides:
            return seen
        begin_further(bench, fp32.plan)
        return over_processes(bench, fp32)
    # What misses in every run needs pins first; the answer's engine is looked at again.
    may_pass = base.best_score is not None and base.best_score <= 1.0
    if not base.verdict.passed and may_pass and base.steadiness is not None:
        return base.steadiness if base.steadiness.decides else None
    return None


def diagnose(
    fp32: ProbeResult,
    tf32: ProbeResult,
    base: ProbeResult,
    identity: Fp32,
    precision: Precision,
    marked_fp32: Callable[[], EngineTable | None],
    *,
    lucky: bool,
    on_which: str,
) -> Diagnosis | None:
    """What the engine's own baselines settle; None if the reduced precision is to blame.

    Args:
        fp32: the engine's FP32.
        tf32: its TF32.
        base: all layers lowered.
        identity: what its FP32 is.
        precision: what layers are lowered to.
        marked_fp32: measures each layer of the FP32 engine, to find where it goes wrong; asked only
            if it does.
        lucky: whether fresh draws refuse ``base``, which passes the given inputs.
        on_which: where FP32 misses, in words.
    """
    if not fp32.verdict.passed:
        return _fp32_fails(fp32, identity, marked_fp32, on_which)
    if base.verdict.passed and not lucky:
        held = len(base.plan.pinned)
        but = f" with what is held in FP32 (layers: {held})" if held else ""
        return Diagnosis(
            Cause.NONE,
            f"The {precision.value.upper()} engine{but} meets the requirement "
            f"({times(base.score)}); nothing {'else ' if held else ''}needs to be pinned.",
        )
    if base.verdict.passed:
        return None  # on fresh draws it does not: something has to be pinned
    if precision is Precision.TF32:
        return Diagnosis(
            Cause.TF32,
            f"TF32 misses the requirement on the engine ({times(tf32.score, tf32.verdict)}) "
            "and strict FP32 meets it: turn TF32 off (clear_flag(BuilderFlag.TF32), trtexec "
            "--noTF32).",
        )
    return None


def _fp32_fails(
    fp32: ProbeResult,
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
