"""The engine's own FP32, TF32 and reduced baselines, and what its FP32 turns out to be."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.finding import Finding
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.numerics.requirements import times
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import ProbeResult
from bisect_trt.stations.baselines import Baselines
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case
from bisect_trt.stations.engine_layer_errors import (
    EngineTable,
    first_out_of_line,
    probe_effect_matters,
    trace_engine,
)
from bisect_trt.stations.fresh_test import planned_test
from bisect_trt.stations.holds import first_refusal


class Fp32(str, Enum):
    """What an engine's FP32 turned out to be."""

    STRICT = "strict"
    TF32 = "tf32"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


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


def agreement(one: ProbeResult, other: ProbeResult) -> float:
    """The cosine between two probes' sampled signed errors: near 1 if they make the same roundings;
    NaN if unknown.
    """
    if one.vector is None or other.vector is None or len(one.vector) != len(other.vector):
        return math.nan
    both = np.isfinite(one.vector) & np.isfinite(other.vector)
    a, b = one.vector[both].astype(np.float64), other.vector[both].astype(np.float64)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else math.nan


def _relative_rmse(result: ProbeResult) -> float:
    """The worst output's RMSE over its range."""
    return max(
        (e.rmse / max(e.ref_max - e.ref_min, 1e-30) for e in result.worst.values()),
        default=math.nan,
    )


@dataclass(frozen=True)
class EngineBaselines:
    """The engine's whole-network runs and what they say of its FP32.

    ``fingerprint`` is the cosine between the engine's FP32 errors and emulated TF32's; ``table``
    the layers' errors on the engine, where they could be had. ``pinned`` is all pins: ``fp32``
    where no layer is held reduced. ``diagnosis`` is there if the engine settles the case.
    """

    runner: str
    fp32: ProbeResult
    tf32: ProbeResult
    base: ProbeResult
    identity: Fp32
    fingerprint: float
    table: EngineTable | None
    findings: tuple[Finding, ...]
    pinned: ProbeResult
    diagnosis: Diagnosis | None

    @property
    def pin_precision(self) -> Precision:
        """What a pin really runs in on this engine."""
        return Precision.TF32 if self.identity is Fp32.TF32 else Precision.FP32

    def by_label(self) -> dict[str, ProbeResult]:
        """The baselines as rows of the outputs table."""
        return {f"{self.runner} {r.plan.base.value}": r for r in (self.fp32, self.tf32, self.base)}


def measure_engine(case: Case, bench: Bench, emulated: Baselines) -> EngineBaselines | None:
    """Three builds: FP32 with TF32 cleared, TF32 allowed, all layers lowered; then the layers.

    None where the emulator judges.

    Args:
        case: the model, the inputs and the requirements.
        bench: what builds.
        emulated: the emulators' baselines.

    Returns:
        None where the emulator judges.
    """
    engine, precision = bench.engine, case.settings.precision
    if engine is None:
        return None
    bench.observer.station("engine baselines")
    plans = (PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.TF32), case.base)
    fp32, tf32, base = (engine.probe(plan) for plan in plans)
    identity = what_fp32_is(fp32, emulated.fp32, emulated.tf32)
    findings = list(bench.found(_findings(identity, fp32, emulated)))
    table = None
    if base.worst:
        bench.observer.station("engine layers")
        table = trace_engine(case, bench, engine, PrecisionPlan(precision), emulated.layers)
    if table is not None:
        findings += bench.found(_findings_of_marking(table))

    def marked_fp32() -> EngineTable | None:
        plan = PrecisionPlan(Precision.FP32)
        return trace_engine(case, bench, engine, plan, emulated.layers)

    # TF32 is a switch of the whole engine: no pin could make up for its luck.
    luck_matters = base.verdict.passed and case.settings.robust and precision.is_storage
    lucky = bool(luck_matters) and passes_by_luck(case, bench, engine, base.plan, emulated)
    return EngineBaselines(
        engine.runner.name,
        fp32,
        tf32,
        base,
        identity,
        agreement(fp32, emulated.tf32),
        table,
        tuple(findings),
        engine.probe(case.base.with_pins(case.names)) if case.held_low else fp32,
        _diagnose(fp32, tf32, base, identity, precision, marked_fp32, lucky=lucky),
    )


