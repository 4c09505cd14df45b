"""Evaluates plans on inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from threading import RLock

from bisect_trt.base.display import some_of
from bisect_trt.base.errors import BadInputError, RunnerFailedError, one_line
from bisect_trt.base.outcomes import Reproducibility, Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Answers, Cache, Row, content_key
from bisect_trt.evaluate.references import References
from bisect_trt.evaluate.result import (
    Evaluation,
    SampleResult,
    SearchSetLog,
    SearchSetResult,
    Vector,
    meets,
)
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.error_sample import ErrorSample
from bisect_trt.metrics.errors import farthest_apart
from bisect_trt.metrics.requirements import Judged, Requirements
from bisect_trt.runners.base import Patient, Repeated, Restartable, Runner

_AT_ONCE = 64
"""Samples that are prepared and then run: whoever ends it has answers on those before."""

_MOST_BREAKS = 3
"""Samples on which a runner may break before the others are given up."""


@dataclass(frozen=True)
class _Runs:
    """The runs of one sample: the ``worst`` with what it was judged, and of the ``best`` the
    conditions' values, where another is worse.
    """

    worst: Arrays
    judged: Judged
    reproducibility: Reproducibility | None = None
    best: Arrays | None = None
    best_values: tuple[float, ...] = ()


class Execution:
    """``runner`` held against ``references`` by ``requirements``.

    ``share`` is that of several samples which must meet them. ``before_each`` is called before each
    inference.
    """

    def __init__(
        self,
        runner: Runner,
        references: References,
        requirements: Requirements,
        answers: Answers,
        share: float,
        before_each: Callable[[], None],
    ) -> None:
        self.runner = runner
        self.references = references
        self.requirements = requirements
        self.share = share
        self._answers = answers
        self._before_each = before_each

    def run(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        error_sample: Callable[[Sample], ErrorSample] | None,
        kept: dict[str, Arrays] | None = None,
        prepare: Callable[[Sequence[Sample]], None] | None = None,
    ) -> Iterator[SampleResult]:
        """Each sample's result as it comes; a runner that breaks again and again fails all that are
        left.
        """
        left, breaks, together = list(samples), 0, True
        while left:
            part, done = left if prepare is None else left[:_AT_ONCE], 0
            part = part if together else part[:1]
            if prepare is not None:
                prepare(part)
            for result in self._until_broken(plan, part, error_sample, kept):
                if not done and len(part) > 1 and result.verdict is Verdict.CRASHED:
                    together = False  # who answers for all of them at once may mean any
                    break
                done += 1
                yield result
            if not together and not done:
                continue
            left = left[done:]
            broken = done < len(part) or not result.errors
            # The next sample may be fine, unless it is the plan that cannot be built.
            breaks += broken
            if left and (breaks >= _MOST_BREAKS or result.verdict is Verdict.BUILD_FAILED):
                yield from [result] * len(left)
                return

    def _until_broken(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        error_sample: Callable[[Sample], ErrorSample] | None,
        kept: dict[str, Arrays] | None,
    ) -> Iterator[SampleResult]:
        """The samples' results up to and with the first on which the runner breaks.

        Raises:
            MachineError: the machine gave out, which says nothing of the plan.
        """
        self._before_each()
        self.references.make_ready(samples, self._before_each)
        began, left = time.perf_counter(), len(samples)
        try:
            for sample, outputs in zip(samples, self.runner.outputs(plan, samples), strict=True):
                runs = self._judged(sample, outputs)
                worst = runs.worst
                vector = error_sample(sample).errors(worst) if error_sample is not None else None
                spent = time.perf_counter() - began
                if kept is not None:
                    kept[sample.digest] = worst
                    if runs.best is not None:
                        kept[_best_of(sample)] = runs.best
                yield SampleResult.of(
                    runs.judged, spent, vector, runs.reproducibility, runs.best_values
                )
                left -= 1
                if left:
                    self._before_each()
                began = time.perf_counter()
        except RunnerFailedError as failure:
            error = failure.blamed_on_model()
            self._exact(samples[-left])
            note = " | ".join([one_line(error), *error.log])
            spent = time.perf_counter() - began
            yield SampleResult(error.verdict, math.inf, (), {}, spent, note)

    def _exact(self, sample: Sample) -> Arrays:
        """The reference outputs.

        Raises:
            BadInputError: the model itself cannot be run on ``sample``: no fault of the plan.
        """
        try:
            return self.references.of(sample)
        except RunnerFailedError as error:
            raise BadInputError(str(error)) from error

    def _judged(self, sample: Sample, outputs: Arrays) -> _Runs:
        """The worst and the best of the runs of ``sample``, and how they differ."""
        exact = self._exact(sample)
        if not isinstance(outputs, Repeated):
            return _Runs(outputs, self.requirements.judge(exact, outputs))
        differing = sum(count for _, count in outputs.others)
        answers: list[tuple[Arrays, int]] = [(outputs, outputs.runs - differing), *outputs.others]
        judged = [self.requirements.judge(exact, answer) for answer, _ in answers]
        scores = [found.score for found in judged]
        # Of equal scores the larger error: of what a metric of all inputs will say no run has one.
        order = sorted(range(len(answers)), key=lambda i: (scores[i], _size(judged[i])))
        best, worst = order[0], order[-1]
        name, apart = farthest_apart(exact, [answer for answer, _ in answers])
        passed = sum(c for (_, c), score in zip(answers, scores, strict=True) if score <= 1.0)
        reproducibility = Reproducibility(
            outputs.runs, differing, passed, min(scores), scores[worst], apart, name, sample.name
        )
        chosen = _Runs(answers[worst][0], judged[worst], reproducibility)
        if best == worst:
            return chosen
        return replace(chosen, best=answers[best][0], best_values=judged[best].values)

    def score(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        results: Sequence[SampleResult],
        told: Sequence[float] | None,
        kept: dict[str, Arrays],
    ) -> tuple[float, list[Row]]:
        """The score of ``samples`` together, and the rows to cache."""
        rows = []
        if told is None:
            told = self._told(samples, results, kept)
            rows = [self._answers.row_of_all(plan, samples, told)]
            if any(r.reproducibility is not None for r in results):  # in the place of earlier runs'
                bests = {s.digest: kept[_best_of(s)] for s in samples if _best_of(s) in kept}
                best = self._told(samples, results, {**kept, **bests}) if bests else told
                rows.append(self._answers.row_of_all(plan, samples, best, best=True))
        return self.requirements.together(self.values_of(results), self.share, told), rows

    def values_of(self, results: Sequence[SampleResult]) -> list[tuple[float, ...]]:
        """The conditions' values of each result, NaN where the plan could not be run."""
        broken = (math.nan,) * len(self.requirements.items)
        return [r.values or broken for r in results]

    def _told(
        self, samples: Sequence[Sample], results: Sequence[SampleResult], kept: dict[str, Arrays]
    ) -> list[float]:
        """The collective metrics' values; NaN where an output is not finite or not there: that is
        not for the user's metric to see.
        """
        if any(not r.errors or not all(e.finite for e in r.errors.values()) for r in results):
            of_all = [
                i for i in self.requirements.items if i.metric in self.requirements.collective
            ]
            return [math.nan] * len(of_all)
        references = [self.references.of(s) for s in samples]
        return self.requirements.judge_all(references, [kept[s.digest] for s in samples])


