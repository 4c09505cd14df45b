"""What is checked of each engine: equal rows of a batch, and the corners of a profile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Row
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.errors import rows_apart
from bisect_trt.metrics.requirements import times
from bisect_trt.model.inputs import check_array, input_specs
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.tensorrt.profile import profile_of
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.samples import usable

_ROUNDING_STEPS = 10.0
"""How many rounding steps of the largest value equal rows may lie apart."""

_ROUNDING_STEP = {
    Precision.FP32: 2.0**-23,
    Precision.TF32: 2.0**-10,
    Precision.FP16: 2.0**-10,
    Precision.BF16: 2.0**-7,
}


def check_engine(
    problem: Problem, context: Context, plan: PrecisionPlan, emulated: Evaluation
) -> None:
    """Say what ``plan``'s engine does on equal rows and at the corners of its profile.

    Call it right after the plan was evaluated: the engine is kept until another is built.
    """
    context.note(*_check_equal_rows(problem, context, plan, emulated))
    context.note(*_check_corners(problem, context, plan, emulated))


def _check_equal_rows(
    problem: Problem, context: Context, plan: PrecisionPlan, emulated: Evaluation
) -> list[Finding]:
    sample = _sample_of_equal_rows(problem)
    if sample is None or context.engine is None:
        return []
    key = context.engine.key("equal-rows", plan.digest, emulated.plan.digest, sample.digest)
    known = context.cache.recall(key)
    if known is not None:
        return [Finding(**entry) for entry in known[0]]
    try:
        found = list(_unequal_rows(problem, context, plan, emulated, sample))
    except RunnerFailedError as error:
        if error.machine:  # another time it may be told
            return []
        found = []
    context.cache.record([Row(key, "equal-rows", [vars(f) for f in found])])
    return found


def _unequal_rows(
    problem: Problem, context: Context, plan: PrecisionPlan, emulated: Evaluation, sample: Sample
) -> Iterator[Finding]:
    """The outputs in which the engine gives the equal rows of ``sample`` different answers.

    Raises:
        RunnerFailedError: the engine breaks.
    """
    if context.opened is None or not list(usable(context, iter([sample]), 1)):
        return
    rows = len(next(iter(sample.arrays.values())))
    exact = {n: a for n, a in context.references.of(sample).items() if _keeps_rows(a, rows)}
    if not exact:
        return
    answer = next(iter(context.opened.outputs(plan, [sample])))
    answers = [answer]
    if isinstance(answer, Repeated):
        answers += [other for other, _ in answer.others]
    for name, reference in exact.items():
        largest, span = _size(reference)
        error = emulated.worst.get(name)
        # Rounding that leaves the range explains everything.
        rounding = 2.0 * error.max_abs if error is not None and error.finite else math.inf
        steps = _ROUNDING_STEPS * _ROUNDING_STEP[emulated.plan.base] * largest
        allowed = rows_apart(reference).apart + max(steps, rounding)
        of_rows = [(a, rows_apart(a[name])) for a in answers if a[name].shape == reference.shape]
        if not of_rows:
            continue
        worst, seen = max(of_rows, key=lambda pair: pair[1].apart)
        if seen.apart <= allowed:
            continue
        missed = False
        if not problem.requirements.of_sets:
            first_row = np.repeat(worst[name][:1], len(worst[name]), axis=0)
            missed = problem.requirements.score({**worst, name: first_row}, worst) > 1.0
        named = ", ".join(map(str, seen.rows[:4])) + (" ..." if len(seen.rows) > 4 else "")
        beyond = " and more than the requirement allows" if missed else ""
        message = (
            f"the {plan.base.value.upper()} engine gives equal rows of a batch different answers "
            f"in output {name!r}: of {rows} copies of one row of {sample.name!r}, answers lie "
            f"{seen.apart / span:.2g} of the output's range apart (farthest off: row {named}), "
            f"beyond the {allowed / span:.2g} that rounding explains{beyond}; run it one row at a "
            "time, or look for the kernel with `bisect-trt reduce`"
        )
        yield Finding("equal-rows", name, message, missed)


def _sample_of_equal_rows(problem: Problem) -> Sample | None:
    """A batch of one given row, repeated; None where the model takes no batch."""
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


def _keeps_rows(reference: NDArray[Any], rows: int) -> bool:
    """Whether equal rows of the inputs gave equal rows of this output."""
    if reference.dtype.kind != "f" or reference.shape[:1] != (rows,) or reference.size == 0:
        return False
    allowed = _ROUNDING_STEPS * _ROUNDING_STEP[Precision.FP32] * _size(reference)[0]
    return rows_apart(reference).apart <= allowed


def _size(reference: NDArray[Any]) -> tuple[float, float]:
    """The largest of the finite values, and their range; their size where all are equal."""
    values = reference[np.isfinite(reference)].astype(np.float64)
    largest = float(np.abs(values).max(initial=0.0))
    return largest, (float(np.ptp(values)) if values.size else 0.0) or largest or 1.0


def _check_corners(
    problem: Problem, context: Context, plan: PrecisionPlan, emulated: Evaluation
) -> Iterator[Finding]:
    """Where the engine misses at the smallest or largest shapes of the given profile."""
    if not problem.settings.profiles or context.engine is None or problem.requirements.of_sets:
        return
    for size, corner in _corners(problem):
        for sample in usable(context, iter([corner]), 1):
            (result,) = context.engine.judge(plan, [sample]).results
            if result.verdict.passed:
                continue
            (expected,) = context.evaluator.judge(emulated.plan, [sample]).results
            if not expected.verdict.passed:
                continue
            shapes = (f"{n} {'x'.join(map(str, a.shape))}" for n, a in sample.arrays.items())
            how = times(result.score) if result.errors else f"{result.verdict}, {result.note}"
            message = (
                f"the {plan.base.value.upper()} engine misses the requirement at the {size} shapes "
                f"of --profile ({', '.join(shapes)}): {how}, where emulation meets it "
                f"({times(expected.score)}); build for a narrower profile, or for each size an "
                "engine of its own"
            )
            where = next(iter(sample.arrays))
            yield Finding("profile-corner", where, message, weighty=True)


def _corners(problem: Problem) -> Iterator[tuple[str, Sample]]:
    """The first sample cropped or wrapped to the profile's smallest and largest shapes."""
    profile, given = _profile(problem), problem.samples[0]
    shown = [sample.shapes for sample in problem.samples]
    for size, place in (("smallest", 0), ("largest", 2)):
        shapes = {name: profile[name][place] for name in given.arrays}
        symbols: dict[str, int] = {}  # sizes of one name are equal
        try:
            for spec in input_specs(problem.model.proto):
                check_array("profile", spec, spec.dtype, shapes[spec.name], symbols)
        except BadInputError:
            continue
        if shapes not in shown:
            arrays = {name: _wrapped(a, shapes[name]) for name, a in given.arrays.items()}
            yield size, Sample(f"{given.name}, {size} shapes", arrays)


def _wrapped(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    for axis, size in enumerate(shape):
        array = np.take(array, range(size), axis=axis, mode="wrap")
    return array


def _profile(problem: Problem) -> dict[str, tuple[tuple[int, ...], ...]]:
    samples = (*problem.samples, *problem.holdout)
    return dict(profile_of(problem.graph.proto, samples, problem.settings.profiles))
