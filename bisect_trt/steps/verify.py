"""Verifies a plan again, for new weights or new inputs, as a gate before a release.

Both emulators execute the plan and, where one can run, the engine. The types of the typed model
are checked by ONNX and, where it is installed, by TensorRT's parser.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from bisect_trt.base.atomic_files import VERIFY_FILES
from bisect_trt.base.display import counted
from bisect_trt.base.errors import (
    BadInputError,
    RunnerFailedError,
    RunnerUnavailableError,
    one_line,
)
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import AS_IS, FP32, PLAN, Finding, Validation, word_of
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.inputs.images import IMAGES
from bisect_trt.metrics.requirements import times
from bisect_trt.metrics.time_limits import (
    SAVING,
    PlanSpeed,
    TimeLimit,
    parse_time_limits,
    saving_kept,
    saying_what_is_held,
    with_timed_engine,
)
from bisect_trt.model.graph import Graph
from bisect_trt.model.mixed import MixedModel
from bisect_trt.model.outputs import judged_part
from bisect_trt.model.precision_rules import STORAGE_TYPE
from bisect_trt.model.save import file_form
from bisect_trt.model.tensor_types import complaint_of, infer_types
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.process import IsolatedWorker
from bisect_trt.runners.tensorrt.profile import profile_of, values_of
from bisect_trt.runners.tensorrt.readback import dishonoured_after_parsing, producers_of
from bisect_trt.runners.tensorrt.records import EngineRequest, installed_module
from bisect_trt.runners.tensorrt.runner import BUILD_WORKER
from bisect_trt.settings import Settings, within_threads
from bisect_trt.steps.baselines import quickest_s
from bisect_trt.steps.context import Context, open_context
from bisect_trt.steps.fastest import time_beside
from bisect_trt.steps.golden import check_golden
from bisect_trt.steps.import_plan import import_notes
from bisect_trt.steps.judge_mixed import mixed_problem, plan_of_part
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.repair import problem_on
from bisect_trt.steps.samples import SEARCH_STREAM, augmented
from bisect_trt.steps.saved_plan import SavedPlan
from bisect_trt.steps.timing import Build
from bisect_trt.steps.validation import validate
from bisect_trt.steps.validation_inputs import VERIFYING, WANTED, planned_test

GOLDEN = "golden outputs"
"""The name of the check of the reference; all others check the plan."""

_NOTED = ("copies", "mixed", IMAGES)
"""Kinds of findings on inputs that are said with the answer."""


OWN_REFERENCE = (
    "judged against itself in FP32, whose weights are rounded already: give the original model to "
    "judge what that changes too"
)
"""The note where model.fitted.onnx is verified by itself."""


@dataclass(frozen=True)
class Check:
    """The result of one check; ``validation`` is None where it cannot be made here."""

    what: str
    validation: bool | None
    detail: str


@dataclass(frozen=True)
class Verification:
    """The answer of ``verify``; ``notes`` are sentences on the inputs that were given.

    ``reduced`` names the mixed model that was verified, whose types say ``plan``; empty for a plan.
    """

    plan: PrecisionPlan
    checks: Sequence[Check]
    requirements: Sequence[str] = field(default_factory=tuple)
    validation: Validation | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    model: str = ""
    reduced: str = ""
    folder: Path = Path()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
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
            "reduced": self.reduced or None,
            "plan": {"base": self.plan.base.value, "pinned": sorted(self.plan.pinned)},
            "requirements": list(self.requirements),
            "checks": [vars(c) for c in self.checks],
            "validation": validation,
            "verdict": word_of(self.validation),
            "notes": list(self.notes),
        }


def _typed(graph: Graph, plan: PrecisionPlan) -> Check:
    """Check by ONNX's type inference that exactly the pinned layers are FLOAT."""
    what = "typed ONNX"
    if not plan.base.is_storage:
        return Check(what, None, f"{plan.base.value.upper()} is no type but a switch of the engine")
    typed = to_typed(graph, plan)
    complaint = complaint_of(typed)
    if complaint and not complaint_of(graph.proto):
        return Check(what, False, f"ONNX's own check refuses it: {complaint}")
    scope, reduced_type = infer_types(typed), STORAGE_TYPE[plan.base]
    made_by = {node.name: node for node in typed.graph.node}
    counts = {TensorProto.FLOAT: 0, reduced_type: 0}
    for layer in graph.layers_at(plan.base):
        if layer.name not in made_by:
            continue
        wanted = TensorProto.FLOAT if layer.name in plan.pinned else reduced_type
        made, role = made_by[layer.name], graph.role(layer.index, plan.base)
        types = [scope.type_of(made.output[slot]) for slot in role.reduced_out]
        if any(t in counts and t != wanted for t in types):
            return Check(what, False, f"layer {layer.name!r} has another type than the plan says")
        counts[wanted] += 1
    kept = counted(counts[TensorProto.FLOAT], "layer")
    detail = f"{kept} FLOAT, {counts[reduced_type]} {plan.base.value.upper()}"
    if complaint:
        detail += f"; ONNX's own check refuses it as it does the source model ({complaint})"
    return Check(what, True, detail)