def _best_of(sample: Sample) -> str:
    return f"{sample.digest} best"


def _size(judged: Judged) -> float:
    """The largest error of an output over its reference's range."""
    return max((e.rel_range for e in judged.errors.values()), default=0.0)


class Sets:
    """What ``execution`` shows on sets of samples, or ``answers`` knows; these are read under
    ``lock``. ``on_inference`` hears after each how many were made, and of how many.
    """

    def __init__(
        self,
        execution: Execution,
        answers: Answers,
        lock: RLock,
        on_inference: Callable[[int, int], None],
    ) -> None:
        self._execution = execution
        self._answers = answers
        self._lock = lock
        self._on_inference = on_inference

    def judged(
        self, plan: PrecisionPlan, samples: Sequence[Sample], size: int, rows: list[Row]
    ) -> Iterator[tuple[str, SampleResult]]:
        """Each set's name and result, as it comes."""
        sets = [samples[i : i + size] for i in range(0, len(samples), size)]
        collective = bool(self._execution.requirements.collective)
        with self._lock:
            known = {s.digest: self._answers.of(plan, s) for s in samples}
            told = [self._answers.of_all(plan, of) if collective else [] for of in sets]
        for place, of in enumerate(sets):  # what will be run again is judged again with its set
            if collective and any(known[s.digest] is None for s in of):
                told[place] = None
        # Copies may be equal, as rotations of a few token ids are: such are run once.
        new: dict[str, Sample] = {}
        for of, values in zip(sets, told, strict=True):
            for s in of:
                if values is None or known[s.digest] is None:
                    new.setdefault(s.digest, s)
        kept: dict[str, Arrays] | None = {} if collective else None
        asked_of = len(new)
        executed = self._execution.run(plan, list(new.values()), None, kept)
        for of, values in zip(sets, told, strict=True):
            found = []
            for sample in of:
                result = known[sample.digest]
                asked = values is None or result is None
                if asked and new.pop(sample.digest, None) is not None:
                    known[sample.digest] = result = next(executed)
                    rows.append(self._answers.row(plan, sample, result))
                    self._on_inference(asked_of - len(new), asked_of)
                assert result is not None
                found.append(result)
            if size == 1 and not collective:
                yield of[0].name, found[0]
                continue
            score, more = self._execution.score(plan, of, found, values, kept or {})
            rows += more
            yield some_of([s.name for s in of], 1), SampleResult.together(found, score)


