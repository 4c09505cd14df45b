"""``verify``: does a plan still hold, for new weights or new inputs? One answer, for release gates.

The plan is executed by both emulators and, where one can run, by the engine. The typed model's
types are checked against it, and the forms in which older versions are told of the pins are read
back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from bisect_trt.base.atomic_files import VERIFY_FILES
from bisect_trt.base.display import counted
from bisect_trt.base.errors import (
    RunnerFailedError,
    RunnerUnavailableError,
    one_line,
)
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import Validation, word_of
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.requirements import times
from bisect_trt.model.graph import Graph
from bisect_trt.model.lifted import load_source
from bisect_trt.model.precision_rules import STORAGE_TYPE
from bisect_trt.model.save import file_form
from bisect_trt.model.tensor_types import infer_types, skeleton
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.process import IsolatedWorker
from bisect_trt.runners.tensorrt.profile import profile_of, values_of
from bisect_trt.runners.tensorrt.readback import dishonoured_after_parsing
from bisect_trt.runners.tensorrt.records import EngineRequest, installed_module
from bisect_trt.runners.tensorrt.runner import BUILD_WORKER
from bisect_trt.settings import Settings, within_threads
from bisect_trt.steps.baselines import quickest_s
from bisect_trt.steps.context import Context, open_context
from bisect_trt.steps.golden import check_golden
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import SEARCH_STREAM, augmented
from bisect_trt.steps.saved_plan import SavedPlan
from bisect_trt.steps.validation import validate
from bisect_trt.steps.validation_inputs import VERIFYING, WANTED, planned_test

_NO_SHAPE = "Field 'shape' of 'type' is required"

GOLDEN = "golden outputs"
"""The check of the reference, not of the plan."""


@dataclass(frozen=True)
class Check:
    """One way in which the plan was looked at. ``validation`` None means that it could not be
    looked at here, and ``detail`` why.
    """

    what: str
    validation: bool | None
    detail: str


@dataclass(frozen=True)
class Verification:
    """``passed`` if the runner that decides meets the requirements and nothing that was looked at
    contradicts the plan. ``notes`` say what became of the inputs that were given. ``folder`` is
    where its cache is, ``seconds`` what it took.
    """

    plan: PrecisionPlan
    checks: Sequence[Check]
    requirements: Sequence[str] = field(default_factory=tuple)
    validation: Validation | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    model: str = ""
    folder: Path = Path()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """No check failed."""
        return all(check.validation is not False for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def as_json(self) -> dict[str, Any]:
        """The answer for machines."""
        validation = None
        if self.validation is not None:
            validation = {n: v for n, v in asdict(self.validation).items() if n != "copies"}
        return {
            "passed": self.passed,
            "model": self.model,
            "plan": {"base": self.plan.base.value, "pinned": sorted(self.plan.pinned)},
            "requirements": list(self.requirements),
            "checks": [vars(c) for c in self.checks],
            "validation": validation,
            "verdict": word_of(self.validation),
            "notes": list(self.notes),
        }


def _typed(graph: Graph, plan: PrecisionPlan) -> Check:
    """The typed ONNX by ONNX's own type inference: pinned layers FLOAT, reduced ones reduced."""
    what = "typed ONNX"
    if not plan.base.is_storage:
        return Check(what, None, f"{plan.base.value.upper()} is no type but a switch of the engine")
    typed = to_typed(graph, plan)
    complaint = _complaint(typed)
    if complaint and not _complaint(graph.proto):
        return Check(what, False, f"ONNX's own check refuses it: {complaint}")
    scope, reduced_type = infer_types(typed), STORAGE_TYPE[plan.base]
    made_by = {node.name: node for node in typed.graph.node}
    counts = {TensorProto.FLOAT: 0, reduced_type: 0}
    for layer in graph.layers_at(plan.base):
        if layer.name not in made_by:
            continue
        wanted = TensorProto.FLOAT if layer.name in plan.pinned else reduced_type
        made, role = made_by[layer.name], graph.role(layer.index, plan.base)
        found = [scope.type_of(made.output[slot]) for slot in role.reduced_out]
        if any(t in counts and t != wanted for t in found):
            said = f"layer {layer.name!r} has another type than the plan says"
            return Check(what, False, said)
        counts[wanted] += 1
    kept = counted(counts[TensorProto.FLOAT], "layer")
    said = f"{kept} FLOAT, {counts[reduced_type]} {plan.base.value.upper()}"
    if complaint:
        said += f"; ONNX's own check refuses it as it does the source model ({complaint})"
    return Check(what, True, said)


def _complaint(model: onnx.ModelProto) -> str:
    """What ONNX's own check says against ``model``; empty for nothing."""
    model = skeleton(model)  # weights may be too many for ONNX's own tools
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # the library has its own classes for each of its checks
        if _NO_SHAPE not in str(error):  # which every runtime takes
            return one_line(error, 160)
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:
        return one_line(error, 160)
    return ""


