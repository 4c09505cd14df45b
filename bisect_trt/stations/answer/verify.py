"""``verify``: does a plan still hold, for new weights or new inputs? One answer, made for release
gates.

The plan is executed by both emulators and, where one can run, by the engine; the typed model's
types are checked against it, by ONNX's own inference and by TensorRT's parser where that is
installed; and the forms in which older versions are told of the pins are read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx
from onnx import TensorProto

from bisect_trt.core.errors import (
    BadInputError,
    RunnerFailedError,
    RunnerUnavailableError,
    one_line,
)
from bisect_trt.core.holds import Holds, word_of
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.files.aside import values_aside
from bisect_trt.graph.files.load import load_model
from bisect_trt.graph.files.runtime_forms import file_form
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.graph.passes.weak_forms import (
    names_in_tensorrt,
    pins_of_script,
    pins_of_trtexec,
    polygraphy_script,
    trtexec_arguments,
)
from bisect_trt.graph.tensors.operator_rules import STORAGE_TYPE
from bisect_trt.graph.tensors.tensor_types import infer_types
from bisect_trt.numerics.scores import times
from bisect_trt.probe.result import ProbeResult
from bisect_trt.runners.tensorrt.module import installed_module
from bisect_trt.runners.tensorrt.profile import profile_of, values_of
from bisect_trt.runners.tensorrt.readback import dishonoured_after_parsing
from bisect_trt.runners.tensorrt.records import EngineRequest
from bisect_trt.runners.workers.process import IsolatedWorker
from bisect_trt.stations.asked.saved_plan import SavedPlan
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.asked.thread_limit import within_threads
from bisect_trt.stations.baselines.baselines import quickest_s
from bisect_trt.stations.baselines.golden import check_golden
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.bench.open_bench import open_bench
from bisect_trt.stations.case.case import Case, load
from bisect_trt.stations.draws.drawn import SEARCH_STREAM, variants
from bisect_trt.stations.draws.fresh_test import VERIFYING, WANTED, planned_test
from bisect_trt.stations.draws.holds import measure_holds

_NO_SHAPE = "Field 'shape' of 'type' is required"
PARSER = "bisect_trt.runners.tensorrt.parser_worker:ParsingWorker"


@dataclass(frozen=True)
class Check:
    """One way in which the plan was looked at. ``holds`` None means that it could not be looked at
    here, and ``detail`` why.
    """

    what: str
    holds: bool | None
    detail: str


@dataclass(frozen=True)
class Verification:
    """``passed`` if the runner that decides meets the requirements and nothing that was looked at
    contradicts the plan. ``notes`` say what became of the inputs that were given.
    """

    plan: PrecisionPlan
    checks: Sequence[Check]
    requirements: Sequence[str] = field(default_factory=tuple)
    holds: Holds | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """No check failed."""
        return all(check.holds is not False for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def as_json(self) -> dict[str, Any]:
        """The answer for machines."""
        return {
            "passed": self.passed,
            "plan": {"base": self.plan.base.value, "pinned": sorted(self.plan.pinned)},
            "requirements": list(self.requirements),
            "checks": [vars(c) for c in self.checks],
            "holds": self._holds_json(),
            "robust": word_of(self.holds),
            "notes": list(self.notes),
        }

    def _holds_json(self) -> dict[str, Any] | None:
        if self.holds is None:
            return None
        return {name: value for name, value in asdict(self.holds).items() if name != "draws"}


@within_threads
def verify(settings: Settings, saved: SavedPlan, observer: Observer) -> Verification:
    """Check a plan on the settings' model and inputs, by its own requirements where the settings
    name none. Nothing is searched, so that every input counts: none is kept apart by itself.

    Args:
        settings: the model, the inputs and what is asked for.
        saved: the plan.
        observer: hears of the progress.

    Raises:
        BadInputError: it is no plan of this model.
    """
    if settings.robust is None and settings.holds_on is None:
        settings = replace(settings, robust=saved.robust or WANTED)
    if not settings.require and saved.requirements:
        metrics = settings.metrics or saved.metrics
        share = saved.holds_on if settings.holds_on is None else settings.holds_on
        settings = replace(settings, require=saved.requirements, metrics=metrics, holds_on=share)
    settings = replace(settings, holdout=settings.holdout or ("none",))
    if settings.rewrite is None:  # refused before a folder is made
        saved.check_model(Graph(load_model(settings.model).proto))
    case = load(settings, observer)
    saved.check_model(case.graph)
    with open_bench(case, observer, "-verify") as bench:
        case = replace(case, on_engine=bench.engine is not None)
        observer.station("verify")
        if settings.variants != "auto":  # kinds that were named and make none are refused now
            next(variants(case, bench, SEARCH_STREAM, 1), None)
        checks = _golden(case, bench) + _judgements(bench, saved.plan)
        checks += [_typed(case.graph, saved.plan), _parsed(case, saved.plan)]
        checks += _written(case.graph, saved.plan)
        others = (PrecisionPlan(Precision.FP32), case.base)
        probes = [bench.prober.probe(plan) for plan in (saved.plan, *others)]
        bench.pace.took(quickest_s(probes, len(case.samples)))
        test = planned_test(case, VERIFYING, bench.pace.usual_seconds, last=True)
        holds = measure_holds(case, bench, bench.judges, saved.plan, test)
        holds = replace(holds, fitted=saved.fitted)
        notes = [f.message for f in case.findings if f.kind == "copies"]
        return Verification(saved.plan, checks, case.requirements.texts, holds, notes)


def _golden(case: Case, bench: Bench) -> list[Check]:
    """Whether the reference gives the golden outputs, where there are some."""
    if case.golden is None:
        return []
    differs = check_golden(case, bench)
    said = differs.sentence if differs is not None else "the reference gives them"
    return [Check("golden outputs", differs is None, said)]


def _judgements(bench: Bench, plan: PrecisionPlan) -> list[Check]:
    """The engine decides where there is one; the emulators' word is then shown, but an engine may
    do better than they say.
    """
    emulators = (bench.prober, bench.second)
    if bench.engine is None:
        return [_judged(prober.probe(plan), counts=True) for prober in emulators]
    decided = _judged(bench.engine.probe(plan), counts=True)
    return [decided, *(_judged(prober.probe(plan), counts=False) for prober in emulators)]


def _judged(result: ProbeResult, *, counts: bool) -> Check:
    what = f"requirements on {result.runner}"
    note = f" ({result.note})" if result.note else ""
    detail = f"{result.verdict.value}: {times(result.score)}{note}"
    if counts:
        return Check(what, result.verdict.passed, detail)
    return Check(what, None, f"{detail}; the engine decides")


def _typed(graph: Graph, plan: PrecisionPlan) -> Check:
    """The typed ONNX by ONNX's own type inference: pinned layers FLOAT, lowered ones reduced."""
    what = "typed ONNX"
    if not plan.base.is_storage:
        return Check(what, None, f"{plan.base.value.upper()} is no type but a switch of the engine")
    typed = to_typed(graph, plan)
    complaint = _complaint(typed)
    if complaint and not _complaint(graph.proto):
        return Check(what, False, f"ONNX's own check refuses it: {complaint}")
    scope = infer_types(typed)
    made_by = {node.name: node for node in typed.graph.node}
    wrong, counts = [], {TensorProto.FLOAT: 0, STORAGE_TYPE[plan.base]: 0}
    for layer in graph.layers_at(plan.base):
        if layer.name not in made_by:
            continue
        wanted = TensorProto.FLOAT if layer.name in plan.pinned else STORAGE_TYPE[plan.base]
        found = [scope.type_of(o) for o in made_by[layer.name].output if o]
        if any(t in counts and t != wanted for t in found):
            wrong.append(layer.name)
        counts[wanted] += 1
    if wrong:
        return Check(what, False, f"layer {wrong[0]!r} has another type than the plan says")
    kept, lowered = counts[TensorProto.FLOAT], counts[STORAGE_TYPE[plan.base]]
    said = f"{kept} layers FLOAT, {lowered} {plan.base.value.upper()}"
    if complaint:
        said += f"; ONNX's own check refuses it as it does the source model ({complaint})"
    return Check(what, True, said)


