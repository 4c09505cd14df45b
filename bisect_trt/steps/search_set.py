"""The inputs that the search is judged on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock

from bisect_trt.base.outcomes import Finding, InputKind
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import Evaluation, SampleResult, SearchSetResult, meets
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.samples import SEARCH_STREAM, augmented, perturbs
from bisect_trt.steps.validation_inputs import set_size, spared

SEARCH_COPIES = 20
"""Copies of each kind that a search begins with; of a slow model fewer."""

SEARCH_SET_TIME_S = 32.0
"""How long it usually takes to make and run the copies that a search begins with."""

SearchSamples = Mapping[InputKind, Sequence[Sample]]
"""The samples of each kind that a search begins with."""


@dataclass(frozen=True)
class Refusal:
    """The ``samples`` of one ``kind`` that a plan missed, of ``tested``.

    ``score``: the worst one's in tolerances, of given inputs the worst that is not spared.
    """

    kind: InputKind
    samples: tuple[Sample, ...]
    tested: int
    score: float


def all_in_fp32(problem: Problem, base: PrecisionPlan) -> PrecisionPlan | None:
    """``base`` with every layer pinned; None where that is not FP32 as a whole."""
    if problem.kept_reduced or base.pin_precision is not Precision.FP32:
        return None
    return base.with_pins(problem.names)


def decided_by_pins(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    fp32: PrecisionPlan | None,
    samples: Sequence[Sample],
) -> list[Sample]:
    """The ``samples`` that ``fp32`` passes by all ``judges``; that others are left out is noted."""
    left = list(samples)
    if fp32 is None:
        return left
    for judge in judges if left else ():
        results = judge.judge(fp32, left, size=set_size(problem)).results
        sets = _sets(problem, left)
        passing = [one for one, r in zip(sets, results, strict=True) if meets(r, 1.0)]
        left = [sample for one in passing for sample in one]
    if len(left) < len(samples):
        message = (
            "on some copies of the inputs the requirement is missed even with every layer in FP32 "
            "(the order of its sums decides): they are counted, and say nothing of pins"
        )
        context.note(Finding("fp32-misses", "", message))
    return left


def _sets(problem: Problem, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    size = set_size(problem)
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def search_samples(problem: Problem, context: Context, first: int | None = None) -> SearchSamples:
    """The given inputs, and perturbed and augmented ones; ``first`` bounds the number of these."""
    size = set_size(problem)
    # Where inputs are judged together a set costs as much as all of them.
    most, least = (SEARCH_COPIES, 4) if size == 1 else (3, 1)
    # There are two kinds, each run by the reference and by the emulator.
    fitting = int(SEARCH_SET_TIME_S / (4.0 * context.pace.usual_seconds * size))
    count = size * min(most, max(least, fitting))
    some = count if first is None else min(count, first * size)

    def made(kind: InputKind, copies: Iterator[Sample]) -> tuple[Sample, ...]:
        found: list[Sample] = []
        for number, sample in enumerate(islice(copies, some), start=1):
            context.observer.progress(number, some, f"{kind.words} made")
            found.append(sample)
        return tuple(found)

    # Refuses kinds that make none before any is made.
    varied = augmented(problem, context, SEARCH_STREAM, count)
    perturbed = perturbs(problem, context, SEARCH_STREAM, count, emulated=True)
    return {
        InputKind.GIVEN: problem.samples,
        InputKind.PERTURBED: made(InputKind.PERTURBED, perturbed),
        InputKind.AUGMENTED: made(InputKind.AUGMENTED, varied),
    }


class SearchSet:
    """Judges plans on all samples, and lets as many of each kind miss as :func:`spared` says.

    The samples that did worst come first, so that a few runs refuse most failing plans. The set
    grows by the samples that refuse a plan.
    """

    def __init__(
        self, problem: Problem, context: Context, base: PrecisionPlan, samples: SearchSamples
    ) -> None:
        self._problem, self._context = problem, context
        self._evaluator = context.evaluator
        # An engine has the last word of its own.
        self._second = context.second if context.engine is None else None
        self.base = base
        self._samples = {kind: list(of_kind) for kind, of_kind in samples.items() if of_kind}
        # Samples of validations that passed count for the share, and are not run again.
        self._passed_elsewhere = dict.fromkeys(self._samples, 0)
        # Sets that passed all samples: answers for an interrupt or the end of a budget.
        self._kept: list[frozenset[str]] = []
        self._lock = Lock()

    def ask(self, pins: frozenset[str], limit: float, few: int | None = None) -> Evaluation:
        """The first emulator's outcome of ``pins`` within ``limit`` times the tolerance.

        ``few`` bounds the samples of each kind, beside those that may miss. The score is the worst
        one that is not spared, in units of ``limit``.
        """
        return self._evaluated(self._evaluator, pins, limit, few)

    def ask_second(self, pins: frozenset[str], limit: float) -> Evaluation | None:
        """The second emulator's outcome on all samples; None where it does not decide."""
        if self._second is None:
            return None
        return self._evaluated(self._second, pins, limit, None)

    def _evaluated(
        self, evaluator: Evaluator, pins: frozenset[str], limit: float, few: int | None
    ) -> Evaluation:
        plan = self.base.with_pins(pins)
        size = set_size(self._problem)
        # Workers evaluate side by side, and each may reorder the samples.
        with self._lock:
            kinds = {kind: list(of_kind) for kind, of_kind in self._samples.items()}
        results: list[SampleResult] = []
        names: list[str] = []
        score, seen_in = 0.0, None
        for kind, samples in kinds.items():
            may_miss = spared(self._problem, kind, len(samples) + self._passed_elsewhere[kind])
            chosen = samples if few is None else samples[: (may_miss + few) * size]
            found = evaluator.judge(plan, chosen, limit=limit, misses=may_miss, size=size)
            results += found.results
            names += found.names
            failed = found.missed(limit) > may_miss
            if seen_in is None or found.score(may_miss) > score or failed:
                seen_in = found.logged
            score = max(score, found.score(may_miss))
            if failed:  # one kind that fails is enough
                self._put_first(kind, samples, found, size)
                break
        runner = evaluator.runner.name
        together = Evaluation.over(plan, runner, results, score=score, names=names)
        return replace(together, seen_in=seen_in).under(limit)

    def _put_first(
        self, kind: InputKind, samples: Sequence[Sample], found: SearchSetResult, size: int
    ) -> None:
        """Begin with the kind that failed, and in it with the sets that did worst."""
        sets = [list(samples[i : i + size]) for i in range(0, len(samples), size)]
        scores = [r.score for r in found.results]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        ordered = [sets[i] for i in order] + sets[len(scores) :]
        with self._lock:
            others = {k: v for k, v in self._samples.items() if k != kind}
            self._samples = {kind: [sample for one in ordered for sample in one], **others}

    @property
    def smallest(self) -> frozenset[str] | None:
        """The answer if nothing better is found in time; None where nothing was kept."""
        with self._lock:
            return min(self._kept, key=len, default=None)

    def keep(self, pins: frozenset[str]) -> None:
        """Let ``pins``, which passed, be the answer if nothing better is found in time."""
        with self._lock:
            self._kept.append(pins)
        self._publish()

    def forget(self, below: int) -> None:
        """Drop kept sets of fewer pins than the search goes on with."""
        with self._lock:
            self._kept = [pins for pins in self._kept if len(pins) >= below]
        self._publish()

    def _publish(self) -> None:
        best = self._context.in_hand = self.smallest
        self._context.observer.best(len(self._problem.names) if best is None else len(best))

    def add(self, refusal: Refusal) -> None:
        """Let the samples that refused a plan join; others of its validation count as passed."""
        kind, size = refusal.kind, set_size(self._problem)
        present = self._samples.get(kind, [])
        digests = {sample.digest for sample in present}
        sets = _sets(self._problem, refusal.samples)
        new = [s for one in sets if any(s.digest not in digests for s in one) for s in one]
        others = {k: v for k, v in self._samples.items() if k != kind}
        # They come first: what they refuse needs no other run.
        self._samples = {kind: new + present, **others}
        if kind != InputKind.GIVEN:
            passed = refusal.tested * size - len(refusal.samples)
            self._passed_elsewhere[kind] = self._passed_elsewhere.get(kind, 0) + passed

    def set_aside(self) -> bool:
        """Drop the copies that FP32 as a whole misses too. Returns True if any were dropped."""
        judges = [judge for judge in (self._evaluator, self._second) if judge is not None]
        fp32 = all_in_fp32(self._problem, self.base)
        before = sum(map(len, self._samples.values()))
        for kind, samples in list(self._samples.items()):
            if kind is not InputKind.GIVEN:
                left = decided_by_pins(self._problem, self._context, judges, fp32, samples)
                self._samples[kind] = left
        return sum(map(len, self._samples.values())) < before
