"""The engine's baselines, and what is checked in them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError, RunnerFailedError, one_line
from bisect_trt.base.interrupt import Beside
from bisect_trt.base.outcomes import Cause, Diagnosis, Finding, Reproducibility, Validation
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Row
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.errors import rows_apart
from bisect_trt.metrics.requirements import times
from bisect_trt.model.inputs import check_array, input_specs
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.device import CPU
from bisect_trt.runners.tensorrt.profile import profile_of
from bisect_trt.steps.baselines import Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.engine_diagnosis import (
    EngineTable,
    Fp32,
    agreement,
    diagnose,
    findings_of,
    not_reproducible,
    note_not_reproducible,
    reproducibility_of_failure,
    what_fp32_is,
)
from bisect_trt.steps.engine_layer_errors import trace_engine
from bisect_trt.steps.open_runners import baseline_plans
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.samples import usable
from bisect_trt.steps.validation import put_to_test
from bisect_trt.steps.validation_inputs import missed_on, next_test

_UNITS = 10.0
_UNIT = {
    Precision.FP32: 2.0**-23,
    Precision.TF32: 2.0**-10,
    Precision.FP16: 2.0**-10,
    Precision.BF16: 2.0**-7,
}


def check_engine(
    problem: Problem, context: Context, plan: PrecisionPlan, emulated: Evaluation
) -> tuple[Finding, ...]:
    """What ``plan``'s engine does on equal rows and at the corners of its profile.

    It is to be called right after the plan was evaluated: the engine is kept until another is
    built.
    """
    found = [
        *_equal_rows(problem, context, plan, emulated),
        *_corners(problem, context, plan, emulated),
    ]
    return context.found(found)


def _equal_rows(
    problem: Problem, context: Context, plan: PrecisionPlan, emulated: Evaluation
) -> list[Finding]:
    sample = sample_of_equal_rows(problem)
    if sample is None or context.engine is None:
        return []
    key = context.engine.key("equal-rows", plan.digest, emulated.plan.digest, sample.digest)
    known = context.cache.recall(key)
    if known is not None:
        return [Finding(**entry) for entry in known[0]]
    try:
        found = _asked(problem, context, plan, emulated, sample)
    except RunnerFailedError as error:
        if error.machine:  # another time it may be told
            return []
        found = []
    context.cache.record([Row(key, "equal-rows", [vars(f) for f in found])])
    return found


def _asked(
    problem: Problem, context: Context, plan: PrecisionPlan, emulated: Evaluation, sample: Sample
) -> list[Finding]:
    """Nothing where the reference breaks.

    Raises:
        RunnerFailedError: the engine does.
    """
    if context.opened is None or not list(usable(context, iter([sample]), 1)):
        return []
    rows = len(next(iter(sample.arrays.values())))
    exact = {n: a for n, a in context.references.of(sample).items() if _is_batch(a, rows)}
    if not exact:
        return []
    answer = next(iter(context.opened.outputs(plan, [sample])))
    answers: list[Arrays] = [answer]
    if isinstance(answer, Repeated):
        answers += [other for other, _ in answer.others]
    engine, found = plan.base.value.upper(), []
    for name, reference in exact.items():
        largest, span = _size(reference)
        units = _UNITS * _UNIT[emulated.plan.base] * largest
        error = emulated.worst.get(name)
        # Rounding that leaves the range explains everything.
        rounding = 2.0 * error.max_abs if error is not None and error.finite else math.inf
        allowed = rows_apart(reference).apart + max(units, rounding)
        of_rows = [(a, rows_apart(a[name])) for a in answers if a[name].shape == reference.shape]
        worst, seen = max(of_rows, key=lambda pair: pair[1].apart, default=(answer, None))
        if seen is None or seen.apart <= allowed:
            continue
        missed = _score_between_rows(problem, worst, name) > 1.0
        named = ", ".join(map(str, seen.rows[:4])) + (" ..." if len(seen.rows) > 4 else "")
        beyond = " and more than the requirement allows" if missed else ""
        message = (
            f"the {engine} engine gives equal rows of a batch different answers in output {name!r}"
            f": of {rows} copies of one row of {sample.name!r}, answers lie "
            f"{seen.apart / span:.2g} of the output's range apart (farthest off: row {named}), "
            f"beyond the {allowed / span:.2g} that rounding explains{beyond}; run it one row at a "
            "time, or look for the kernel with `bisect-trt reduce`"
        )
        found.append(Finding("equal-rows", name, message, missed))
    return found


def sample_of_equal_rows(problem: Problem) -> Sample | None:
    """The first given sample whose inputs share a first dimension of 2 or more, else the first one
    with as many rows as the given profile allows, each row the first; None where there is no
    batch.
    """
    for sample in problem.samples:
        sizes = {a.shape[:1] for a in sample.arrays.values()}
        if len(sizes) == 1 and (rows := next(iter(sizes))) and rows[0] > 1:
            return _rows_of(sample, rows[0])
    specs = input_specs(problem.model.proto)
    dynamic = all(s.shape is None or (s.shape and not isinstance(s.shape[0], int)) for s in specs)
    if not problem.settings.profiles or not dynamic:
        return None
    profile = _profile(problem).values()
    most = min((largest[0] if largest else 1 for _, _, largest in profile), default=1)
    least = max((smallest[0] if smallest else 1 for smallest, _, _ in profile), default=1)
    return _rows_of(problem.samples[0], most) if most > 1 and least <= most else None


def _rows_of(sample: Sample, rows: int) -> Sample:
    arrays = {n: np.repeat(a[:1], rows, axis=0) for n, a in sample.arrays.items()}
    return Sample(f"{sample.name}, row 0", arrays)


def _is_batch(reference: NDArray[Any], rows: int) -> bool:
    """Whether equal rows of the inputs gave equal rows of this output."""
    if reference.dtype.kind != "f" or reference.shape[:1] != (rows,) or reference.size == 0:
        return False
    return rows_apart(reference).apart <= _UNITS * _UNIT[Precision.FP32] * _size(reference)[0]


def _size(reference: NDArray[Any]) -> tuple[float, float]:
    """The largest of the finite values, and their range; their size where all are equal."""
    values = reference[np.isfinite(reference)].astype(np.float64)
    largest = float(np.abs(values).max(initial=0.0))
    return largest, (float(np.ptp(values)) if values.size else 0.0) or largest or 1.0


def _score_between_rows(problem: Problem, answer: Arrays, name: str) -> float:
    """The first row's score as the reference of all of them; 0 where no input passes alone."""
    if problem.requirements.of_sets:
        return 0.0
    array = answer[name]
    repeated = np.repeat(array[:1], len(array), axis=0)
    return problem.requirements.score({**answer, name: repeated}, answer)


