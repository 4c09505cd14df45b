"""The whole network at FP32, TF32 and the reduced precision, emulated, and the layers' errors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.finding import Finding
from bisect_trt.core.names import some_of
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.verdict import Verdict
from bisect_trt.graph.passes.guards import SWALLOWING
from bisect_trt.numerics.errors.tensor_error import SHAPE_CHANGED
from bisect_trt.numerics.scores import times
from bisect_trt.probe.result import ProbeResult
from bisect_trt.stations.baselines.alike import note_alike
from bisect_trt.stations.baselines.checks import (
    check_decisions,
    check_metrics,
    check_model,
    check_reference,
    note_single_values,
)
from bisect_trt.stations.baselines.layer_errors import trace_layers
from bisect_trt.stations.baselines.near_ties import note_few_differ, note_near_ties
from bisect_trt.stations.baselines.traced_inputs import traced_inputs
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.ahead import draw_ahead
from bisect_trt.stations.draws.missed_inputs import missed_on

_FEW_COMPARED = 90.0
"""Per cent of the elements below which the first line says that the others were not compared."""


@dataclass(frozen=True)
class Baselines:
    """``fp32``, ``tf32`` and ``reduced`` (all layers lowered) by the first emulator; ``second`` the
    last by the other one, where the first passes it. ``layers`` has a row a layer.

    ``diagnosis`` is there if the baselines settle the case: strict FP32 fails, or nothing does.
    """

    fp32: ProbeResult
    tf32: ProbeResult
    reduced: ProbeResult
    second: ProbeResult | None
    layers: pd.DataFrame
    findings: tuple[Finding, ...]
    diagnosis: Diagnosis | None

    def probe_seconds(self, samples: int) -> float:
        """About what one emulated inference takes, where ``samples`` were given: that of the
        quickest baseline. A single one may have waited for a busy machine, or a lost worker.
        """
        return quickest_s((self.fp32, self.tf32, self.reduced), samples)

    @property
    def lowered(self) -> ProbeResult:
        """All layers lowered, by the emulator that it is worst on: the score that is shown, and
        that both must pass.
        """
        return _worse(self.reduced, self.second)

    def by_label(self) -> dict[str, ProbeResult]:
        """The baselines as rows of the outputs table."""
        rows = {r.plan.base.value: r for r in (self.fp32, self.tf32, self.reduced)}
        if self.second is not None:
            rows[f"{self.second.plan.base.value}, second emulator"] = self.second
        return rows


def quickest_s(found: Sequence[ProbeResult], samples: int) -> float:
    """What an emulated inference takes by the quickest of a few probes: the first opens a session,
    and starts a worker.

    Args:
        found: probes of any plans.
        samples: on how many samples each was made.
    """
    return min(result.seconds for result in found) / max(1, samples)


def measure_baselines(case: Case, bench: Bench) -> Baselines:
    """Run the whole network at each precision, then trace the layers."""
    bench.observer.station("baselines")
    precision = case.settings.precision
    plans = [PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.TF32), case.base]
    fp32, tf32, reduced = (bench.prober.probe(plan) for plan in plans)
    bench.pace.took(quickest_s((fp32, tf32, reduced), len(case.samples)))
    if not fp32.verdict.passed:
        check_metrics(case, bench)
        check_model(case, bench, fp32)
    check_reference(fp32, case.requirements)
    check_decisions(case, bench, fp32)
    note_single_values(case, bench, fp32)
    note_alike(case, bench)
    findings = bench.found(_findings(fp32, tf32, reduced, precision, case.requirements.rows))
    layers = trace_layers(case, bench, traced_inputs(case, bench))
    if not reduced.verdict.passed:
        note_near_ties(case, bench)
        note_few_differ(case, bench)
    second = None
    if reduced.verdict.passed:
        draw_ahead(case, bench)
        second = bench.second.probe(case.base)
    last = _worse(reduced, second)
    # An engine has a word of its own on everything that strict FP32 does not settle, and that the
    # given inputs pass does not mean that others would.
    settled = not fp32.verdict.passed or (
        bench.engine is None and (case.settings.fitted or not last.verdict.passed)
    )
    where = missed_on(case, bench.prober, fp32.plan) + _reduced_already(case)
    if fp32.verdict is Verdict.NON_FINITE:
        where += _beyond_its_type(case, bench) or _swallowed(case)
    diagnosis = _diagnose(fp32, tf32, last, precision, where) if settled else None
    return Baselines(fp32, tf32, reduced, second, layers, findings, diagnosis)


def _worse(first: ProbeResult, second: ProbeResult | None) -> ProbeResult:
    """The one with the larger score; the first where the second was not asked."""
    return first if second is None or first.score >= second.score else second


def _findings(
    fp32: ProbeResult,
    tf32: ProbeResult,
    reduced: ProbeResult,
    precision: Precision,
    rows: Collection[str],
) -> list[Finding]:
    found = [
        Finding(
            "shape",
            name,
            f"output {name!r} has another shape in {precision.value.upper()} than in FP32: another "
            "number of detections, say; no error tells that, and it counts as a miss: judge what "
            "is made of it with --metric MODULE:FUNCTION, detections with "
            "box_match(boxes,scores)",
            True,
        )
        for name, error in reduced.worst.items()
        if error.nonfinite == SHAPE_CHANGED and name not in rows
    ]
    for name, error in fp32.worst.items():
        if not error.elements:
            message = f"output {name!r} is empty on the given inputs: nothing of it was compared"
            found.append(Finding("reference", name, message, True))
        if error.ref_nonfinite:
            share = 100.0 * (1.0 - error.ref_nonfinite / max(1, error.elements))
            message = (
                f"output {name!r} of the FP32 reference holds {error.ref_nonfinite} NaN or "
                f"infinite values: the errors are those of the other {share:.3g} % of its elements"
            )
            found.append(Finding("reference", name, message, share < _FEW_COMPARED))
    spoilt = fp32.verdict.passed and not tf32.verdict.passed
    if precision is not Precision.TF32 and spoilt:
        message = (
            f"TF32 alone misses the requirement ({times(tf32.score, tf32.verdict)}): turn it off "
            "in the engine, pins cannot cure it."
        )
        found.append(Finding("tf32", "", message))
    return found


def nothing_to_pin(lowered: ProbeResult, precision: Precision) -> Diagnosis:
    """The case is settled: the reduced precision is good enough as it is."""
    held = len(lowered.plan.pinned)
    but = f" but what is held in FP32 (layers: {held})" if held else ""
    return Diagnosis(
        Cause.NONE,
        f"Everything{but} in {precision.value.upper()} meets the requirement "
        f"({times(lowered.score)}); nothing {'else ' if held else ''}needs to be pinned.",
    )


def _reduced_already(case: Case) -> str:
    """What strict FP32 may miss by where the source itself is reduced."""
    told = [f.message for f in case.findings if f.kind == "already-reduced" and f.weighty]
    return f" But {told[0]}." if told else ""


def _beyond_its_type(case: Case, bench: Bench) -> str:
    """Where an output reaches what its type in the source cannot hold."""
    for name, limit in case.requirements.limits.items():
        largest = max(
            float(np.abs(bench.references.of(s)[name]).max(initial=0.0)) for s in case.samples
        )
        if largest >= limit:
            return (
                f" Output {name!r} reaches {largest:.3g}, which its type in the source, FP16, "
                "cannot hold: declare that output FLOAT."
            )
    return ""


def _swallowed(case: Case) -> str:
    """Where the reference itself may hold NaN that its kernels hide."""
    nodes = zip(case.graph.proto.graph.node, case.graph.names, strict=True)
    names = [name for node, name in nodes if node.op_type in SWALLOWING]
    if not names:
        return ""
    return (
        f" FP32 itself may feed NaN or infinite values to {some_of(names, 2)}: ONNX Runtime's "
        "kernel makes numbers of them, which an engine does not."
    )


def _diagnose(
    fp32: ProbeResult, tf32: ProbeResult, lowered: ProbeResult, precision: Precision, where: str
) -> Diagnosis | None:
    """What the whole-network runs already settle; None if the reduced precision is to blame.
    ``where`` says on which inputs FP32 misses.
    """
    if not fp32.verdict.passed:
        return Diagnosis(
            Cause.NOT_PRECISION,
            "Strict FP32 already misses the requirement "
            f"({times(fp32.score, fp32.verdict)}): not a precision problem, and no pin can help. "
            "The model is random or ill-conditioned, the runner computes it differently, or the "
            f"requirement asks for more than FP32 gives.{where}",
        )
    if lowered.verdict.passed:
        return nothing_to_pin(lowered, precision)
    return tf32_to_blame(tf32) if precision is Precision.TF32 else None


def tf32_to_blame(tf32: ProbeResult) -> Diagnosis:
    """The case is settled: TF32 was asked for and misses what strict FP32 meets."""
    return Diagnosis(
        Cause.TF32,
        f"TF32 misses the requirement ({times(tf32.score, tf32.verdict)}) and strict FP32 meets "
        "it. TF32 is a switch of the whole engine that no pin can cure: turn it off "
        "(clear_flag(BuilderFlag.TF32), trtexec --noTF32).",
    )