def _parsed(problem: Problem, plan: PrecisionPlan) -> Check:
    """Check the types that TensorRT's own parser gives the layers, which needs no GPU."""
    what, graph, settings = "TensorRT's parser", problem.graph, problem.settings
    module = installed_module(settings.trt_module)
    if module is None:
        return Check(what, None, "TensorRT is not installed here")
    if not plan.base.is_storage:
        return Check(what, None, f"{plan.base.value.upper()} is no type")
    layers = graph.layers
    profile = profile_of(graph.proto, problem.samples, settings.profile)
    values = values_of(problem.samples)

    def types_of(worker: IsolatedWorker, model: onnx.ModelProto) -> dict[str, Sequence[str]]:
        with file_form(model) as source:
            producers = producers_of(graph, model)
            request = EngineRequest(source, profile, False, producers=producers, values=values)
            found: dict[str, Sequence[str]] = worker.call(
                "types", request, timeout_s=settings.evaluation_timeout
            )
            return found

    with IsolatedWorker(BUILD_WORKER, {"module": module}) as worker:
        try:
            types = types_of(worker, to_typed(graph, plan))
        except RunnerUnavailableError as error:
            return Check(what, None, one_line(error, 120))
        except RunnerFailedError as error:
            detail = one_line(error, 200)
            try:
                types_of(worker, graph.proto)
            except RunnerFailedError:  # the fault is not the plan's
                return Check(what, None, f"it does not take the source model either: {detail}")
            return Check(what, False, detail)
    wrong = dishonoured_after_parsing(layers, plan, types)
    if wrong:
        return Check(what, False, wrong[0].message)
    seen = sum(layer.name in types for layer in layers)
    return Check(what, True, f"{seen} of {len(layers)} layers seen, each of the plan's type")


@within_threads
def verify(settings: Settings, saved: SavedPlan | None, observer: Observer) -> Verification:
    """Check a plan, or the mixed model of ``--reduced``, on the settings' model and inputs.

    The plan's own requirements count where the settings name none. No input is held out.

    Raises:
        BadInputError: it is no plan of this model, no mixed model of it, or not one of both.
        RunnerUnavailableError: the runner cannot work here, or a time limit cannot be judged.
    """
    if (saved is None) == (settings.reduced is None):
        both = "verify: give one of --plan and --reduced"
        where = "; a run's plan is in its folder, such as reports/MODEL-fp16/plan.json"
        raise BadInputError(f"{both}{where}" if saved is None else f"{both}, not both")
    with saying_what_is_held(settings):
        return _verified(with_timed_engine(settings), saved, observer)