def _corners(
    problem: Problem, context: Context, plan: PrecisionPlan, emulated: Evaluation
) -> list[Finding]:
    if not problem.settings.profiles or context.engine is None or problem.requirements.of_sets:
        return []
    found = []
    for size, sample in usable_corners(problem, context):
        (result,) = context.engine.judge(plan, [sample]).results
        if result.verdict.passed:
            continue
        (expected,) = context.evaluator.judge(emulated.plan, [sample]).results
        if not expected.verdict.passed:
            continue
        shapes = ", ".join(f"{n} {'x'.join(map(str, a.shape))}" for n, a in sample.arrays.items())
        how = times(result.score) if result.errors else f"{result.verdict}, {result.note}"
        message = (
            f"the {plan.base.value.upper()} engine misses the requirement at the {size} shapes of "
            f"--profile ({shapes}): {how}, where emulation meets it ({times(expected.score)}); "
            "build for a narrower profile, or for each size an engine of its own"
        )
        found.append(Finding("profile-corner", next(iter(sample.arrays)), message, weighty=True))
    return found


def usable_corners(problem: Problem, context: Context) -> list[tuple[str, Sample]]:
    """The first sample cropped or wrapped around to the smallest and to the largest shapes of the
    given profile, where no given sample has them and the reference can be computed.
    """
    profile, given = _profile(problem), problem.samples[0]
    shown = [{n: a.shape for n, a in s.arrays.items()} for s in problem.samples]
    found = []
    for size, place in (("smallest", 0), ("largest", 2)):
        shapes = {name: profile[name][place] for name in given.arrays}
        if shapes in shown or not _fit(problem, shapes):
            continue
        arrays = {name: _wrapped(a, shapes[name]) for name, a in given.arrays.items()}
        corner = Sample(f"{given.name}, {size} shapes", arrays)
        found += [(size, sample) for sample in usable(context, iter([corner]), 1)]
    return found


