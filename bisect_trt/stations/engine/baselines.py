"""The engine's own FP32, TF32 and reduced baselines, and what its FP32 turns out to be."""

from __future__ import annotations

import math
import os
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from functools import partial

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.errors import RunnerFailedError, one_line
from bisect_trt.core.finding import Finding
from bisect_trt.core.holds import Holds
from bisect_trt.core.machine.beside import Beside
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.steadiness import Steadiness
from bisect_trt.numerics.scores import times
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import ProbeResult
from bisect_trt.runners.ort.devices import CPU
from bisect_trt.stations.baselines.baselines import Baselines
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.bench.engine_ahead import baseline_plans, begin
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.fresh_test import next_test
from bisect_trt.stations.draws.holds import put_to_test
from bisect_trt.stations.draws.missed_inputs import missed_on
from bisect_trt.stations.engine.checks import check_engine
from bisect_trt.stations.engine.diagnosis import (
    Fp32,
    agreement,
    diagnose,
    steadiness_of_failure,
    what_fp32_is,
)
from bisect_trt.stations.engine.layer_errors import begin_tracing, trace_engine
from bisect_trt.stations.engine.steadiness import note_unsteadiness, unsteady
from bisect_trt.stations.engine.table import EngineTable, findings_of


@dataclass(frozen=True)
class EngineBaselines:
    """The engine's whole-network runs and what they say of its FP32.

    ``fingerprint`` is the cosine between the engine's FP32 errors and emulated TF32's; ``table``
    the layers' errors on the engine, where they could be had, and ``tracing`` what will give it
    while it is still made (see :func:`with_table`). ``pinned`` is all pins: ``fp32`` where no layer
    is held reduced. ``diagnosis`` is there if the engine settles the case, ``holds`` the test on
    fresh draws where nothing has to be pinned, ``steadiness`` where an engine had to be looked at
    in further processes for it.
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
    steadiness: Steadiness | None = None
    tracing: Future[EngineTable | None] | None = None
    holds: Holds | None = None

    @property
    def pin_precision(self) -> Precision:
        """What a pin really runs in on this engine."""
        return Precision.TF32 if self.identity is Fp32.TF32 else Precision.FP32

    def by_label(self) -> dict[str, ProbeResult]:
        """The baselines as rows of the outputs table."""
        return {f"{self.runner} {r.plan.base.value}": r for r in (self.fp32, self.tf32, self.base)}


def begin_engine(case: Case, bench: Bench) -> None:
    """Begin what :func:`measure_engine` will ask of the engine, beside what the emulators do;
    nothing where a run before this one was settled by the emulators' FP32.
    """
    if bench.engine is None:
        return
    strict = PrecisionPlan(Precision.FP32)
    if bench.prober.knows(strict) and not bench.prober.probe(strict).verdict.passed:
        return
    for wanted in dict.fromkeys(baseline_plans(case)):
        if not bench.engine.knows(wanted):
            begin(bench.opened, wanted)
    if not bench.engine.knows(case.base):
        named = [x.name for x in case.layers if case.marked is None or x.name in case.marked]
        plan = PrecisionPlan(case.settings.precision, held=case.unfit)
        begin_tracing(case, bench, bench.engine, plan, named)


def measure_engine(
    case: Case, bench: Bench, emulated: Baselines, beside: Beside | None = None
) -> EngineBaselines | None:
    """Three builds: FP32 with TF32 cleared, TF32 allowed, all layers lowered; then the layers.

    None where the emulator judges.

    Args:
        case: the model, the inputs and the requirements.
        bench: what builds.
        emulated: the emulators' baselines.
        beside: makes the table of layers beside what follows, where that needs no engine and a GPU
            emulates: comparing ViT-L's takes 10 s of the processor's.

    Returns:
        None where the emulator judges.
    """
    engine, precision = bench.engine, case.settings.precision
    if engine is None:
        return None
    bench.observer.station("engine baselines")
    plans = baseline_plans(case)
    shown = emulated.layers
    if case.marked is not None:
        shown = shown[shown["layer"].isin(case.marked)]
    fp32 = engine.probe(plans[0])
    identity = what_fp32_is(fp32, emulated.fp32, emulated.tf32)
    findings = list(bench.found(_findings(identity, fp32, emulated)))
    if fp32.worst:  # the engine is still there
        fp32_is = emulated.tf32 if identity is Fp32.TF32 else emulated.fp32
        findings += check_engine(case, bench, fp32.plan, fp32_is)
    tf32, base = engine.probe(plans[1]), engine.probe(plans[2])
    if base.worst:
        findings += check_engine(case, bench, base.plan, emulated.reduced)
    table, tracing = None, None
    traced = PrecisionPlan(precision, held=case.unfit)
    trace = partial(trace_engine, case, bench, engine, traced, shown)
    searches = fp32.verdict.passed and not base.verdict.passed and not case.held_low
    if base.worst and beside is not None and searches and bench.emulator.device != CPU:
        tracing = beside.begin(trace)
    elif base.worst:
        bench.observer.station("engine layers")
        table = trace()
        findings += _told_by(table, bench)
    measured = EngineBaselines(
        engine.runner.name,
        fp32,
        tf32,
        base,
        identity,
        agreement(engine.vector(fp32.plan), bench.prober.vector(emulated.tf32.plan)),
        table,
        tuple(findings),
        fp32,
        None,
        tracing=tracing,
    )
    return _diagnosed(case, bench, engine, measured, emulated)


def _diagnosed(
    case: Case, bench: Bench, engine: Prober, found: EngineBaselines, emulated: Baselines
) -> EngineBaselines:
    """``found`` with what it shows, as far as that settles the case, and all pins beside it."""
    fp32, base, precision = found.fp32, found.base, case.settings.precision

    def marked_fp32() -> EngineTable | None:
        plan = PrecisionPlan(Precision.FP32)
        return trace_engine(case, bench, engine, plan, emulated.layers)

    # TF32 is a switch of the whole engine: no pin could make up for its luck.
    luck_matters = base.verdict.passed and not case.settings.fitted and precision.is_storage
    lucky, holds = False, None
    if luck_matters and case.settings.pick is None:
        test = next_test(case, bench)
        refused, holds = put_to_test(case, bench, [engine], base.plan, test, 1.0)
        lucky = refused is not None
    steadiness = steadiness_of_failure(bench, fp32, base)
    blamed: PrecisionPlan | None = None
    if steadiness is not None and steadiness.decides:
        blamed = base.plan if fp32.verdict.passed else fp32.plan
        diagnosis: Diagnosis | None = unsteady(blamed.base.value.upper(), steadiness)
    else:
        diagnosis = diagnose(
            fp32,
            found.tf32,
            base,
            found.identity,
            precision,
            marked_fp32,
            lucky=lucky,
            on_which=missed_on(case, engine, fp32.plan),
        )
    pinned = engine.probe(case.base.with_pins(case.names)) if case.held_low else fp32
    if diagnosis is None or diagnosis.cause is not Cause.NONE:
        holds = None
    told = list(found.findings)
    for plan in dict.fromkeys(p for p in (fp32.plan, found.tf32.plan, base.plan) if p != blamed):
        seen = engine.done[plan].steadiness
        told += bench.found(note_unsteadiness(plan.base.value.upper(), seen))
    found = replace(found, findings=tuple(told), diagnosis=diagnosis, steadiness=steadiness)
    return replace(found, pinned=pinned, holds=holds)


def with_table(engine: EngineBaselines, bench: Bench) -> EngineBaselines:
    """``engine`` with the table of layers; waits for it where it is still made. Before anything
    else is asked of the engine, which is one process. Without it where it could not be made, or
    not in the time that is left: it explains, and decides nothing.

    Args:
        engine: the baselines.
        bench: hears of what the table shows, and knows the time.
    """
    if engine.tracing is None:
        return engine
    left, table, why = bench.time.left_s, None, ""
    try:
        table = engine.tracing.result(left if math.isfinite(left) else None)
    except RunnerFailedError as error:
        why = one_line(error)
    except FutureTimeout:
        why = "the time is over"
    found = _told_by(table, bench)
    if why:
        message = f"the layers were not compared on the engine: {why}"
        found = bench.found([Finding("engine-layers", "", message)])
    return replace(engine, table=table, tracing=None, findings=(*engine.findings, *found))


def _told_by(table: EngineTable | None, bench: Bench) -> tuple[Finding, ...]:
    return () if table is None else bench.found(findings_of(table))


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