def _verified(settings: Settings, saved: SavedPlan | None, observer: Observer) -> Verification:
    """The checks of :func:`verify`, by a runner that can judge the time limits."""
    began = time.perf_counter()
    if saved is not None:
        problem, plan = _loaded(_as_saved(settings, saved), saved, observer)
    else:
        problem, plan = _loaded_mixed(settings, observer)
    mixed = problem.mixed
    with open_context(problem, observer, "-verify") as context:
        problem = replace(context.problem, on_engine=context.engine is not None)
        for name in VERIFY_FILES:  # an older answer must not be taken for this one
            (context.folder / name).unlink(missing_ok=True)
        observer.step("verify")
        if problem.settings.augmented != "auto":  # refuse now what names kinds and makes none
            next(augmented(problem, context, SEARCH_STREAM, 1), None)
            context.augmented_of(SEARCH_STREAM).clear()  # there is no search to keep apart from
        checks = [
            *_golden(problem, context),
            *_judgements(context, plan),
            *_limits(context, plan),
            _typed(problem.graph, plan) if mixed is None else _checked_by_onnx(mixed),
            _parsed(problem, plan),
        ]
        # The quickest of three counts: the first one opens a session.
        others = (PrecisionPlan(Precision.FP32), problem.base)
        evaluations = [context.evaluator.evaluate(one) for one in (plan, *others)]
        context.pace.took(quickest_s(evaluations, len(problem.samples)))
        test = planned_test(problem, VERIFYING, context.pace.usual_seconds, last=True)
        validation = validate(problem, context, context.judges, plan, test)
        return Verification(
            plan=plan if mixed is None else mixed.plan,
            checks=checks,
            requirements=problem.requirements.texts,
            validation=replace(validation, fitted=saved is not None and saved.fitted),
            # Weighty: a plan for a model that is wrong in FP32 already passes whatever it does.
            notes=[
                *(import_notes(saved.imported) if saved is not None and saved.imported else ()),
                *(f.message for f in problem.findings if f.kind in _NOTED or f.weighty),
            ],
            model=problem.model.name,
            reduced=mixed.name if mixed is not None else "",
            folder=context.folder,
            seconds=time.perf_counter() - began,
        )


def _loaded_mixed(settings: Settings, observer: Observer) -> tuple[Problem, PrecisionPlan]:
    """The problem on the mixed model of ``--reduced``, and the roundings that its types say."""
    robust = WANTED if settings.robust is None and settings.allow_misses is None else None
    settings = replace(settings, holdout=settings.holdout or ("none",))
    settings = settings if robust is None else replace(settings, robust=robust)
    problem = load(settings, observer, searches=False)
    mixed = problem.mixed
    assert mixed is not None, "verify was asked for a mixed model"
    problem = mixed_problem(problem, mixed)
    return problem, plan_of_part(mixed, problem)


def _checked_by_onnx(mixed: MixedModel) -> Check:
    """Check the types of a mixed model by ONNX's own inference."""
    complaint = complaint_of(mixed.proto)
    if complaint:
        return Check("typed ONNX", False, f"ONNX's own check refuses it: {complaint}")
    return Check("typed ONNX", True, "ONNX's own check accepts the mixed model")


def _loaded(
    settings: Settings, saved: SavedPlan, observer: Observer
) -> tuple[Problem, PrecisionPlan]:
    """The problem that ``saved`` is verified on, and the plan for its judged part."""
    source = saved.source_of(settings.model)
    saved.check_model(source.graph)  # refused before a folder is made
    problem = load(settings, observer, searches=False)
    if source.model.digest != problem.model.digest:
        # Given the original, which stays the reference.
        part = whole = source.graph
        if problem.judged:
            proto = judged_part(whole.proto, problem.judged)
            part = replace(whole, proto=proto, stored_outputs={})
        problem = replace(problem_on(problem, part, whole), golden=problem.golden)
    elif saved.form.fitted and source.model.digest == saved.fitted_sha256:
        found = Finding("fitted-reference", "", OWN_REFERENCE, weighty=True)
        problem = replace(problem, findings=(*problem.findings, found))
    if problem.judged:  # the model to ship has the layers behind the judged part in FP32
        pinned = saved.plan.pinned.intersection(problem.graph.names)
        saved = replace(saved, plan=replace(saved.plan, pinned=pinned))
    saved.check_model(problem.graph)
    if saved.scales:  # the plan was found for these, whatever the new inputs' scales are
        problem = replace(problem, requirements=replace(problem.requirements, scales=saved.scales))
    return problem, saved.plan