def _fit(problem: Problem, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the model takes them together: sizes of one name are equal."""
    symbols: dict[str, int] = {}
    try:
        for spec in input_specs(problem.model.proto):
            check_array("profile", spec, spec.dtype, shapes[spec.name], symbols)
    except BadInputError:
        return False
    return True


def _wrapped(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    for axis, size in enumerate(shape):
        array = np.take(array, range(size), axis=axis, mode="wrap")
    return array


def _profile(problem: Problem) -> dict[str, tuple[tuple[int, ...], ...]]:
    samples = (*problem.samples, *problem.holdout)
    return dict(profile_of(problem.graph.proto, samples, problem.settings.profiles))


@dataclass(frozen=True)
class EngineBaselines:
    """The engine's whole-network runs and what they say of its FP32.

    ``fingerprint`` is the cosine between the engine's FP32 errors and emulated TF32's; ``table``
    the layers' errors on the engine, where they could be had, and ``tracing`` what will give it
    while it is still made (see :func:`with_table`). ``pinned`` is all pins: ``fp32`` where no layer
    is held reduced. ``diagnosis`` is there if the engine settles the case, ``validation`` the test
    on new copies where nothing has to be pinned, ``reproducibility`` where an engine had to be
    looked at in further processes for it.
    """

    runner: str
    fp32: Evaluation
    tf32: Evaluation
    base: Evaluation
    identity: Fp32
    fingerprint: float
    table: EngineTable | None
    findings: tuple[Finding, ...]
    pinned: Evaluation
    diagnosis: Diagnosis | None
    reproducibility: Reproducibility | None = None
    tracing: Future[EngineTable | None] | None = None
    validation: Validation | None = None

    @property
    def pin_precision(self) -> Precision:
        """What a pin really runs in on this engine."""
        return Precision.TF32 if self.identity is Fp32.TF32 else Precision.FP32

    def by_label(self) -> dict[str, Evaluation]:
        """The baselines as rows of the outputs table."""
        return {f"{self.runner} {r.plan.base.value}": r for r in (self.fp32, self.tf32, self.base)}


def measure_engine(
    problem: Problem, context: Context, emulated: Baselines, beside: Beside | None = None
) -> EngineBaselines | None:
    """Three builds: FP32 with TF32 cleared, TF32 allowed, all layers reduced; then the layers.

    None where the emulator judges.
    """
    engine, precision = context.engine, problem.settings.precision
    if engine is None:
        return None
    context.observer.step("engine baselines")
    plans = baseline_plans(problem)
    shown = emulated.layers
    if problem.marked is not None:
        shown = shown[shown["layer"].isin(problem.marked)]
    fp32 = engine.evaluate(plans[0])
    identity = what_fp32_is(fp32, emulated.fp32, emulated.tf32)
    findings = list(context.found(_findings(identity, fp32, emulated)))
    if fp32.worst:  # the engine is still there
        fp32_is = emulated.tf32 if identity is Fp32.TF32 else emulated.fp32
        findings += check_engine(problem, context, fp32.plan, fp32_is)
    tf32, base = engine.evaluate(plans[1]), engine.evaluate(plans[2])
    if base.worst:
        findings += check_engine(problem, context, base.plan, emulated.reduced_first)
    table, tracing = None, None
    traced = PrecisionPlan(precision, held=problem.unsupported)
    trace = partial(trace_engine, problem, context, engine, traced, shown)
    searches = fp32.verdict.passed and not base.verdict.passed and not problem.kept_reduced
    if base.worst and beside is not None and searches and context.emulator.device != CPU:
        tracing = beside.begin(trace)
    elif base.worst:
        context.observer.step("engine layers")
        table = trace()
        findings += _told_by(table, context)
    measured = EngineBaselines(
        engine.runner.name,
        fp32,
        tf32,
        base,
        identity,
        agreement(engine.vector(fp32.plan), context.evaluator.vector(emulated.tf32.plan)),
        table,
        tuple(findings),
        fp32,
        None,
        tracing=tracing,
    )
    return _diagnosed(problem, context, engine, measured, emulated)


def _diagnosed(
    problem: Problem,
    context: Context,
    engine: Evaluator,
    found: EngineBaselines,
    emulated: Baselines,
) -> EngineBaselines:
    """``found`` with what it shows, as far as that settles the case, and all pins beside it."""
    fp32, base, precision = found.fp32, found.base, problem.settings.precision

    def marked_fp32() -> EngineTable | None:
        plan = PrecisionPlan(Precision.FP32)
        return trace_engine(problem, context, engine, plan, emulated.layers)

    # TF32 is a switch of the whole engine: no pin could make up for its luck.
    luck_matters = base.verdict.passed and not problem.settings.fitted and precision.is_storage
    overfitted, validation = False, None
    if luck_matters and problem.settings.pick is None:
        test = next_test(problem, context)
        refused, validation = put_to_test(problem, context, [engine], base.plan, test, 1.0)
        overfitted = refused is not None
    reproducibility = reproducibility_of_failure(context, fp32, base)
    blamed: PrecisionPlan | None = None
    if reproducibility is not None and reproducibility.decides:
        blamed = base.plan if fp32.verdict.passed else fp32.plan
        diagnosis: Diagnosis | None = not_reproducible(blamed.base.value.upper(), reproducibility)
    else:
        diagnosis = diagnose(
            fp32,
            found.tf32,
            base,
            found.identity,
            precision,
            marked_fp32,
            overfitted=overfitted,
            on_which=missed_on(problem, engine, fp32.plan),
        )
    pinned = (
        engine.evaluate(problem.base.with_pins(problem.names)) if problem.kept_reduced else fp32
    )
    if diagnosis is None or diagnosis.cause is not Cause.NONE:
        validation = None
    told = list(found.findings)
    for plan in dict.fromkeys(p for p in (fp32.plan, found.tf32.plan, base.plan) if p != blamed):
        seen = engine.done[plan].reproducibility
        told += context.found(note_not_reproducible(plan.base.value.upper(), seen))
    found = replace(
        found, findings=tuple(told), diagnosis=diagnosis, reproducibility=reproducibility
    )
    return replace(found, pinned=pinned, validation=validation)


def with_table(engine: EngineBaselines, context: Context) -> EngineBaselines:
    """``engine`` with the table of layers; waits for it where it is still made. Before anything
    else is asked of the engine, which is one process. Without it where it could not be made, or
    not in the time that is left: it explains, and decides nothing.
    """
    if engine.tracing is None:
        return engine
    left, table, why = context.time.left_s, None, ""
    try:
        table = engine.tracing.result(left if math.isfinite(left) else None)
    except RunnerFailedError as error:
        why = one_line(error)
    except FutureTimeout:
        why = "the time is over"
    found = _told_by(table, context)
    if why:
        message = f"the layers were not compared on the engine: {why}"
        found = context.found([Finding("engine-layers", "", message)])
    return replace(engine, table=table, tracing=None, findings=(*engine.findings, *found))


def _told_by(table: EngineTable | None, context: Context) -> tuple[Finding, ...]:
    return () if table is None else context.found(findings_of(table))


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