def _parsed(problem: Problem, plan: PrecisionPlan) -> Check:
    """The types that TensorRT's own parser gives the layers; needs no GPU."""
    what, graph, settings = "TensorRT's parser", problem.graph, problem.settings
    module = installed_module(settings.trt_module)
    if module is None:
        return Check(what, None, "TensorRT is not installed here")
    if not plan.base.is_storage:
        return Check(what, None, f"{plan.base.value.upper()} is no type")
    layers = graph.layers
    producers = {tensor: layer.name for layer in layers for tensor in layer.outputs}
    profile = profile_of(graph.proto, problem.samples, settings.profiles)
    values = values_of(problem.samples)

    def types_of(worker: IsolatedWorker, model: onnx.ModelProto) -> dict[str, Sequence[str]]:
        with file_form(model) as source:
            request = EngineRequest(source, profile, False, producers=producers, values=values)
            found: dict[str, Sequence[str]] = worker.call(
                "types", request, timeout_s=settings.evaluation_timeout_s
            )
            return found

    with IsolatedWorker(BUILD_WORKER, {"module": module}) as worker:
        try:
            types = types_of(worker, to_typed(graph, plan))
        except RunnerUnavailableError as error:
            return Check(what, None, one_line(error, 120))
        except RunnerFailedError as error:
            said = one_line(error, 200)
            try:
                types_of(worker, graph.proto)
            except RunnerFailedError:  # the fault is not the plan's
                return Check(what, None, f"it does not take the source model either: {said}")
            return Check(what, False, said)
    wrong = dishonoured_after_parsing(layers, plan, types)
    if wrong:
        return Check(what, False, wrong[0].message)
    seen = sum(layer.name in types for layer in layers)
    return Check(what, True, f"{seen} of {len(layers)} layers seen, each of the plan's type")


@within_threads
def verify(settings: Settings, saved: SavedPlan, observer: Observer) -> Verification:
    """Check a plan on the settings' model and inputs, by its own requirements where the settings
    name none. Nothing is searched, so that every input counts: none is kept apart by itself.

    Raises:
        BadInputError: it is no plan of this model.
    """
    began = time.perf_counter()
    settings = _as_saved(settings, saved)
    if settings.rewrite is None:  # refused before a folder is made
        saved.check_model(load_source(settings.model).graph)
    problem = load(settings, observer, searches=False)
    if problem.judged:  # layers behind the judged part are in FP32 in the model to ship
        judged = replace(saved.plan, pinned=saved.plan.pinned.intersection(problem.graph.names))
        saved = replace(saved, plan=judged)
    saved.check_model(problem.graph)
    if saved.scales:  # what the plan was found for, whatever these inputs' are
        problem = replace(problem, requirements=replace(problem.requirements, scales=saved.scales))
    with open_context(problem, observer, "-verify") as context:
        problem = replace(context.problem, on_engine=context.engine is not None)
        for name in VERIFY_FILES:  # an earlier answer must not outlive what is asked anew
            (context.folder / name).unlink(missing_ok=True)
        observer.step("verify")
        if settings.augmented != "auto":  # kinds that were named and make none are refused now
            next(augmented(problem, context, SEARCH_STREAM, 1), None)
            context.augmented_of(SEARCH_STREAM).clear()  # no search has it
        plan = saved.plan
        checks = [
            *_golden(problem, context),
            *_judgements(context, plan),
            _typed(problem.graph, plan),
            _parsed(problem, plan),
        ]
        others = (PrecisionPlan(Precision.FP32), problem.base)
        evaluations = [context.evaluator.evaluate(one) for one in (plan, *others)]
        context.pace.took(quickest_s(evaluations, len(problem.samples)))
        test = planned_test(problem, VERIFYING, context.pace.usual_seconds, last=True)
        validation = validate(problem, context, context.judges, plan, test)
        return Verification(
            plan=plan,
            checks=checks,
            requirements=problem.requirements.texts,
            validation=replace(validation, fitted=saved.fitted),
            # A plan of a model that is reduced already holds whatever is wrong with it.
            notes=[f.message for f in problem.findings if f.kind == "copies" or f.weighty],
            model=problem.model.name,
            folder=context.folder,
            seconds=time.perf_counter() - began,
        )


def _as_saved(settings: Settings, saved: SavedPlan) -> Settings:
    """The settings, with what the plan was found for in place of each that says nothing."""
    if settings.robust is None and settings.allow_misses is None:
        settings = replace(settings, robust=saved.robust or WANTED)
    if settings.allow_misses is None:
        settings = replace(settings, allow_misses=round(1.0 - saved.given_share, 12))
    if not settings.require and saved.requirements:
        metrics = settings.metrics or saved.metrics
        settings = replace(settings, require=saved.requirements, metrics=metrics)
    outputs = settings.outputs or saved.outputs
    return replace(settings, outputs=outputs, holdout=settings.holdout or ("none",))


def _golden(problem: Problem, context: Context) -> list[Check]:
    """Whether the reference gives the golden outputs, where there are some."""
    if problem.golden is None:
        return []
    differs = check_golden(problem, context)
    said = differs.sentence if differs is not None else "the reference gives them"
    return [Check(GOLDEN, differs is None, said)]


def _judgements(context: Context, plan: PrecisionPlan) -> list[Check]:
    """Each runner's verdict; where there is an engine it alone decides."""
    emulators = (context.evaluator, context.second)
    if context.engine is None:
        return [_judged(evaluator.evaluate(plan), counts=True) for evaluator in emulators]
    decided = _judged(context.engine.evaluate(plan), counts=True)
    return [decided, *(_judged(evaluator.evaluate(plan), counts=False) for evaluator in emulators)]


def _judged(result: Evaluation, *, counts: bool) -> Check:
    what = f"requirements on {result.runner}"
    note = f" ({result.note})" if result.note else ""
    detail = f"{result.verdict.value}: {times(result.score, result.verdict)}{note}"
    if counts:
        return Check(what, result.verdict.passed, detail)
    return Check(what, None, f"{detail}; the engine decides")
