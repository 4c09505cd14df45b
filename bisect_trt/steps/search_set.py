"""The inputs that the search is judged on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

_FINDING = Finding(
    "fp32-misses",
    "",
    "on some copies of the inputs the requirement is missed even with every layer in FP32 (the "
    "order of its sums decides): they are counted, and say nothing of pins",
)


@dataclass(frozen=True)
class Refusal:
    """What spoke against a plan: ``samples`` of one ``kind`` that missed, of ``tested``.

    ``score`` is the worst one's in tolerances, or of given inputs the worst that is not spared.
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


def missed_by_every(
    problem: Problem, context: Context, plan: PrecisionPlan, every: PrecisionPlan, refusal: Refusal
) -> set[str]:
    """The digests of those samples of ``refusal`` that ``every`` layer pinned misses too.

    The emulator that misses them is asked; that there are some is noted.
    """
    if refusal.kind is InputKind.GIVEN:
        return set()
    found = set[str]()
    for one in _sets(problem, refusal.samples):
        for judge in (context.evaluator, context.second):
            if judge.judge(plan, one, size=len(one)).missed():
                if judge.judge(every, one, size=len(one)).missed():
                    found.update(sample.digest for sample in one)
                break
    if found:
        context.note(_FINDING)
    return found


def told_by_pins(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    every: PrecisionPlan | None,
    samples: Sequence[Sample],
) -> list[Sample]:
    """Those of ``samples`` that FP32 as a whole passes by all ``judges``; others are noted."""
    left = list(samples)
    if every is None:
        return left
    for judge in judges if left else ():
        found = judge.judge(every, left, size=set_size(problem)).results
        kept = [one for one, r in zip(_sets(problem, left), found, strict=True) if meets(r, 1.0)]
        left = [sample for one in kept for sample in one]
    if len(left) < len(samples):
        context.note(_FINDING)
    return left


