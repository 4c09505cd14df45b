"""The engine's baselines, and the layers that it does not take at the reduced precision."""

from __future__ import annotations

import os
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
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.requirements import times
from bisect_trt.runners.base import UNSUPPORTED
from bisect_trt.search import find_pins
from bisect_trt.steps.baselines import Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.engine_checks import check_engine
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
from bisect_trt.steps.open_runners import baseline_plans
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.validation import validate_next
from bisect_trt.steps.validation_inputs import missed_on


@dataclass(frozen=True)
class EngineBaselines:
    """The engine's whole-network runs and what they say of its FP32.

    ``fingerprint`` is the cosine between the engine's FP32 errors and emulated TF32's. ``table``
    has the layers' errors on the engine, where they could be had. ``pinned`` is all pins: ``fp32``
    where no layer is held reduced. ``diagnosis`` is there if the engine settles the case, with the
    ``validation`` of what needs no pins; ``reproducibility`` where it was looked at for that.
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
        """What a pin really runs in on this engine."""
        return Precision.TF32 if self.identity is Fp32.TF32 else Precision.FP32

    def by_label(self) -> dict[str, Evaluation]:
        """The baselines as rows of the outputs table."""
        return {f"{self.runner} {r.plan.base.value}": r for r in (self.fp32, self.tf32, self.base)}


def measure_engine(
    problem: Problem, context: Context, emulated: Baselines
) -> EngineBaselines | None:
    """Three builds: strict FP32, TF32 allowed, all layers reduced; None without an engine."""
    engine, precision = context.engine, problem.settings.precision
    if engine is None:
        return None
    context.observer.step("engine baselines")
    strict, allowed, reduced = baseline_plans(problem)
    fp32 = engine.evaluate(strict)
    identity = what_fp32_is(fp32, emulated.fp32, emulated.tf32)
    context.note(*_findings(identity, fp32, emulated))
    if fp32.worst:  # the engine is still there
        fp32_is = emulated.tf32 if identity is Fp32.TF32 else emulated.fp32
        check_engine(problem, context, strict, fp32_is)
    tf32, base = engine.evaluate(allowed), engine.evaluate(reduced)
    table = None
    if base.worst:
        check_engine(problem, context, reduced, emulated.reduced_first)
        context.observer.step("engine layers")
        shown = emulated.layers
        if problem.marked is not None:
            shown = shown[shown["layer"].isin(problem.marked)]
        traced = PrecisionPlan(precision, held=problem.unsupported)
        table = trace_engine(problem, context, engine, traced, shown)
        context.note(*(table.findings() if table is not None else ()))
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
    pinned = (
        engine.evaluate(problem.base.with_pins(problem.names)) if problem.kept_reduced else fp32
    )
    for plan in dict.fromkeys(p for p in (strict, allowed, reduced) if p != blamed):
        runs = engine.done[plan].reproducibility
        context.note(*note_not_reproducible(plan.base.value.upper(), runs))
    settled = diagnosis is not None and diagnosis.cause is Cause.NONE
    fingerprint = agreement(engine.vector(strict), context.evaluator.vector(emulated.tf32.plan))
    return EngineBaselines(
        runner=engine.runner.name,
        fp32=fp32,
        tf32=tf32,
        base=base,
        pinned=pinned,
        identity=identity,
        fingerprint=fingerprint,
        table=table,
        diagnosis=diagnosis,
        reproducibility=reproducibility,
        validation=validation if settled else None,
    )


def _validated(
    problem: Problem, context: Context, base: Evaluation
) -> tuple[bool, Validation | None]:
    """Whether new inputs refuse everything reduced on the engine, and its validation."""
    settings = problem.settings
    # TF32 is a switch of the whole engine.
    can_pin = settings.precision.is_storage and not settings.fitted and settings.pick is None
    if context.engine is None or not base.verdict.passed or not can_pin:
        return False, None
    refused, validation = validate_next(problem, context, base.plan)
    return refused is not None, validation


def _findings(identity: Fp32, fp32: Evaluation, emulated: Baselines) -> list[Finding]:
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


_TRIAL_BUILDS = 16
"""Where nobody says: an operator of twenty takes five or six, its layer among thirty as many."""


def keeping_unsupported(
    problem: Problem, context: Context, engine: EngineBaselines
) -> Problem | None:
    """``problem`` with the layers held in FP32 for whose sake the engine of everything reduced
    could not be had; None where it could, or it names none.

    Raises:
        BadInputError: such a layer was asked to be reduced.
    """
    if engine.base.worst or engine.diagnosis is not None:
        return None
    named = frozenset(engine.base.facts.get(UNSUPPORTED, ()))
    precision = problem.settings.precision.value.upper()
    if asked_for := named & problem.kept_reduced:
        raise BadInputError(
            f"--keep-reduced: the engine does not take {min(asked_for)!r} in {precision} "
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
    """``problem`` with the layers held in FP32 without which the engine of everything reduced is
    had: operators first, then layers of theirs. None where it was had, nothing but everything does,
    or the builds were spent before.
    """
    if engine is None or engine.base.worst or engine.diagnosis is not None:
        return None
    # A crash may have been a chance, and would hold innocent layers for good.
    broken = engine.base.verdict is Verdict.BUILD_FAILED
    if context.engine is None or not broken or not engine.fp32.worst or problem.kept_reduced:
        return None
    context.observer.step("engine: layers that it does not take")
    allowed = problem.settings.max_builds
    trial = _Trial(
        problem, context, engine.base.note, _TRIAL_BUILDS if allowed is None else allowed
    )
    by_op: dict[str, list[str]] = {}
    for layer in problem.layers:
        if layer.name in problem.names:
            by_op.setdefault(layer.op, []).append(layer.name)
    ops = trial.find(by_op) or frozenset(by_op)
    names = [name for op in by_op if op in ops for name in by_op[op]]
    unsupported = trial.find({name: [name] for name in names}) or frozenset(names)
    if len(unsupported) == len(problem.names):
        return None
    said = some_of([f"'{name}'" for name in names if name in unsupported])
    more = "" if trial.complete else ", too few: some of them may not need it"
    message = (
        f"the engine does not take {said} in {problem.settings.precision.value.upper()}, so "
        f"{'it stays' if len(unsupported) == 1 else 'they stay'} in FP32 from the start; found by "
        f"trial (engines built: {trial.builds}{more}), since it names no layer "
        f"({engine.base.note})"
    )
    context.note(Finding("held", min(unsupported), message))
    return problem.holding(unsupported)


class _Trial:
    """Asks the engine which groups of layers keep it from being had.

    ``builds`` counts the engines tried; ``complete`` is false where ``max_builds`` did not do.
    """

    def __init__(self, problem: Problem, context: Context, note: str, max_builds: int) -> None:
        self._problem, self._context = problem, context
        self._note, self._max_builds = note, max_builds
        self.builds, self.complete = 0, True

    def find(self, groups: Mapping[str, Sequence[str]]) -> frozenset[str]:
        """The fewest groups that have to be held; none where nothing smaller than all does."""
        if len(groups) == 1:
            return frozenset(groups)

        def is_had(pinned: frozenset[str]) -> Verdict:
            if not pinned:
                return Verdict.FAIL
            if len(pinned) == len(groups):  # or it was where all of their operators were
                return Verdict.PASS
            layers = [name for group in pinned for name in groups[group]]
            self._context.tell(f"an engine with {counted(len(layers), 'layer')} in FP32")
            self.builds += 1
            assert self._context.engine is not None
            result = self._context.engine.evaluate(self._problem.base.with_pins(layers))
            return Verdict.PASS if result.worst else Verdict.BUILD_FAILED

        # What the engine's message mentions is suspected first.
        suspicion = {
            group: float(any(name in self._note for name in (group, *names)))
            for group, names in groups.items()
        }
        found = find_pins(
            list(groups),
            is_had,
            suspicion=suspicion if any(suspicion.values()) else None,
            # No pins and all of them cost no build.
            max_probes=max(0, self._max_builds - self.builds) + 2,
        )
        if self._context.time.left_s <= 0.0:  # which the search takes for the end of its builds
            raise BudgetSpentError
        self.complete = found.complete
        return found.pinned if len(found.pinned) < len(groups) else frozenset()