_RECORDED = 64
"""New answers of one evaluation that a killed process may lose."""


class Evaluator:
    """Runs plans on one runner and judges them.

    ``done`` holds this run's evaluations of the given samples by plan, ``plans`` every plan that
    was asked about; ``log`` lists the evaluations in order, and may be shared with another
    evaluator of the same run. ``on_evaluation`` hears of each; ``before_each`` is called before
    each inference, and may raise to end the work; ``on_inference`` hears after each on how many, of
    the samples that were asked about together, the plan in work was run.
    """

    def __init__(
        self,
        runner: Runner,
        given: Sequence[Sample],
        references: References,
        requirements: Requirements,
        cache: Cache,
        run_key: str,
        error_sample: Callable[[Sample], ErrorSample] | None,
        workers: int = 1,
        log: list[Evaluation] | None = None,
        at_once: int = 16,
        share: float = 1.0,
    ) -> None:
        self.runner = runner
        self.requirements = requirements
        self.workers = workers
        self.done: dict[PrecisionPlan, Evaluation] = {}
        self.new_evaluations = 0
        self.plans: set[PrecisionPlan] = set()
        self.log: list[Evaluation] = [] if log is None else log
        self._search_sets = SearchSetLog(
            self.log, runner.name, lambda result: self.on_evaluation(result)
        )
        self.on_evaluation: Callable[[Evaluation], None] = lambda _: None
        self.before_each: Callable[[], None] = lambda: None
        self.on_inference: Callable[[int, int], None] = lambda done, of: None
        self._given = list(given)
        self._at_once = at_once
        self._error_sample = error_sample
        self._cache = cache
        waits = runner.timeout_s if isinstance(runner, Patient) else None
        key = content_key(run_key, runner.name, dict(runner.versions))
        self._answers = Answers(cache, key, math.inf if waits is None else waits)
        self._execution = Execution(
            runner, references, requirements, self._answers, share, lambda: self.before_each()
        )
        self._lock = RLock()
        self._sets = Sets(
            self._execution, self._answers, self._lock, lambda *told: self.on_inference(*told)
        )

    def key(self, *parts: str) -> str:
        """The cache's key of an answer of this runner on this model and these requirements."""
        return self._answers.key(*parts)

    def known(self, plan: PrecisionPlan, sample: Sample) -> SampleResult | None:
        """What ``plan`` showed on ``sample``; None if it was not run."""
        return self._answers.of(plan, sample)

    def knows(self, plan: PrecisionPlan) -> bool:
        """Whether ``plan`` was run on all given samples."""
        given = {s.digest for s in self._given}
        with self._lock:
            return plan in self.done or len(self._recall(plan)) == len(given)

    def evaluate(self, plan: PrecisionPlan) -> Evaluation:
        """The result of ``plan`` on the given samples, from this run, the cache, or a new
        execution.
        """
        return self.evaluate_many([plan])[0]

    def evaluate_many(self, plans: Sequence[PrecisionPlan]) -> list[Evaluation]:
        """The results of several plans; new ones run on ``workers`` threads.

        May be called from several threads at a time: the one cache is written under a lock.
        """
        missing = []
        with self._lock:
            for plan in dict.fromkeys(plans):
                if plan in self.done:
                    continue
                known = self._recall(plan)
                if len(known) == len({s.digest for s in self._given}):
                    self._note(self._together(plan, known))
                else:
                    missing.append((plan, known))
        for plan, known in self._complete_all(missing):
            with self._lock:
                self.new_evaluations += plan not in self.plans
                self._note(self._together(plan, known))
        return [self.done[plan] for plan in plans]

    def vector(self, plan: PrecisionPlan) -> Vector | None:
        """As :meth:`Answers.vector`, on the given samples."""
        return self._answers.vector(plan, self._given)

    def judge(
        self,
        plan: PrecisionPlan,
        search_set: Iterable[Sample],
        *,
        limit: float = math.inf,
        misses: int = 0,
        size: int = 1,
    ) -> SearchSetResult:
        """The result of ``plan`` on other samples than the given ones; each answer is kept.

        May be called from several threads.

        Args: plan: what to run. search_set: the samples in order; may be a generator, of which a
            few are in memory at a time. limit: if it is finite, the run ends once more than
            ``misses`` samples are no clear pass within so many tolerances. misses: how many may
            miss it. size: how many samples make a set that is judged together.
        """
        names: list[str] = []
        results: list[SampleResult] = []
        new = missed = 0
        for chunk in _chunks(search_set, -(-self._at_once // size) * size):
            rows: list[Row] = []
            try:
                for name, found in self._sets.judged(plan, chunk, size, rows):
                    names.append(name)
                    results.append(found)
                    missed += not meets(found, limit)
                    if missed > misses and math.isfinite(limit):
                        break
            finally:
                new += len(rows)
                self._record(rows)
            if missed > misses and math.isfinite(limit):
                break
        answer = SearchSetResult(plan, tuple(names), tuple(results))
        with self._lock:
            self.new_evaluations += new > 0 and plan not in self.plans
            self.plans.add(plan)
            return replace(answer, logged=self._search_sets.entry(answer))

    def _prepare(self, samples: Sequence[Sample]) -> None:
        """What executions on ``samples`` need, made once and not by two threads."""
        with self._lock:
            self._execution.references.prepare(samples, self.before_each)
            if self._error_sample is not None:
                for sample in samples:
                    self.before_each()
                    self._error_sample(sample)

    def _complete_all(
        self, missing: Sequence[tuple[PrecisionPlan, dict[str, SampleResult]]]
    ) -> list[tuple[PrecisionPlan, dict[str, SampleResult]]]:
        if len(missing) > 1 and self.workers > 1:
            with ThreadPoolExecutor(self.workers) as pool:
                return list(pool.map(lambda m: self._complete(*m), missing))
        return [self._complete(*m) for m in missing]

    def _complete(
        self, plan: PrecisionPlan, known: dict[str, SampleResult]
    ) -> tuple[PrecisionPlan, dict[str, SampleResult]]:
        """Run the samples that ``known`` lacks and cache them: whoever ends it in the middle goes
        on there, but for metrics that see all of them.
        """
        wanted = [s for s in self._given if s.digest not in known]
        kept: dict[str, Arrays] | None = {} if self.requirements.collective else None
        prepare: Callable[[Sequence[Sample]], None] | None = self._prepare
        if isinstance(self.runner, Restartable):
            # Its next call may be another worker's, which builds the engine again: there is one.
            self._prepare(wanted)
            prepare = None
        found: list[SampleResult] = []
        rows: list[Row] = []
        try:
            for result in self._execution.run(plan, wanted, self._error_sample, kept, prepare):
                rows.append(self._answers.row(plan, wanted[len(found)], result))
                found.append(result)
                if len(rows) >= _RECORDED:
                    self._record(rows, plan)
                    rows = []
                self.on_inference(len(found), len(wanted))
            if kept is not None:
                rows += self._execution.score(plan, self._given, found, None, kept)[1]
        finally:
            self._record(rows, plan)
        results = {s.digest: r for s, r in zip(wanted, found, strict=True)}
        return plan, {**known, **results}

    def _record(self, rows: Sequence[Row], plan: PrecisionPlan | None = None) -> None:
        """Write ``rows``, and with those of ``plan`` what its runner adds: who has the one has the
        other.
        """
        facts = dict(self.runner.facts(plan)) if plan is not None and rows else {}
        more = [self._answers.row_of_facts(plan, facts)] if plan is not None and facts else []
        with self._lock:
            self._cache.record([*rows, *more])

    def _together(self, plan: PrecisionPlan, known: Mapping[str, SampleResult]) -> Evaluation:
        facts = self.runner.facts(plan) or self._answers.facts(plan)
        results = [known[s.digest] for s in self._given]
        score: float | None = None
        told: tuple[float, ...] = ()
        if self.requirements.of_sets or self._execution.share < 1.0:
            told = tuple(self._answers.of_all(plan, self._given) or ())
            score = self._execution.score(plan, self._given, results, told, {})[0]
        values = self._execution.values_of(results)
        each = self.requirements.by_condition(values, self._execution.share, told)
        names = [s.name for s in self._given]
        found = Evaluation.over(plan, self.runner.name, results, facts, score=score, names=names)
        found, seen = replace(found, by_condition=each), found.reproducibility
        if seen is None or (score is None and seen.reproducible):
            return found
        best = [r.best_values or v for r, v in zip(results, values, strict=True)]
        by_best = self._answers.of_all(plan, self._given, best=True) or told
        least = self.requirements.together(best, self._execution.share, by_best)
        if score is not None:  # where each must hold, the samples' own scores tell
            seen = seen.of_set(least, found.score)
        return replace(found, best_score=least, reproducibility=seen)

    def _note(self, result: Evaluation) -> None:
        self.done[result.plan] = result
        self.plans.add(result.plan)
        self.log.append(result)
        self.on_evaluation(result)

    def _recall(self, plan: PrecisionPlan) -> dict[str, SampleResult]:
        """What the cache knows of ``plan``, by the given samples' digests."""
        if self.requirements.collective and self._answers.of_all(plan, self._given) is None:
            return {}
        found = {s.digest: self._answers.of(plan, s) for s in self._given}
        wanted = self._error_sample is not None
        usable = {
            digest: result
            for digest, result in found.items()
            if result is not None
            and not (wanted and result.errors and result.vector is None)  # asked on a search set
        }
        # A metric of all inputs needs the outputs of all of them.
        return {} if self.requirements.collective and len(usable) < len(found) else usable


def _chunks(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    stream = iter(samples)
    while chunk := list(islice(stream, size)):
        yield chunk
