"""The engine's part of a run: which runner judges, what its baselines say, what its layers err,
what the pins cost.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from bisect_trt.core.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.weight_range import Finding
from bisect_trt.probe.prober import Prober, ProbeResult
from bisect_trt.runners.onnxruntime_cuda import OrtCudaRunner
from bisect_trt.runners.tensorrt.module import installed_module
from bisect_trt.runners.tensorrt.runner import TensorRTRunner, own_share
from bisect_trt.stations.case import Material
from bisect_trt.stations.crews import engine_crew
from bisect_trt.stations.engine_layer_errors import EngineTable, first_out_of_line
from bisect_trt.stations.engine_verdict import Fp32, agreement, what_fp32_is
from bisect_trt.stations.settings import Settings
from bisect_trt.stations.triage import Cause, Diagnosis, times

EngineRunner = TensorRTRunner | OrtCudaRunner


def open_engine(settings: Settings, material: Material, caches: Path) -> EngineRunner | None:
    """The runner that ``--runner`` names; None for the emulator, and for ``auto`` where no engine
    can run here.

    Raises :class:`RunnerUnavailableError` if the one asked for cannot.
    """
    if settings.runner == "onnxruntime-cuda":
        return OrtCudaRunner(
            material.model.proto, material.samples, timeout_s=settings.probe_timeout_s
        )
    if settings.runner == "emulated" or (
        settings.runner == "auto" and not _engine_likely(settings.trt_module)
    ):
        return None
    try:
        return TensorRTRunner(
            material.model.proto,
            material.samples,
            settings.trt_module,
            profiles=settings.profiles,
            caches=caches,
            timeout_s=settings.probe_timeout_s,
            weak=settings.typing == "weak",
            hire=partial(engine_crew, settings),
        )
    except (RunnerUnavailableError, RunnerFailedError) as error:
        if settings.runner == "auto":
            return None
        raise RunnerUnavailableError(f"--runner tensorrt: {error}") from error


def sums_in_fp16(engine: EngineRunner | None, precision: Precision) -> bool:
    """True for an engine whose sums are those of
    :mod:`bisect_trt.runners.emulator.rtx_arithmetic`.
    """
    return (
        precision is Precision.FP16
        and isinstance(engine, TensorRTRunner)
        and "tensorrt_rtx" in engine.versions
    )


def _engine_likely(module: str | None) -> bool:
    """Whether it is worth starting a process to ask: TensorRT is installed and NVIDIA's driver
    library loads.
    """
    if installed_module(module) is None:
        return False
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


@dataclass
class EngineBaselines:
    """The engine's whole-network runs and what they say of its FP32."""

    fp32: ProbeResult
    tf32: ProbeResult
    base: ProbeResult
    identity: Fp32
    fingerprint: float
    """The cosine between the engine's FP32 errors and emulated TF32's."""
    table: EngineTable | None = None
    findings: list[Finding] = field(default_factory=list)

    def by_label(self, runner: str) -> dict[str, ProbeResult]:
        """The baselines as rows of the outputs table."""
        return {f"{runner} {r.plan.base.value}": r for r in (self.fp32, self.tf32, self.base)}


def engine_baselines(
    engine: Prober, precision: Precision, strict: ProbeResult, tf32: ProbeResult
) -> EngineBaselines:
    """Three builds: FP32 with TF32 cleared, TF32 allowed, all layers lowered. ``strict`` and
    ``tf32`` are the emulated ones.
    """
    results = {
        p: engine.probe(PrecisionPlan(p))
        for p in dict.fromkeys((Precision.FP32, Precision.TF32, precision))
    }
    found = results[Precision.FP32]
    identity = what_fp32_is(found, strict, tf32)
    baselines = EngineBaselines(
        found, results[Precision.TF32], results[precision], identity, agreement(found, tf32)
    )
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    if override is not None:
        message = f"NVIDIA_TF32_OVERRIDE={override} is set: it decides over TF32 in every CUDA library of the process; unset it"
        baselines.findings.append(Finding("tf32", "NVIDIA_TF32_OVERRIDE", message))
    if identity is Fp32.TF32:
        message = (
            "this engine's FP32 is TF32: with the TF32 flag cleared its errors are those of "
            "emulated TF32 "
            f"({times(found.score)} against {times(tf32.score)}; strict FP32 gives "
            f"{times(strict.score)}), so a pinned matrix "
            "product runs in TF32 too, and is emulated so from here on"
        )
        baselines.findings.append(Finding("tf32", "", message))
    return baselines


