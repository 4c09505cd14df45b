"""One run's stations over its material: baselines, triage, bisect, and the engine's word on the
answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.weight_range import Finding, weight_findings
from bisect_trt.numerics.error_sample import ErrorSampler
from bisect_trt.probe.journal import RunFolder
from bisect_trt.probe.prober import Prober, ProbeResult
from bisect_trt.runners.emulator.rtx_runner import KernelRunner
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.runners.emulator.whole_model import WholeModelRunner
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.stations.bisect import Bisection, Bisector
from bisect_trt.stations.case import Material
from bisect_trt.stations.crews import open_fleet
from bisect_trt.stations.engine_baselines import (
    EngineBaselines,
    diagnose_engine,
    engine_baselines,
    open_engine,
    sums_in_fp16,
)
from bisect_trt.stations.engine_layer_errors import EngineTable, probe_effect_matters, trace_engine
from bisect_trt.stations.engine_verdict import MARGIN, EngineJudge, Fp32, Judgement
from bisect_trt.stations.golden import Explanation, explain_golden
from bisect_trt.stations.layer_errors import suspicion_of, trace_layers
from bisect_trt.stations.samples import suspicious_inputs
from bisect_trt.stations.sensitivity import Sensitivity, affordable, measure_sensitivity
from bisect_trt.stations.settings import Settings, default_folder
from bisect_trt.stations.triage import (
    Cause,
    Diagnosis,
    diagnose_baselines,
    diagnose_golden,
    diagnose_reduced,
    times,
)


class Job:
    """Nothing is written before the material has passed its checks. ``engine`` is None where the
    emulator judges.
    """

    def __init__(self, settings: Settings, observer: Observer, folder_suffix: str = "") -> None:
        self.settings = settings
        self.observer = observer
        self.material = Material(settings, observer)
        model, samples = self.material.model, self.material.samples
        path = settings.out or default_folder(model, settings.precision, folder_suffix)
        self.runner = EmulatedRunner(model.proto, samples, settings.precision)
        opened = open_engine(settings, self.material, path / "caches")
        self.base = PrecisionPlan(settings.precision)
        self.folder = RunFolder(path)
        self.fleet = open_fleet(settings, self.runner, self.material)
        self.prober = self._prober(self.fleet or self.runner, workers=settings.workers)
        self.prober.make_sampler = self._make_sampler
        self._kernels = sums_in_fp16(opened, settings.precision)
        other = (
            KernelRunner(self.runner) if self._kernels else WholeModelRunner(model.proto, samples)
        )
        self.second = self._prober(other, log=self.prober.log)
        self.second.make_sampler = lambda: self.prober.sampler
        self.opened = opened
        self.engine: Prober | None = None
        if opened is not None:
            self.engine = self._prober(opened, settings.workers, self.prober.log)
            self.engine.make_sampler = lambda: self.prober.sampler
        self.baselines: dict[str, ProbeResult] = {}
        self.engine_baselines: EngineBaselines | None = None
        self.sensitivity: Sensitivity | None = None
        self.diagnosis: Diagnosis | None = None
        self.table: pd.DataFrame | None = None
        self.judge: EngineJudge | None = None
        self.bisector: Bisector | None = None
        self.savable = False
        self.findings: list[Finding] = []
        if self.material.rewritten:
            count = len(self.material.rewritten)
            message = f"{count} LayerNorms were rewritten as one operator each; model.rewritten.onnx is what the plan is for"
            self._find(Finding("rewrite", next(iter(self.material.rewritten)), message))
        for sentence in suspicious_inputs(samples):
            self._find(Finding("input", sentence.partition(":")[0], sentence))
        for finding in weight_findings(model.proto, settings.precision):
            self._find(finding)

    def close(self) -> None:
        """Give back the engine's process and the journal."""
        if self.opened is not None:
            self.opened.close()
        if self.fleet is not None:
            self.fleet.close()
        self.folder.close()

    def baselines_only(self) -> Diagnosis | None:
        """The whole-network runs and the layers' errors; a diagnosis if they settle the cause
        already.
        """
        golden = self.material.golden
        if golden is not None:
            self.material.check_golden(golden)
            ended = diagnose_golden(
                self.material.requirements.score(golden, self.material.references[0]),
                lambda: self._explain(golden),
            )
            if ended is not None:
                return ended
        self.observer.station("baselines")
        precision = self.settings.precision
        for baseline in dict.fromkeys((Precision.FP32, Precision.TF32, precision)):
            self.baselines[baseline.value] = self.prober.probe(PrecisionPlan(baseline))
        fp32, tf32, base = (
            self.baselines[p.value] for p in (Precision.FP32, Precision.TF32, precision)
        )
        for name, error in fp32.worst.items():
            if error.ref_nonfinite:
                message = f"output {name!r} of the FP32 reference holds {error.ref_nonfinite} NaN or infinite values"
                self._find(
                    Finding("reference", name, f"{message}; they are left out of the errors")
                )
        if tf32 is not base and fp32.verdict.passed and not tf32.verdict.passed:
            message = f"TF32 alone misses the requirement ({times(tf32.score)}): turn it off in the engine, pins cannot cure it."
            self._find(Finding("tf32", "", message))
        self.table = self._trace()
        if base.verdict.passed:
            base = self.baselines[f"{precision.value}, second emulator"] = self.second.probe(
                self.base
            )
        if self.engine is None:
            return diagnose_baselines(fp32, tf32, base, precision)
        if not fp32.verdict.passed:
            return diagnose_baselines(fp32, tf32, base, precision)
        return self._engine_baselines(self.engine, fp32, tf32)

    def _explain(self, golden: Mapping[str, NDArray[Any]]) -> Explanation | None:
        """Which usual change of the inputs gives the golden outputs."""
        self.observer.station("golden outputs")
        reference = self.material.open_again()

        def score(arrays: Mapping[str, NDArray[Any]]) -> float:
            return self.material.requirements.score(golden, reference(arrays))

        return explain_golden(self.material.samples[0].arrays, score)

    def _engine_baselines(
        self, engine: Prober, fp32: ProbeResult, tf32: ProbeResult
    ) -> Diagnosis | None:
        self.observer.station("engine baselines")
        found = engine_baselines(engine, self.settings.precision, fp32, tf32)
        self.engine_baselines = found
        for finding in found.findings:
            self._find(finding)
        if found.identity is Fp32.TF32:
            self.base = PrecisionPlan(self.base.base, pin_precision=Precision.TF32)
        if found.base.worst:
            self.observer.station("engine layers")
            found.table = self._trace_engine(PrecisionPlan(self.settings.precision))
            if found.table is not None and found.table.note:
                self._find(Finding("engine-layers", "", found.table.note))
            if found.table is not None and probe_effect_matters(
                found.base.score, found.table.marked_score
            ):
                message = (
                    "marking all outputs changes this engine's result from "
                    f"{times(found.base.score)} to "
                    f"{times(found.table.marked_score)}: the tables of layers explain, the "
                    "unmarked engine decides"
                )
                self._find(Finding("probe-effect", "", message))
        return diagnose_engine(
            found,
            self.settings.precision,
            lambda: self._trace_engine(PrecisionPlan(Precision.FP32)),
        )

    def triage(self) -> Diagnosis:
        """The cause; the search only follows a searchable one."""
        settled = self.baselines_only()
        if settled is not None:
            return settled
        self.observer.station("triage")
        precision = self.settings.precision
        base = self._lowered_baseline()
        everything = self.prober.probe(self.base.with_pins(self.material.names))
        if self.engine is None and not everything.verdict.passed:
            return Diagnosis(
                Cause.NOT_PRECISION,
                "Even with every layer pinned the requirement is missed "
                f"({times(everything.score)}): pinning cannot help.",
            )
        self.savable = True
        assert self.table is not None
        measured = affordable(
            self.material.names, suspicion_of(self.table), self.baselines[precision.value].seconds
        )
        self.sensitivity = measure_sensitivity(
            self.prober,
            self.fleet or self.runner,
            self.material.samples,
            lambda: self.material.references,
            precision,
            measured,
            self.folder,
            self.observer,
        )
        heavy = frozenset(f.where for f in self.findings if f.kind == "weight-overflow")
        limit = self._first_limit(base, everything)
        self.diagnosis = diagnose_reduced(
            base.under(limit),
            self.table,
            self.sensitivity.under(limit),
            lambda p: self.prober.probe(self.base.with_pins(p)).under(limit),
            precision,
            heavy,
        )
        return self.diagnosis

    def bisect(self) -> Bisection | Judgement:
        """Search and verify the pins; with an engine, its word on them."""
        self.observer.station("bisect")
        for prober in filter(None, (self.prober, self.engine)):
            prober.on_probe = self._tell
        if self.engine is None:
            found = self._search(1.0)
            assert found is not None
            return found
        base, everything = (
            self._lowered_baseline(),
            self.prober.probe(self.base.with_pins(self.material.names)),
        )
        assert self.table is not None and self.sensitivity is not None
        suspicion = suspicion_of(self.table, self.sensitivity.scores)
        self.judge = EngineJudge(
            self.engine,
            self.base,
            sorted(self.material.names, key=lambda n: -suspicion.get(n, -math.inf)),
            self._search,
            lambda pins: max(
                p.probe(self.base.with_pins(pins)).score for p in (self.prober, self.second)
            ),
            self.settings.max_builds,
            self.settings.certify == "engine",
            self._floors(everything),
        )
        return self.judge.decide(self._first_limit(base, everything))

    def _lowered_baseline(self) -> ProbeResult:
        """All layers lowered, by the emulator that has the last word on it."""
        precision = self.settings.precision.value
        return self.baselines.get(f"{precision}, second emulator", self.baselines[precision])

    def _first_limit(self, base: ProbeResult, everything: ProbeResult) -> float:
        """The share of the tolerance to search within at first: 1, unless engine and emulator
        already disagree on the baselines.
        """
        found = self.engine_baselines
        if found is None:
            return 1.0
        if base.verdict.passed and math.isfinite(
            found.base.score
        ):  # the engine misses what the emulator meets
            return MARGIN * base.score / found.base.score
        if (
            not everything.verdict.passed and found.fp32.score > 0.0
        ):  # the engine meets what the emulator misses
            return max(1.0, MARGIN * everything.score / found.fp32.score)
        return 1.0

    def _floors(self, everything: ProbeResult) -> tuple[float, float]:
        """The scores that all pins leave, on the emulator and on the engine; an engine below its
        emulation leaves its own.
        """
        assert self.engine_baselines is not None
        return (everything.score, self.engine_baselines.fp32.score)

    def _search(self, limit: float) -> Bisection | None:
        """The emulator's answer within ``limit`` of the tolerance; None where even all pins miss
        it.
        """
        if (
            not self.prober.probe(self.base.with_pins(self.material.names))
            .under(limit)
            .verdict.passed
        ):
            return None
        assert self.sensitivity is not None and self.table is not None
        sensitivity = self.sensitivity.under(limit)
        self.bisector = Bisector(self.prober, self.second, self.base, self.material.names, limit)
        return self.bisector.run(suspicion_of(self.table, sensitivity.scores), sensitivity)

    def _trace(self) -> pd.DataFrame:
        key = self.prober.key(
            "layers", self.settings.precision.value, "kernels" if self._kernels else ""
        )
        plan = PrecisionPlan(self.settings.precision)
        return trace_layers(
            self.runner,
            self.material.samples,
            plan,
            self.material.layers,
            self.folder,
            key,
            self.observer,
            self._kernels,
        )

    def _trace_engine(self, plan: PrecisionPlan) -> EngineTable | None:
        if not isinstance(self.opened, TensorRTRunner) or self.engine is None or self.table is None:
            return None
        requirements, references = self.material.requirements, self.material.references

        def score(values: Sequence[Mapping[str, NDArray[Any]]]) -> float:
            return max(requirements.score(r, v) for r, v in zip(references, values, strict=True))

        tensors = {layer.name: layer.outputs for layer in self.material.layers}
        base = PrecisionPlan(self.settings.precision)
        return trace_engine(
            self.engine,
            self.opened,
            self.runner,
            self.material.samples,
            plan,
            base,
            self.table,
            tensors,
            self.folder,
            score,
        )

    def _prober(
        self, runner: Any, workers: int = 1, log: list[ProbeResult] | None = None
    ) -> Prober:
        material = self.material
        return Prober(
            runner,
            lambda: material.references,
            material.requirements,
            self.folder,
            material.key,
            workers,
            log,
        )

    def _make_sampler(self) -> ErrorSampler:
        limit = max(256, min(4096, 4_000_000 // max(1, len(self.material.layers))))
        references = self.material.references
        try:
            candidates: Sequence[Mapping[str, NDArray[Any]]] = list(
                self.runner.outputs(PrecisionPlan(self.settings.precision))
            )
        except (
            RunnerFailedError
        ):  # a rounded index out of range, say: that plan's own probe reports it
            candidates = references
        return ErrorSampler(self.material.requirements, references, candidates, limit)

    def _tell(self, result: ProbeResult) -> None:
        note = f"{result.runner}, {len(result.plan.pinned)} pins: {result.verdict.value}, {times(result.score)}"
        self.observer.progress(len(self.prober.log), 0, note)

    def _find(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.observer.finding(finding.message)