def passes_by_luck(
    case: Case, bench: Bench, engine: Prober, plan: PrecisionPlan, emulated: Baselines
) -> bool:
    """Whether the engine of ``plan``, which passes the given inputs, is refused by fresh draws.

    Args:
        case: the inputs, and what is asked for.
        bench: where the draws' references are.
        engine: what runs the draws.
        plan: what it is built from.
        emulated: tells how long an inference takes.
    """
    if case.settings.pick is not None:
        return False
    test = planned_test(case, 0, emulated.probe_seconds(len(case.samples)), last=False)
    return first_refusal(case, bench, [engine], plan, test, 1.0) is not None


def _findings(identity: Fp32, fp32: ProbeResult, emulated: Baselines) -> list[Finding]:
    found = []
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    if override is not None:
        message = (
            f"NVIDIA_TF32_OVERRIDE={override} is set: it decides over TF32 in every CUDA library "
            "of the process; unset it"
        )
        found.append(Finding("tf32", "NVIDIA_TF32_OVERRIDE", message))
    if identity is Fp32.TF32:
        message = (
            "this engine's FP32 is TF32: with the TF32 flag cleared its errors are those of "
            f"emulated TF32 ({times(fp32.score)} against {times(emulated.tf32.score)}; strict FP32 "
            f"gives {times(emulated.fp32.score)}), so a pinned matrix product runs in TF32 too, "
            "and is emulated so from here on"
        )
        found.append(Finding("tf32", "", message))
    return found


def _findings_of_marking(table: EngineTable) -> list[Finding]:
    found = [Finding("engine-layers", "", table.note)] if table.note else []
    if probe_effect_matters(table.unmarked_score, table.marked_score):
        message = (
            "marking all outputs changes this engine's result from "
            f"{times(table.unmarked_score)} to "
            f"{times(table.marked_score)}: the tables of layers explain, the unmarked engine "
            "decides"
        )
        found.append(Finding("probe-effect", "", message))
    return found


def _diagnose(
    fp32: ProbeResult,
    tf32: ProbeResult,
    base: ProbeResult,
    identity: Fp32,
    precision: Precision,
    marked_fp32: Callable[[], EngineTable | None],
    *,
    lucky: bool,
) -> Diagnosis | None:
    """What the engine's own baselines settle; None if the reduced precision is to blame.

    ``marked_fp32`` measures each layer of the FP32 engine, to find where it goes wrong; it is asked
    only if it does.
    """
    if not fp32.verdict.passed:
        return _fp32_fails(fp32, identity, marked_fp32)
    if base.verdict.passed and not lucky:
        return Diagnosis(
            Cause.NONE,
            f"The {precision.value.upper()} engine meets the requirement ({times(base.score)}); "
            "nothing needs to be pinned.",
        )
    if base.verdict.passed:
        return None  # on fresh draws it does not: something has to be pinned
    if precision is Precision.TF32:
        return Diagnosis(
            Cause.TF32,
            f"TF32 misses the requirement on the engine ({times(tf32.score)}) and strict FP32 "
            "meets it: turn TF32 off (clear_flag(BuilderFlag.TF32), trtexec --noTF32).",
        )
    return None


def _fp32_fails(
    fp32: ProbeResult, identity: Fp32, marked_fp32: Callable[[], EngineTable | None]
) -> Diagnosis:
    if not fp32.worst:
        return Diagnosis(
            Cause.NOT_PRECISION,
            f"The FP32 engine cannot be built or run ({fp32.verdict}): {fp32.note}",
        )
    if identity is Fp32.TF32:
        return Diagnosis(
            Cause.TF32,
            f"This runtime's FP32 is TF32 (its errors, {times(fp32.score)}, are those of emulated "
            "TF32), and TF32 misses the requirement: no plan can pass on it. Use a runtime that "
            "honours a cleared TF32 flag, or allow TF32's error.",
        )
    table = marked_fp32()
    where = first_out_of_line(table) if table is not None else None
    first = f" The first layer out of line is {where!r}: reduce the report to it." if where else ""
    return Diagnosis(
        Cause.NOT_PRECISION,
        f"Strict FP32 already misses the requirement on the engine ({times(fp32.score)}): not a "
        f"precision problem, the engine or its parser computes something else.{first}",
    )
