"""The main job as a list of stations:

load -> reference -> baselines -> triage -> bisect -> verify -> report
"""

from __future__ import annotations

import inspect
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.bisecting import Bisection, Bisector
from bisect_trt.compare.requirements import TaskMetric, load_metric, parse_requirements
from bisect_trt.compare.sampling import ErrorSampler
from bisect_trt.errors import BadInputError, RunnerFailedError, RunnerUnavailableError
from bisect_trt.graph.layers import list_layers, with_unique_names
from bisect_trt.graph.load import LoadedModel, load_model, loadable
from bisect_trt.graph.weights import Finding, weight_findings
from bisect_trt.inputs import input_specs, load_samples, read_npz, suspicious_inputs
from bisect_trt.observer import Observer
from bisect_trt.precision import Precision, PrecisionPlan
from bisect_trt.prober import Prober, ProbeResult
from bisect_trt.report.write import write_report
from bisect_trt.result import Result, outputs_table, search_table
from bisect_trt.runners.emulated import EmulatedRunner
from bisect_trt.runners.sessions import reference_session, run_all
from bisect_trt.runners.whole import WholeModelRunner
from bisect_trt.sensitivity import Sensitivity, affordable, measure_sensitivity
from bisect_trt.store import RunFolder, content_key
from bisect_trt.tracing import suspicion_of, trace_layers
from bisect_trt.triage import Cause, Diagnosis, diagnose_baselines, diagnose_golden, diagnose_reduced, times
from bisect_trt.version import __version__