def _complaint(model: onnx.ModelProto) -> str:
    """What ONNX's own check, with its type inference, says against ``model``; empty for nothing.

    An output without a declared shape is legal for every runtime, and no complaint.
    """
    model = values_aside(model)
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # the library has its own classes for each of its checks
        if _NO_SHAPE not in str(error):
            return one_line(error, 160)
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:
        return one_line(error, 160)
    return ""


def _parsed(case: Case, plan: PrecisionPlan) -> Check:
    """The types that TensorRT's own parser gives the layers; needs no GPU."""
    what, graph, settings = "TensorRT's parser", case.graph, case.settings
    module = installed_module(settings.trt_module)
    if module is None:
        return Check(what, None, "TensorRT is not installed here")
    if not plan.base.is_storage:
        return Check(what, None, f"{plan.base.value.upper()} is no type")
    layers = graph.layers
    producers = {tensor: layer.name for layer in layers for tensor in layer.outputs}
    profile = profile_of(graph.proto, case.samples, settings.profiles)
    values = values_of(case.samples)

    def parsed(worker: IsolatedWorker, model: onnx.ModelProto) -> dict[str, Sequence[str]]:
        with file_form(model) as form:
            request = EngineRequest(
                form.source, profile, False, producers=producers, values=values, key=form.key
            )
            found: dict[str, Sequence[str]] = worker.call(
                "types", request, timeout_s=settings.probe_timeout_s
            )
            return found

    with IsolatedWorker(PARSER, {"module": module}) as worker:
        try:
            types = parsed(worker, to_typed(graph, plan))
        except RunnerUnavailableError as error:
            return Check(what, None, one_line(error, 120))
        except RunnerFailedError as error:
            said = one_line(error, 200)
            try:
                parsed(worker, graph.proto)
            except RunnerFailedError:  # the fault is not the plan's
                return Check(what, None, f"it does not take the source model either: {said}")
            return Check(what, False, said)
    wrong = dishonoured_after_parsing(layers, plan, types)
    if wrong:
        return Check(what, False, wrong[0].message)
    seen = sum(layer.name in types for layer in layers)
    return Check(what, True, f"{seen} of {len(layers)} layers seen, each of the plan's type")


def _written(graph: Graph, plan: PrecisionPlan) -> list[Check]:
    """The two forms of weak typing, read back: the pins they name are the plan's, as TensorRT's
    parser calls them.
    """
    checks = []
    pins = plan.pinned if plan.base.is_storage else frozenset[str]()
    for what, write, read in (
        ("trtexec arguments", trtexec_arguments, pins_of_trtexec),
        ("polygraphy script", polygraphy_script, pins_of_script),
    ):
        try:
            found = read(write(graph, plan))
            expected = frozenset(names_in_tensorrt(graph, pins).values())
        except BadInputError as error:
            checks.append(Check(what, None, one_line(error, 160)))
            continue
        holds = found == expected
        said = f"names {len(found)} pins"
        detail = said if holds else f"{said}, the plan has {len(pins)}"
        checks.append(Check(what, holds, detail))
    return checks
