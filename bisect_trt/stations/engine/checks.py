"""What an engine is asked beside the given inputs: rows that are equal, and the corners of its
profile.

A batch whose rows are all alike must give rows that are all alike, up to the order of sums. So the
rows of an output may lie apart by what the reference's do, and by ten units in the last place of
its largest value, in the precision that the engine runs in (a last bit that differs may flip a
rounding), or twice the error that the emulator has in that precision, where that is more: neither
row need be nearer to the truth. An output whose rows differ in the reference, by more than ten of
FP32's units, has no batch there, and nothing is claimed of it. Outputs that are no floats go in
steps: nothing is claimed of them either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError, RunnerFailedError
from bisect_trt.core.finding import Finding
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.inputs import check_array, input_specs
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.errors.rows import rows_apart
from bisect_trt.numerics.scores import times
from bisect_trt.probe.journal import Row
from bisect_trt.probe.result import ProbeResult
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.tensorrt.profile import profile_of
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.usable import usable

_UNITS = 10.0
_UNIT = {
    Precision.FP32: 2.0**-23,
    Precision.TF32: 2.0**-10,
    Precision.FP16: 2.0**-10,
    Precision.BF16: 2.0**-7,
}


def check_engine(
    case: Case, bench: Bench, plan: PrecisionPlan, emulated: ProbeResult
) -> tuple[Finding, ...]:
    """What ``plan``'s engine does on equal rows and at the corners of its profile.

    It is to be called right after the plan was probed: the engine is kept until another is built.

    Args:
        case: the inputs, and the profile where one was given.
        bench: whose engine is asked.
        plan: what it is built from.
        emulated: the same on the emulator, in what the layers really run in: FP32 may be TF32.

    Returns:
        A finding for each output whose rows differ, and for each corner that misses the
        requirement where the emulator meets it.
    """
    found = [*_equal_rows(case, bench, plan, emulated), *_corners(case, bench, plan, emulated)]
    return bench.found(found)


def _equal_rows(
    case: Case, bench: Bench, plan: PrecisionPlan, emulated: ProbeResult
) -> list[Finding]:
    sample = sample_of_equal_rows(case)
    if sample is None or bench.engine is None:
        return []
    key = bench.engine.key("equal-rows", plan.digest, emulated.plan.digest, sample.digest)
    known = bench.journal.recall(key)
    if known is not None:
        return [Finding(**entry) for entry in known[0]]
    try:
        found = _asked(case, bench, plan, emulated, sample)
    except RunnerFailedError as error:
        if error.machine:  # another time it may be told
            return []
        found = []
    bench.journal.record([Row(key, "equal-rows", [vars(f) for f in found])])
    return found


def _asked(
    case: Case, bench: Bench, plan: PrecisionPlan, emulated: ProbeResult, sample: Sample
) -> list[Finding]:
    """Nothing where the reference breaks.

    Raises:
        RunnerFailedError: the engine does.
    """
    if bench.opened is None or not list(usable(bench, iter([sample]), 1)):
        return []
    rows = len(next(iter(sample.arrays.values())))
    exact = {n: a for n, a in bench.references.of(sample).items() if _is_batch(a, rows)}
    if not exact:
        return []
    answer = next(iter(bench.opened.outputs(plan, [sample])))
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
        missed = _score_between_rows(case, worst, name) > 1.0
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


def sample_of_equal_rows(case: Case) -> Sample | None:
    """The first given sample whose inputs share a first dimension of 2 or more, else the first one
    with as many rows as the given profile allows, each row the first; None where there is no
    batch.
    """
    for sample in case.samples:
        sizes = {a.shape[:1] for a in sample.arrays.values()}
        if len(sizes) == 1 and (rows := next(iter(sizes))) and rows[0] > 1:
            return _rows_of(sample, rows[0])
    specs = input_specs(case.model.proto)
    dynamic = all(s.shape is None or (s.shape and not isinstance(s.shape[0], int)) for s in specs)
    if not case.settings.profiles or not dynamic:
        return None
    profile = _profile(case).values()
    most = min((largest[0] if largest else 1 for _, _, largest in profile), default=1)
    least = max((smallest[0] if smallest else 1 for smallest, _, _ in profile), default=1)
    return _rows_of(case.samples[0], most) if most > 1 and least <= most else None


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


def _score_between_rows(case: Case, answer: Arrays, name: str) -> float:
    """The first row's score as the reference of all of them; 0 where no input passes alone."""
    if case.requirements.of_sets:
        return 0.0
    array = answer[name]
    repeated = np.repeat(array[:1], len(array), axis=0)
    return case.requirements.score({**answer, name: repeated}, answer)


def _corners(case: Case, bench: Bench, plan: PrecisionPlan, emulated: ProbeResult) -> list[Finding]:
    if not case.settings.profiles or bench.engine is None or case.requirements.of_sets:
        return []
    found = []
    for size, sample in usable_corners(case, bench):
        (result,) = bench.engine.judge(plan, [sample]).results
        if result.verdict.passed:
            continue
        (expected,) = bench.prober.judge(emulated.plan, [sample]).results
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


def usable_corners(case: Case, bench: Bench) -> list[tuple[str, Sample]]:
    """The first sample cropped or wrapped around to the smallest and to the largest shapes of the
    given profile, where no given sample has them and the reference can be computed.
    """
    profile, given = _profile(case), case.samples[0]
    shown = [{n: a.shape for n, a in s.arrays.items()} for s in case.samples]
    found = []
    for size, place in (("smallest", 0), ("largest", 2)):
        shapes = {name: profile[name][place] for name in given.arrays}
        if shapes in shown or not _fit(case, shapes):
            continue
        arrays = {name: _wrapped(a, shapes[name]) for name, a in given.arrays.items()}
        corner = Sample(f"{given.name}, {size} shapes", arrays)
        found += [(size, sample) for sample in usable(bench, iter([corner]), 1)]
    return found


def _fit(case: Case, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the model takes them together: sizes of one name are equal."""
    symbols: dict[str, int] = {}
    try:
        for spec in input_specs(case.model.proto):
            check_array("profile", spec, spec.dtype, shapes[spec.name], symbols)
    except BadInputError:
        return False
    return True


def _wrapped(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    for axis, size in enumerate(shape):
        array = np.take(array, range(size), axis=axis, mode="wrap")
    return array


def _profile(case: Case) -> dict[str, tuple[tuple[int, ...], ...]]:
    samples = (*case.samples, *case.holdout)
    return dict(profile_of(case.graph.proto, samples, case.settings.profiles))