def _sets(problem: Problem, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    size = set_size(problem)
    return [samples[i : i + size] for i in range(0, len(samples), size)]


SEARCH_COPIES = 20
_SEARCHED_SETS = 3
"""Copies of each kind that a search begins with, or sets of them where they are judged together."""

SEARCH_SET_TIME_S = 32.0
"""Of a slow model fewer, which are usually made and run in this time, but some at least: what they
let through is for new copies to refuse."""

_FEWEST_COPIES = 4


@dataclass(frozen=True)
class SearchSamples:
    """The samples of each kind that a search begins with."""

    given: tuple[Sample, ...]
    perturbed: tuple[Sample, ...]
    augmented: tuple[Sample, ...]

    def by_kind(self) -> dict[InputKind, tuple[Sample, ...]]:
        """The kinds by name."""
        return {
            InputKind.GIVEN: self.given,
            InputKind.PERTURBED: self.perturbed,
            InputKind.AUGMENTED: self.augmented,
        }


def search_copies(problem: Problem, usual_seconds: float) -> int:
    """How many copies of a kind the search set begins with."""
    size = set_size(problem)
    most, least = (SEARCH_COPIES, _FEWEST_COPIES) if size == 1 else (_SEARCHED_SETS, 1)
    # There are two kinds, each run by the reference and by the emulator.
    fitting = int(SEARCH_SET_TIME_S / (4.0 * usual_seconds * size))
    return size * min(most, max(least, fitting))


def search_samples(problem: Problem, context: Context, first: int | None = None) -> SearchSamples:
    """The given inputs, perturbed copies, and augmented inputs where inputs are few."""
    count = search_copies(problem, context.pace.usual_seconds)
    some = count if first is None else min(count, first * set_size(problem))

    def made(kind: InputKind, copies: Iterator[Sample]) -> tuple[Sample, ...]:
        found: list[Sample] = []
        for number, sample in enumerate(islice(copies, some), start=1):
            context.observer.progress(number, some, f"{kind.words} made")
            found.append(sample)
        return tuple(found)

    perturbed = perturbs(problem, context, SEARCH_STREAM, count, emulated=True)
    varied = augmented(problem, context, SEARCH_STREAM, count)
    return SearchSamples(
        problem.samples, made(InputKind.PERTURBED, perturbed), made(InputKind.AUGMENTED, varied)
    )


class SearchSet:
    """Judges plans on all samples, those first that did worst before.

    So a failing plan is mostly told by a few runs. Of each kind as many may miss as :func:`spared`
    says. It grows by the samples that refuse a plan.
    """

    def __init__(
        self, problem: Problem, context: Context, base: PrecisionPlan, samples: SearchSamples
    ) -> None:
        self._problem = problem
        self._evaluator = context.evaluator
        # Where an engine has the last word, or nobody has, it need not hold by both arithmetics.
        decides = context.engine is None and problem.settings.pick is None
        self._second = context.second if decides else None
        self.base = base
        self._samples = {kind: list(those) for kind, those in samples.by_kind().items() if those}
        self._elsewhere = dict.fromkeys(self._samples, 0)
        self._context = context
        self._kept: list[frozenset[str]] = []
        self._lock = Lock()

    def ask(self, pins: frozenset[str], limit: float, few: int | None = None) -> Evaluation:
        """The first emulator's verdict on ``pins`` within ``limit`` times the tolerance.

        With ``few``, that many samples of each kind are asked, beside those that may miss. The
        score is the worst one that is not spared, in units of ``limit``.
        """
        return self._asked(self._evaluator, pins, limit, few)

    def ask_second(self, pins: frozenset[str], limit: float) -> Evaluation | None:
        """As :meth:`ask` on all samples, by the second emulator; None where it has no say."""
        if self._second is None:
            return None
        return self._asked(self._second, pins, limit, None)

    def _asked(
        self, evaluator: Evaluator, pins: frozenset[str], limit: float, few: int | None
    ) -> Evaluation:
        plan = self.base.with_pins(pins)
        size = set_size(self._problem)
        with self._lock:
            kinds = {kind: list(those) for kind, those in self._samples.items()}
        results: list[SampleResult] = []
        names: list[str] = []
        score, seen_in = 0.0, None
        for kind, samples in kinds.items():
            may = spared(self._problem, kind, len(samples) + self._elsewhere[kind])
            asked = samples if few is None else samples[: (may + few) * size]
            found = evaluator.judge(plan, asked, limit=limit, misses=may, size=size)
            results += found.results
            names += found.names
            if seen_in is None or found.score(may) > score or found.missed(limit) > may:
                seen_in = found.logged
            score = max(score, found.score(may))
            if found.missed(limit) > may:
                self._learn(kind, samples, found, size)
                break
        runner = evaluator.runner.name
        together = Evaluation.over(plan, runner, results, score=score, names=names)
        return replace(together, seen_in=seen_in).under(limit)

    @property
    def smallest(self) -> frozenset[str] | None:
        """The answer if nothing better is found in time; None where nothing was kept."""
        with self._lock:
            return min(self._kept, key=len, default=None)

    def keep(self, pins: frozenset[str]) -> None:
        """Let ``pins``, which passed, be the answer if nothing better is found in time."""
        with self._lock:
            self._kept.append(pins)
        self._hold()

    def forget(self, below: int) -> None:
        """Drop kept sets of fewer pins than the search goes on with."""
        with self._lock:
            self._kept = [pins for pins in self._kept if len(pins) >= below]
        self._hold()

    def _hold(self) -> None:
        best = self._context.in_hand = self.smallest
        self._context.observer.best(len(self._problem.names) if best is None else len(best))

    def add(self, refusal: Refusal) -> None:
        """Let the samples that refused a plan join; others of its validation count as passed."""
        known = {s.digest for s in self._samples.get(refusal.kind, ())}
        size = set_size(self._problem)
        sets = [refusal.samples[i : i + size] for i in range(0, len(refusal.samples), size)]
        new = [s for of in sets if any(s.digest not in known for s in of) for s in of]
        passed = refusal.tested * size - len(refusal.samples)
        joined = {refusal.kind: new + self._samples.get(refusal.kind, [])}
        self._samples = {**joined, **{k: v for k, v in self._samples.items() if k not in joined}}
        if refusal.kind != InputKind.GIVEN:
            elsewhere = self._elsewhere.get(refusal.kind, 0)
            self._elsewhere[refusal.kind] = elsewhere + passed

    def scores(self, pins: frozenset[str]) -> list[tuple[Sample, float]]:
        """Every sample with what it scores under ``pins``, taken alone, by the first emulator."""
        samples = [s for those in self._samples.values() for s in those]
        results = self._evaluator.judge(self.base.with_pins(pins), samples).results
        return [(sample, found.score) for sample, found in zip(samples, results, strict=True)]

    def set_aside(self) -> bool:
        """Drop the copies that FP32 as a whole misses too. Returns True if any were dropped."""
        judges = [judge for judge in (self._evaluator, self._second) if judge is not None]
        every, before = all_in_fp32(self._problem, self.base), sum(map(len, self._samples.values()))
        for kind, samples in list(self._samples.items()):
            if kind is not InputKind.GIVEN:
                left = told_by_pins(self._problem, self._context, judges, every, samples)
                self._samples[kind] = left
        return sum(map(len, self._samples.values())) < before

    def _learn(
        self, kind: InputKind, samples: Sequence[Sample], found: SearchSetResult, size: int
    ) -> None:
        """Ask the kind that failed first next time, and in it the sets that did worst."""
        sets = [list(samples[i : i + size]) for i in range(0, len(samples), size)]
        scores = [r.score for r in found.results]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        ordered = [sets[i] for i in order] + sets[len(scores) :]
        with self._lock:
            rest = {k: v for k, v in self._samples.items() if k != kind}
            self._samples = {kind: [s for of in ordered for s in of], **rest}