def diagnose_engine(
    found: EngineBaselines, precision: Precision, marked_fp32: Callable[[], EngineTable | None]
) -> Diagnosis | None:
    """What the engine's own baselines settle; None if the reduced precision is to blame.

    ``marked_fp32`` measures each layer of the FP32 engine, to find where it goes wrong; it is asked
    only if it does.
    """
    if not found.fp32.verdict.passed:
        return _fp32_fails(found, marked_fp32)
    if found.base.verdict.passed:
        return Diagnosis(
            Cause.NONE,
            f"The {precision.value.upper()} engine meets the requirement "
            f"({times(found.base.score)}); nothing needs to be pinned.",
        )
    if precision is Precision.TF32:
        return Diagnosis(
            Cause.TF32,
            f"TF32 misses the requirement on the engine ({times(found.tf32.score)}) and strict "
            "FP32 meets it: turn TF32 off "
            "(clear_flag(BuilderFlag.TF32), trtexec --noTF32).",
        )
    return None


def _fp32_fails(found: EngineBaselines, marked_fp32: Callable[[], EngineTable | None]) -> Diagnosis:
    if not found.fp32.worst:
        return Diagnosis(
            Cause.NOT_PRECISION,
            f"The FP32 engine cannot be built or run ({found.fp32.verdict}): {found.fp32.note}",
        )
    if found.identity is Fp32.TF32:
        return Diagnosis(
            Cause.TF32,
            f"This runtime's FP32 is TF32 (its errors, {times(found.fp32.score)}, are those of "
            "emulated TF32), and TF32 misses "
            "the requirement: no plan can pass on it. Use a runtime that honours a cleared TF32 "
            "flag, or allow TF32's error.",
        )
    table = marked_fp32()
    where = first_out_of_line(table) if table is not None else None
    piece = f" The first layer out of line is {where!r}: reduce the report to it." if where else ""
    return Diagnosis(
        Cause.NOT_PRECISION,
        f"Strict FP32 already misses the requirement on the engine ({times(found.fp32.score)}): "
        "not a precision problem, the "
        f"engine or its parser computes something else.{piece}",
    )


def cost_table(results: Mapping[str, ProbeResult]) -> pd.DataFrame:
    """A row for each engine: latency, size, build time, and the tool's own share of the probe's
    time.
    """
    rows: list[dict[str, Any]] = []
    for label, result in results.items():
        facts = result.facts
        if "latency_ms" in facts:
            seconds = facts["seconds"]
            rows.append(
                {
                    "engine": label,
                    "verdict": result.verdict.value,
                    "pins": len(result.plan.pinned),
                    "latency_ms": facts["latency_ms"],
                    "engine_mb": facts["engine_bytes"] / 1e6,
                    **{
                        f"{step}_s": seconds.get(step, float("nan"))
                        for step in ("write", "parse", "build", "load", "context", "run")
                    },
                    "probe_s": result.seconds,
                    "own_share": own_share(result.seconds, facts),
                }
            )
    return pd.DataFrame(rows)


def findings_of(results: Sequence[ProbeResult]) -> list[Finding]:
    """What the engines' builders and read-backs found, each once; a probe that broke says so with
    its log's last lines.
    """
    found: dict[str, Finding] = {}
    for result in results:
        for entry in result.facts.get("findings", ()):
            found.setdefault(entry["message"], Finding(**entry))
        if result.note and not result.worst:
            message = f"{result.runner}, {result.plan.base.value} with {len(result.plan.pinned)} pins: {result.verdict}: {result.note}"
            found.setdefault(message, Finding("engine-failure", "", message))
    return list(found.values())
