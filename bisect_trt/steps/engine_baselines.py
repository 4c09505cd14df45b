"""Runs the whole network on the engine, and finds layers that it does not take reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import (
    Cause,
    Diagnosis,
    Finding,
    Reproducibility,
    Validation,
    Verdict,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.requirements import times
from bisect_trt.runners.base import UNSUPPORTED
from bisect_trt.runners.device import TF32_OVERRIDE
from bisect_trt.search import find_pins
from bisect_trt.steps.baselines import Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.engine_diagnosis import (
    Fp32,
    agreement,
    diagnose,
    diagnose_fp32,
    not_reproducible,
    note_not_reproducible,
    reproducibility_of_failure,
    what_fp32_is,
)
from bisect_trt.steps.engine_layer_errors import EngineTable, trace_engine
from bisect_trt.steps.open_runners import EngineRunner, baseline_plans
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.validation import validate_next
from bisect_trt.steps.validation_inputs import missed_on


@dataclass(frozen=True)
class EngineBaselines:
    """The engine's evaluations of the whole network, and what its FP32 is.

    ``pinned`` has all pins: it is ``fp32`` where no layer is held reduced. ``fingerprint`` is the
    cosine between the errors of the engine's FP32 and of emulated TF32. ``table`` has the layers'
    errors, where they could be had. ``diagnosis`` is there if the engine settles the case, with
    the ``validation`` of a plan without pins.
    """

    runner: str
    fp32: Evaluation
    tf32: Evaluation
    base: Evaluation
    pinned: Evaluation
    identity: Fp32
    fingerprint: float
    table: EngineTable | None
    diagnosis: Diagnosis | None
    reproducibility: Reproducibility | None = None
    validation: Validation | None = None

    @property
    def pin_precision(self) -> Precision:
        """The precision in which this engine runs a pinned layer."""
        return Precision.TF32 if self.identity is Fp32.TF32 else Precision.FP32

    def by_label(self) -> dict[str, Evaluation]:
        """The baselines as rows of the outputs table."""
        return {f"{self.runner} {r.plan.base.value}": r for r in (self.fp32, self.tf32, self.base)}


def measure_engine(
    problem: Problem, context: Context, emulated: Baselines
) -> EngineBaselines | None:
    """Build strict FP32, TF32 and all layers reduced; None without an engine."""
    engine, precision = context.engine, problem.settings.precision
    if engine is None:
        return None
    context.observer.step("engine baselines")
    strict, allowed, reduced = baseline_plans(problem)
    fp32 = engine.evaluate(strict)
    identity = what_fp32_is(fp32, emulated.fp32, emulated.tf32)
    context.note(*_tf32_findings(identity, fp32, emulated, context.opened))
    tf32, base = engine.evaluate(allowed), engine.evaluate(reduced)
    # Marked engines are built before others take the plain one's place.
    table = _table(problem, context, engine, emulated) if base.worst else None
    overfitted, validation = _validated(problem, context, base)
    reproducibility = reproducibility_of_failure(context, fp32, base)
    blamed: PrecisionPlan | None = None
    diagnosis: Diagnosis | None
    if reproducibility is not None and reproducibility.decides:
        blamed = reduced if fp32.verdict.passed else strict
        diagnosis = not_reproducible(blamed.base.value.upper(), reproducibility)
    elif fp32.verdict.passed:
        diagnosis = diagnose(tf32, base, precision, overfitted=overfitted)
    else:
        marked = partial(trace_engine, problem, context, engine, strict, emulated.layers)
        diagnosis = diagnose_fp32(fp32, identity, marked, missed_on(problem, engine, strict))
    pinned = fp32
    if problem.kept_reduced:
        pinned = engine.evaluate(problem.base.with_pins(problem.names))
    for plan in dict.fromkeys(p for p in (strict, allowed, reduced) if p != blamed):
        runs = engine.done[plan].reproducibility
        context.note(*note_not_reproducible(plan.base.value.upper(), runs))
    settled = diagnosis is not None and diagnosis.cause is Cause.NONE
    return EngineBaselines(
        runner=engine.runner.name,
        fp32=fp32,
        tf32=tf32,
        base=base,
        pinned=pinned,
        identity=identity,
        fingerprint=agreement(engine.vector(strict), context.evaluator.vector(emulated.tf32.plan)),
        table=table,
        diagnosis=diagnosis,
        reproducibility=reproducibility,
        validation=validation if settled else None,
    )


def _table(
    problem: Problem, context: Context, engine: Evaluator, emulated: Baselines
) -> EngineTable | None:
    """The errors of the shown layers on the engine with everything reduced."""
    context.observer.step("engine layers")
    shown = emulated.layers
    if problem.marked is not None:
        shown = shown[shown["layer"].isin(problem.marked)]
    plan = PrecisionPlan(problem.settings.precision, held=problem.unsupported)
    table = trace_engine(problem, context, engine, plan, shown)
    context.note(*(table.findings() if table is not None else ()))
    return table


def _validated(
    problem: Problem, context: Context, base: Evaluation
) -> tuple[bool, Validation | None]:
    """Whether new inputs refuse everything reduced on the engine; its validation if not."""
    settings = problem.settings
    # No pin can mend TF32, which is a switch of the whole engine.
    can_pin = settings.precision.is_storage and not settings.fitted
    if context.engine is None or not base.verdict.passed or not can_pin:
        return False, None
    refused, validation = validate_next(problem, context, base.plan)
    return refused is not None, validation


def _tf32_findings(
    identity: Fp32, fp32: Evaluation, emulated: Baselines, engine: EngineRunner | None
) -> list[Finding]:
    if identity is Fp32.STRICT and engine is not None and TF32_OVERRIDE in engine.versions:
        message = f"the engine ran with {TF32_OVERRIDE}=0, which turns TF32 off; so must production"
        return [Finding("tf32", "", message, weighty=True)]
    if identity is not Fp32.TF32:
        return []
    message = (
        "this engine's FP32 is TF32: with the TF32 flag cleared its errors are those of "
        f"emulated TF32 ({times(fp32.score)} against {times(emulated.tf32.score)}; strict FP32 "
        f"gives {times(emulated.fp32.score)}), so a pinned matrix product runs in TF32 too, "
        "and is emulated so from here on; NVIDIA_TF32_OVERRIDE=0 turns TF32 off, here and in "
        "production"
    )
    return [Finding("tf32", "", message)]


def keeping_unsupported(
    problem: Problem, context: Context, engine: EngineBaselines
) -> Problem | None:
    """``problem`` with the layers held that the engine names as unsupported; None if it names none.

    Raises:
        BadInputError: ``--keep-reduced`` names such a layer.
    """
    if engine.base.worst or engine.diagnosis is not None:
        return None
    named = frozenset(engine.base.facts.get(UNSUPPORTED, ()))
    precision = problem.settings.precision.value.upper()
    if kept_reduced := named & problem.kept_reduced:
        raise BadInputError(
            f"--keep-reduced: the engine does not take {min(kept_reduced)!r} in {precision} "
            f"({engine.base.note}); leave it out"
        )
    unsupported = named.intersection(problem.names)
    if not unsupported:
        return None
    message = (
        f"the engine does not take {some_of(sorted(unsupported))} in {precision}, "
        f"so it stays in FP32 from the start ({engine.base.note})"
    )
    context.note(Finding("held", min(unsupported), message))
    return problem.holding(unsupported)


def unsupported_by_trial(
    problem: Problem, context: Context, engine: EngineBaselines | None
) -> Problem | None:
    """``problem`` with the layers held without which an engine can be built, found by building.

    Operators are tried first, then the layers of these. None where the engine of everything
    reduced was built, or all layers have to be held.
    """
    if engine is None or engine.base.worst or engine.diagnosis is not None:
        return None
    # A crash may be an accident, and innocent layers would be held.
    broken = engine.base.verdict is Verdict.BUILD_FAILED
    if context.engine is None or not broken or not engine.fp32.worst or problem.kept_reduced:
        return None
    context.observer.step("engine: layers that it does not take")
    # One operator of twenty takes five or six builds, its layer among thirty as many.
    max_builds = problem.settings.max_builds if problem.settings.max_builds is not None else 16
    trial = _Trial(problem, context, engine.base.note, max_builds)
    by_op: dict[str, list[str]] = {}
    for layer in problem.layers:
        if layer.name in problem.names:
            by_op.setdefault(layer.op, []).append(layer.name)
    ops = trial.find(by_op) or frozenset(by_op)
    names = [name for op in by_op if op in ops for name in by_op[op]]
    unsupported = trial.find({name: [name] for name in names}) or frozenset(names)
    if len(unsupported) == len(problem.names):
        return None
    layers = some_of([f"'{name}'" for name in names if name in unsupported])
    more = "" if trial.complete else ", too few: some of them may not need it"
    message = (
        f"the engine does not take {layers} in {problem.settings.precision.value.upper()}, so "
        f"{'it stays' if len(unsupported) == 1 else 'they stay'} in FP32 from the start; found by "
        f"trial (engines built: {trial.builds}{more}), since it names no layer "
        f"({engine.base.note})"
    )
    context.note(Finding("held", min(unsupported), message))
    return problem.holding(unsupported)


class _Trial:
    """Finds by building which groups of layers the engine does not take.

    ``builds`` counts the engines; ``complete`` is false where ``max_builds`` were too few.
    """

    def __init__(self, problem: Problem, context: Context, note: str, max_builds: int) -> None:
        self._problem, self._context = problem, context
        self._note, self._max_builds = note, max_builds
        self.builds, self.complete = 0, True

    def find(self, groups: Mapping[str, Sequence[str]]) -> frozenset[str]:
        """The fewest groups that have to be held; none where it must be all of them."""
        if len(groups) == 1:
            return frozenset(groups)

        def build(pinned: frozenset[str]) -> Verdict:
            if not pinned:
                return Verdict.FAIL
            if len(pinned) == len(groups):  # FP32, or all layers of the operators found before
                return Verdict.PASS
            layers = [name for group in pinned for name in groups[group]]
            self._context.tell(f"an engine with {counted(len(layers), 'layer')} in FP32")
            self.builds += 1
            assert self._context.engine is not None
            result = self._context.engine.evaluate(self._problem.base.with_pins(layers))
            return Verdict.PASS if result.worst else Verdict.BUILD_FAILED

        # The engine's message may mention an operator or a layer.
        suspicion = {
            group: float(any(name in self._note for name in (group, *names)))
            for group, names in groups.items()
        }
        found = find_pins(
            list(groups),
            build,
            suspicion=suspicion if any(suspicion.values()) else None,
            # No pins and all of them cost no build.
            max_probes=max(0, self._max_builds - self.builds) + 2,
        )
        # The search returns as if its builds were spent.
        if self._context.time.left_s <= 0.0:
            raise BudgetSpentError
        self.complete = found.complete
        return found.pinned if len(found.pinned) < len(groups) else frozenset()