RUNNERS = ("auto", "emulated", "tensorrt", "onnxruntime-cuda")
Inputs = Sequence[str | Path | Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on. ``out`` None means ``reports/<model>-<precision>`` in the current folder."""

    model: str | Path | onnx.ModelProto
    inputs: Inputs
    precision: Precision = Precision.FP16
    runner: str = "auto"
    require: Sequence[str] = ()
    golden: str | Path | Mapping[str, NDArray[Any]] | None = None
    metrics: Sequence[str] = ()
    out: Path | None = None
    workers: int = 1


def run(settings: Settings, observer: Observer | None = None) -> Result:
    """The main job. Raises :class:`~bisect_trt.errors.BisectError` for what the user can mend."""
    began = time.perf_counter()
    job = Job(settings, observer or Observer())
    try:
        job.folder.discard("run.json")
        diagnosis = job.triage()
        bisection = job.bisect() if diagnosis.searchable else None
        result = job.result(diagnosis, bisection, time.perf_counter() - began)
        write_report(result, job.model.proto, job.folder)
        return result
    except KeyboardInterrupt:
        job.write_partial(time.perf_counter() - began)
        raise
    finally:
        job.folder.close()


@dataclass
class Job:
    """One run's loaded material and the stations over it; ``run`` is the order they are called in."""

    settings: Settings
    observer: Observer
    folder_suffix: str = ""
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._check(self.settings)
        self._open(self.settings)

    def _check(self, settings: Settings) -> None:
        """Load and refuse: nothing is written before all of this has passed."""
        self.observer.station("load")
        check_runner(settings.runner)
        if settings.precision is Precision.FP32:
            raise BadInputError("--precision fp32: that is the reference; choose fp16, bf16 or tf32")
        self.model: LoadedModel = load_model(settings.model)
        self.samples = load_samples(settings.inputs, input_specs(self.model.proto))
        self._session = self._open_reference()
        self.layers = [x for x in list_layers(self.model.proto) if settings.precision in x.precisions]
        if not self.layers:
            raise BadInputError(
                f"{self.model.name}: no layer can run in {settings.precision.value}: there is nothing to search "
                "(integer, quantised or already reduced models have no FP32 layers)"
            )
        self.task_metrics: dict[str, TaskMetric] = dict(load_metric(m) for m in settings.metrics)
        outputs = [o.name for o in self.model.proto.graph.output]
        for output in self.model.proto.graph.output:
            if not output.type.HasField("tensor_type"):
                raise BadInputError(f"{self.model.name}: output {output.name!r} is no tensor; sequences cannot be compared")
        self.requirements = parse_requirements(settings.require, outputs, self.task_metrics)
        self.golden = load_golden(settings.golden, outputs)
        if self.golden is not None and len(self.samples) > 1:
            raise BadInputError(f"--golden belongs to one input, and {len(self.samples)} were given; pass one --input")
        self.base = PrecisionPlan(settings.precision)
        self.runner = EmulatedRunner(self.model.proto, self.samples, settings.precision)

    def _open(self, settings: Settings) -> None:
        """The run's folder and journal, and all that answers from them."""
        self.folder = RunFolder(settings.out or default_folder(self.model, settings.precision, self.folder_suffix))
        self.run_key = content_key(
            __version__,
            self.model.digest,
            [(n, a.dtype.str, a.shape, sha256(a.tobytes()).hexdigest()) for s in self.samples for n, a in s.arrays.items()],
            self.requirements.texts,
            [source_of(m) for m in self.task_metrics.values()],
        )
        self.prober = Prober(self.runner, lambda: self.references, self.requirements, self.folder, self.run_key, settings.workers)
        self.prober.make_sampler = self._make_sampler
        whole = WholeModelRunner(self.model.proto, self.samples)
        self.second = Prober(whole, lambda: self.references, self.requirements, self.folder, self.run_key, log=self.prober.log)
        self.second.make_sampler = lambda: self.prober.sampler
        self.baselines: dict[str, ProbeResult] = {}
        self.sensitivity: Sensitivity | None = None
        self.diagnosis: Diagnosis | None = None
        self.savable = False
        self.bisector = Bisector(self.prober, self.second, self.base, [x.name for x in self.layers])
        for sentence in suspicious_inputs(self.samples):
            self._find("input", sentence.partition(":")[0], sentence)
        for finding in weight_findings(self.model.proto, settings.precision):
            self._find(finding.kind, finding.where, finding.message)

    @cached_property
    def references(self) -> list[dict[str, NDArray[Any]]]:
        """The reference outputs of each sample, computed when first needed; the session is then let go."""
        self.observer.station("reference")
        results = [run_all(self._session, s.arrays, s.name) for s in self.samples]
        del self._session
        return results

    def baselines_only(self) -> Diagnosis | None:
        """The whole-network runs and the layers' errors; a diagnosis if they settle the cause already."""
        if self.golden is not None:
            self._check_golden(self.golden)
            ended = diagnose_golden(self.requirements.score(self.golden, self.references[0]))
            if ended is not None:
                return ended
        self.observer.station("baselines")
        precision = self.settings.precision
        for baseline in dict.fromkeys((Precision.FP32, Precision.TF32, precision)):
            plan = PrecisionPlan(baseline)
            self.baselines[baseline.value] = self.prober.probe(plan)
        fp32, tf32, base = (self.baselines[p.value] for p in (Precision.FP32, Precision.TF32, precision))
        for name, error in fp32.worst.items():
            if error.ref_nonfinite:
                message = f"output {name!r} of the FP32 reference holds {error.ref_nonfinite} NaN or infinite values"
                self._find("reference", name, f"{message}; they are left out of the errors")
        if tf32 is not base and fp32.verdict.passed and not tf32.verdict.passed:
            self._find(
                "tf32", "", f"TF32 alone misses the requirement ({times(tf32.score)}): turn it off in the engine, pins "
                "cannot cure it."
            )  # fmt: skip
        self.table = self._trace()
        if base.verdict.passed:
            base = self.baselines[f"{precision.value}, second emulator"] = self.second.probe(self.base)
        return diagnose_baselines(fp32, tf32, base, precision)

    def triage(self) -> Diagnosis:
        """The cause; the search only follows a searchable one."""
        settled = self.baselines_only()
        if settled is not None:
            return settled
        self.observer.station("triage")
        precision = self.settings.precision
        base = self.baselines.get(f"{precision.value}, second emulator", self.baselines[precision.value])
        everything = self.prober.probe(self.base.with_pins(x.name for x in self.layers))
        if not everything.verdict.passed:
            return Diagnosis(
                Cause.NOT_PRECISION,
                f"Even with every layer pinned the requirement is missed ({times(everything.score)}): pinning cannot help.",
            )
        self.savable = True
        suspicion = suspicion_of(self.table)
        measured = affordable([x.name for x in self.layers], suspicion, base.seconds)
        self.sensitivity = measure_sensitivity(
            self.prober, self.runner, self.samples, lambda: self.references, precision, measured, self.folder, self.observer
        )
        heavy = frozenset(f.where for f in self.findings if f.kind == "weight-overflow")
        self.diagnosis = diagnose_reduced(
            base, self.table, self.sensitivity, lambda p: self.prober.probe(self.base.with_pins(p)), precision, heavy
        )
        return self.diagnosis

    def bisect(self) -> Bisection:
        """Search and verify the pins."""
        self.observer.station("bisect")
        self.prober.on_probe = lambda p: self.observer.progress(
            len(self.prober.done), 0, f"{len(p.plan.pinned)} pins: {p.verdict.value}, {times(p.score)}"
        )
        assert self.sensitivity is not None
        return self.bisector.run(suspicion_of(self.table, self.sensitivity.scores), self.sensitivity)

    def result(self, diagnosis: Diagnosis, bisection: Bisection | None, seconds: float) -> Result:
        """Everything found, as one record."""
        precision = self.settings.precision
        plan, final = self._answer(diagnosis, bisection)
        shown = dict(self.baselines)
        if bisection is not None:
            shown["plan"] = self.prober.probe(plan)
            shown["plan, second emulator"] = self.second.probe(plan)
        base = self.baselines.get(precision.value)
        passed = final is not None and final.verdict.passed
        return Result(
            model=self.model.name,
            precision=precision,
            runner=self.runner.name,
            cause=diagnosis.cause,
            sentence=diagnosis.sentence,
            passed=passed,
            complete=bisection is None or bisection.complete,
            plan=plan,
            score=final.score if final is not None else float("nan"),
            base_score=base.score if base is not None else float("nan"),
            layer_count=len(self.layers),
            layers=self._layers_table(plan),
            outputs=outputs_table(shown),
            search=search_table(self.prober.log),
            pins=self._pins_table(plan, bisection),
            requirements=self.requirements.texts,
            samples=[s.name for s in self.samples],
            findings=self.findings,
            probes={p.runner.name: len(p.done) for p in (self.prober, self.second) if p.done},
            new_probes=self.prober.new_probes + self.second.new_probes,
            effect_runs=self.sensitivity.runs if self.sensitivity is not None else 0,
            seconds=seconds,
            folder=self.folder.path,
            versions=versions(),
        )

    def write_partial(self, seconds: float) -> None:
        """After an interruption: the best plan so far, and every file, on disk; nothing if none is known to pass yet."""
        if not self.savable:
            return
        found = self.diagnosis or Diagnosis(Cause.UNKNOWN, "Interrupted before the cause was known.")
        sentence = f"{found.sentence} Interrupted: this is the best plan so far; run the same command again to go on."
        bisection = Bisection(self.bisector.best, {}, False)
        result = self.result(Diagnosis(found.cause, sentence, True), bisection, seconds)
        write_report(result, self.model.proto, self.folder)

    def _answer(self, diagnosis: Diagnosis, bisection: Bisection | None) -> tuple[PrecisionPlan, ProbeResult | None]:
        """The plan to write and the probe that says whether it meets the requirements."""
        if bisection is not None:
            plan = self.base.with_pins(bisection.pinned)
            return plan, max(self.prober.probe(plan), self.second.probe(plan), key=lambda r: r.score)
        if diagnosis.cause is Cause.NONE:
            return self.base, self.baselines[self.base.base.value]
        if diagnosis.cause is Cause.TF32:
            return PrecisionPlan(Precision.FP32), self.baselines["fp32"]
        return PrecisionPlan(Precision.FP32), None

    def _check_golden(self, golden: Mapping[str, NDArray[Any]]) -> None:
        for name, array in golden.items():
            shape = self.references[0][name].shape
            if array.shape != shape:
                raise BadInputError(f"--golden: output {name!r} has shape {array.shape}, the model gives {shape}")

    def _trace(self) -> pd.DataFrame:
        key = self.prober.key("layers", self.settings.precision.value)
        return trace_layers(self.runner, self.samples, self.base, self.layers, self.folder, key, self.observer)

    def _layers_table(self, plan: PrecisionPlan) -> pd.DataFrame:
        if not hasattr(self, "table"):
            return pd.DataFrame([{"layer": x.name, "op": x.op, "scope": x.scope, "pinned": False} for x in self.layers])
        table = self.table.copy()
        table["pinned"] = table["layer"].isin(plan.pinned)
        if self.sensitivity is not None:
            table["alone_score"] = table["layer"].map(dict(self.sensitivity.scores))
        return table

    def _pins_table(self, plan: PrecisionPlan, bisection: Bisection | None) -> pd.DataFrame:
        order = {(p.runner, p.plan): i for i, p in enumerate(self.prober.log)}
        rows = []
        for layer in self.layers:
            if layer.name in plan.pinned:
                proof = bisection.proof.get(layer.name) if bisection is not None else None
                rows.append(
                    {
                        "layer": layer.name,
                        "op": layer.op,
                        "scope": layer.scope,
                        "proved": proof is not None,
                        "verdict_without": proof.verdict.value if proof is not None else "",
                        "score_without": proof.score if proof is not None else float("nan"),
                        "proof_probe": order[(proof.runner, proof.plan)] if proof is not None else -1,
                    }
                )
        return pd.DataFrame(rows, columns=["layer", "op", "scope", "proved", "verdict_without", "score_without", "proof_probe"])

    def _make_sampler(self) -> ErrorSampler:
        limit = max(256, min(4096, 4_000_000 // max(1, len(self.layers))))
        try:
            candidates: Sequence[Mapping[str, NDArray[Any]]] = list(self.runner.outputs(self.base))
        except RunnerFailedError:  # a rounded index out of range, say: that plan's own probe reports it
            candidates = self.references
        return ErrorSampler(self.requirements, self.references, candidates, limit)

    def _open_reference(self) -> ort.InferenceSession:
        nodes = self.model.proto.graph.node
        named = [n.name for n in nodes if n.name]
        unique = len(set(named)) == len(named)
        if unique and self.model.path is not None:
            return reference_session(str(self.model.path))
        # ONNX Runtime refuses two nodes of one name, which other engines accept.
        with loadable(self.model.proto if unique else with_unique_names(self.model.proto)) as source:
            return reference_session(source)

    def _find(self, kind: str, where: str, message: str) -> None:
        self.findings.append(Finding(kind, where, message))
        self.observer.finding(message)


def source_of(metric: TaskMetric) -> str:
    """What the journal knows a task metric by: its source, or its name where Python cannot show one."""
    try:
        return inspect.getsource(metric)
    except (OSError, TypeError):
        return repr(metric)


def check_runner(name: str) -> None:
    """Raise if ``name`` is no runner, or none that works here."""
    if name not in RUNNERS:
        raise BadInputError(f"--runner {name}: unknown; choose one of {', '.join(RUNNERS)}")
    if name in ("tensorrt", "onnxruntime-cuda"):
        raise RunnerUnavailableError(f"--runner {name}: this version has no {name} runner yet; use --runner emulated, which needs no GPU")


def load_golden(golden: str | Path | Mapping[str, NDArray[Any]] | None, outputs: Sequence[str]) -> dict[str, Any] | None:
    """The golden outputs by name, checked against the model's. Raises :class:`BadInputError`."""
    if golden is None:
        return None
    where = "--golden" if isinstance(golden, Mapping) else f"--golden {golden}"
    if not isinstance(golden, Mapping) and not Path(golden).exists():
        raise BadInputError(f"{where}: no such file")
    arrays = dict(golden) if isinstance(golden, Mapping) else read_npz(Path(golden))
    unknown = [n for n in arrays if n not in outputs]
    if unknown or not arrays:
        named = repr(unknown[0]) if unknown else "nothing"
        raise BadInputError(f"{where}: holds {named}, which is no output of the model; it has {', '.join(outputs)}")
    return {name: np.asarray(a) for name, a in arrays.items()}


def default_folder(model: LoadedModel, precision: Precision, suffix: str) -> Path:
    """``reports/<model>-<precision><suffix>`` in the current folder."""
    stem = model.path.stem if model.path is not None else model.name.replace("/", "_")
    return Path("reports") / f"{stem}-{precision.value}{suffix}"


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    return {
        "bisect-trt": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": ort.__version__,
        "pandas": pd.__version__,
    }


def compare(settings: Settings, observer: Observer | None = None) -> Result:
    """The error tables of the baselines and layers, without a search; writes layers.csv, outputs.csv and the rest."""
    began = time.perf_counter()
    job = Job(settings, observer or Observer(), "-compare")
    try:
        diagnosis = job.baselines_only() or Diagnosis(Cause.ACCUMULATION, "Not searched: error tables only.")
        result = job.result(diagnosis, None, time.perf_counter() - began)
        for name in ("layers", "outputs"):
            job.folder.write(f"{name}.csv", getattr(result, name).to_csv(index=False, lineterminator="\n"))
        return result
    finally:
        job.folder.close()


@dataclass(frozen=True)
class Estimate:
    """What a run would cost: ``probes`` is an expected count, ``seconds`` follows from one measured inference."""

    layers: int
    effect_runs: int
    probes: int
    seconds_per_probe: float
    seconds: float

    @property
    def sentence(self) -> str:
        """The estimate for a person."""
        return (
            f"{self.layers} layers, {self.effect_runs} single-layer runs and about {self.probes} probes of "
            f"{self.seconds_per_probe * 1e3:.0f} ms: about {self.seconds:.0f} s"
        )


def estimate(settings: Settings) -> Estimate:
    """Price a run without searching or writing anything: one emulated inference is measured, twice, the second counts."""
    model = load_model(settings.model)
    check_runner(settings.runner)
    metrics = dict(load_metric(m) for m in settings.metrics)
    parse_requirements(settings.require, [o.name for o in model.proto.graph.output], metrics)
    samples = load_samples(settings.inputs, input_specs(model.proto))
    layers = [x.name for x in list_layers(model.proto) if settings.precision in x.precisions]
    runner = EmulatedRunner(model.proto, samples, settings.precision)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for _ in runner.outputs(PrecisionPlan(settings.precision)):
            pass
        seconds = time.perf_counter() - began
    rows = len(affordable(layers, {}, seconds))
    # A set of k pins takes about four probes a pin to grow, and as many again to shrink and prove; k is taken as 2 % of n.
    probes = 6 + 8 * max(2, len(layers) // 50)
    return Estimate(len(layers), rows, probes, seconds, rows * seconds / 2 + (probes + 6) * seconds)