def _as_saved(settings: Settings, saved: SavedPlan) -> Settings:
    """The settings, completed by those that the plan was found with."""
    if settings.robust is None and settings.allow_misses is None:
        settings = replace(settings, robust=saved.robust or WANTED)
    if settings.allow_misses is None:
        settings = replace(settings, allow_misses=round(1.0 - saved.given_share, 12))
    if not settings.require and saved.requirements:
        metrics = settings.metric or saved.metrics
        settings = replace(settings, require=saved.requirements, metric=metrics)
    outputs = settings.outputs or saved.outputs
    return replace(settings, outputs=outputs, holdout=settings.holdout or ("none",))


def _golden(problem: Problem, context: Context) -> list[Check]:
    """Check that the reference gives the golden outputs, where there are some."""
    if problem.golden is None:
        return []
    mismatch = check_golden(problem, context)
    detail = mismatch.sentence if mismatch is not None else "the reference gives them"
    return [Check(GOLDEN, mismatch is None, detail)]


def _judgements(context: Context, plan: PrecisionPlan) -> list[Check]:
    """Check the requirements on each runner; where there is an engine, it alone decides."""
    emulators = (context.evaluator, context.second)
    if context.engine is None:
        return [_judged(evaluator.evaluate(plan), counts=True) for evaluator in emulators]
    decided = _judged(context.engine.evaluate(plan), counts=True)
    return [decided, *(_judged(evaluator.evaluate(plan), counts=False) for evaluator in emulators)]


def _limits(context: Context, plan: PrecisionPlan) -> Iterator[Check]:
    """Check the time limits; a plan that misses its requirements need not be timed."""
    limits = parse_time_limits(context.problem.settings.hold)
    if limits and not context.judge.evaluate(plan).verdict.passed:
        yield from (Check(limit.text, None, "misses its requirements") for limit in limits)
        return
    speed = _speed(context, plan, limits)
    for judged in (limit.judged(speed) for limit in limits):
        if judged.met is None:
            raise RunnerUnavailableError(judged.found)
        yield Check(judged.text, judged.met, judged.found)


def _speed(context: Context, plan: PrecisionPlan, limits: Sequence[TimeLimit]) -> PlanSpeed:
    """What ``limits`` need of the speed of ``plan``; a saving is that of the plan's own model."""
    plans = {PLAN: plan}
    if any(limit.name == SAVING for limit in limits):
        plans |= {AS_IS: context.problem.base, FP32: PrecisionPlan(Precision.FP32)}
    ms = _times_ms(context, plans)
    if ms:
        is_whole = len(ms) == len(plans) > 1
        share = saving_kept(ms[PLAN], ms[AS_IS], ms[FP32]) if is_whole else None
        return PlanSpeed(ms.get(PLAN), share)
    share = 0.0 if plan.base is Precision.FP32 else context.costs.saving_kept(plan)
    return PlanSpeed(saving_kept=share if math.isfinite(share) else None, is_estimated=True)


def _times_ms(context: Context, plans: Mapping[str, PrecisionPlan]) -> dict[str, float]:
    """The times of engines, beside each other if possible; none where nothing times engines."""
    if context.timer is not None:
        graph = context.problem.graph
        timing = time_beside(context, {name: Build(graph, p) for name, p in plans.items()})
        found = {name: timing.ms(name) for name in timing.plans} if timing is not None else {}
    else:
        results = {name: context.judge.evaluate(one) for name, one in plans.items()}
        found = {n: float(r.facts.get("latency_ms", math.nan)) for n, r in results.items()}
    return {name: ms for name, ms in found.items() if math.isfinite(ms)}


def _judged(result: Evaluation, *, counts: bool) -> Check:
    what = f"requirements on {result.runner}"
    note = f" ({result.note})" if result.note else ""
    detail = f"{result.verdict.value}: {times(result.score, result.verdict)}{note}"
    if counts:
        return Check(what, result.verdict.passed, detail)
    return Check(what, None, f"{detail}; the engine decides")
