"""Evaluates plans on inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    SEARCH_SET,
    Evaluation,
    SampleResult,
    SearchSetResult,
    Vector,
    meets,
)
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.error_sample import ErrorSample
from bisect_trt.metrics.errors import farthest_apart
from bisect_trt.metrics.requirements import Judged, Requirements
from bisect_trt.runners.base import Patient, Repeated, Restartable, Runner
from bisect_trt.runners.concurrency import side_by_side

_CHUNK_SAMPLES = 64
"""Samples that are prepared, run and written together: what an interrupted run may lose."""


@dataclass(frozen=True)
class Criteria:
    """What outputs are compared with, and what they must meet.

    ``share``: the share of several samples that must pass.
    ``error_sample``: gives the elements of a sample's outputs whose errors are kept, if any.
    """

    references: References
    requirements: Requirements
    share: float = 1.0
    error_sample: Callable[[Sample], ErrorSample] | None = None

    def score(self, results: Sequence[SampleResult], collective: Sequence[float]) -> float:
        """The score of several samples together."""
        return self.requirements.together(self.values_of(results), self.share, collective)

    def values_of(self, results: Sequence[SampleResult]) -> list[tuple[float, ...]]:
        """The values of the conditions by result, NaN where the plan could not be run."""
        broken = (math.nan,) * len(self.requirements.items)
        return [r.values or broken for r in results]

    def collective_values(
        self, samples: Sequence[Sample], results: Sequence[SampleResult], kept: dict[str, Arrays]
    ) -> list[float]:
        """The values of the metrics of all inputs; NaN if an output is missing or not finite."""
        # A user's metric need not handle NaN.
        if any(not r.errors or not all(e.finite for e in r.errors.values()) for r in results):
            items, collective = self.requirements.items, self.requirements.collective
            return [math.nan for item in items if item.metric in collective]
        references = [self.references.of(s) for s in samples]
        return self.requirements.judge_all(references, [kept[s.digest] for s in samples])


class Execution:
    """Runs plans on ``runner`` and judges the outputs; calls ``before_each`` inference."""

    def __init__(
        self, runner: Runner, criteria: Criteria, before_each: Callable[[], None] = lambda: None
    ) -> None:
        self._runner = runner
        self._criteria = criteria
        self._before_each = before_each

    def run(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        *,
        vectors: bool = False,
        kept: dict[str, Arrays] | None = None,
        prepare: Callable[[Sequence[Sample]], None] | None = None,
    ) -> Iterator[SampleResult]:
        """Each sample's result as it comes; after three failures the rest fail unexecuted.

        ``vectors``: keep signed errors. ``kept`` receives the outputs. ``prepare`` is called with
        each chunk of samples before it is run.
        """
        left, breaks, together = list(samples), 0, True
        while left:
            part, done = left if prepare is None else left[:_CHUNK_SAMPLES], 0
            part = part if together else part[:1]
            if prepare is not None:
                prepare(part)
            for result in self._until_broken(plan, part, vectors, kept):
                if not done and len(part) > 1 and result.verdict is Verdict.CRASHED:
                    together = False  # any of the samples may be to blame: run one by one
                    break
                done += 1
                yield result
            if not together and not done:
                continue
            left = left[done:]
            broken = done < len(part) or not result.errors
            # The next sample may pass, unless the plan cannot be built.
            breaks += broken
            if left and (breaks >= 3 or result.verdict is Verdict.BUILD_FAILED):
                yield from [result] * len(left)
                return

    def _until_broken(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        vectors: bool,
        kept: dict[str, Arrays] | None,
    ) -> Iterator[SampleResult]:
        """The samples' results up to and including the first on which the runner fails."""
        self._before_each()
        self._criteria.references.make_ready(samples, self._before_each)
        began, left = time.perf_counter(), len(samples)
        try:
            for sample, outputs in zip(samples, self._runner.outputs(plan, samples), strict=True):
                result, worst, best = self._judged(sample, outputs, vectors)
                spent = time.perf_counter() - began
                if kept is not None:
                    kept[sample.digest] = worst
                    if best is not None:
                        kept[_best_of(sample)] = best
                yield replace(result, seconds=spent)
                left -= 1
                if left:
                    self._before_each()
                began = time.perf_counter()
        except RunnerFailedError as failure:
            error = failure.blamed_on_model()
            self._reference(samples[-left])
            note = " | ".join([one_line(error), *error.log])
            spent = time.perf_counter() - began
            yield SampleResult(error.verdict, math.inf, (), {}, spent, note)

    def _reference(self, sample: Sample) -> Arrays:
        """The reference outputs; BadInputError if the original model cannot be run."""
        try:
            return self._criteria.references.of(sample)
        except RunnerFailedError as error:
            raise BadInputError(str(error)) from error

    def _judged(
        self, sample: Sample, outputs: Arrays, vectors: bool
    ) -> tuple[SampleResult, Arrays, Arrays | None]:
        """The result of the worst run, its outputs, and those of the best run if it differs."""
        exact, requirements = self._reference(sample), self._criteria.requirements
        others = outputs.others if isinstance(outputs, Repeated) else ()
        answers = [outputs, *(answer for answer, _ in others)]
        judged = [requirements.judge(exact, answer) for answer in answers]
        # By error where scores are equal: a metric of all inputs gives a single run no score.
        order = sorted(range(len(answers)), key=lambda i: (judged[i].score, _size(judged[i])))
        best, worst = order[0], order[-1]
        error_sample = self._criteria.error_sample if vectors else None
        vector = error_sample(sample).errors(answers[worst]) if error_sample is not None else None
        result = SampleResult.of(judged[worst], vector)
        if isinstance(outputs, Repeated):
            differing = sum(count for _, count in others)
            counts = [outputs.runs - differing, *(count for _, count in others)]
            passed = sum(n for n, one in zip(counts, judged, strict=True) if one.score <= 1.0)
            name, apart = farthest_apart(exact, answers)
            scores = judged[best].score, judged[worst].score
            reproducibility = Reproducibility(
                outputs.runs, differing, passed, *scores, apart, name, sample.name
            )
            result = replace(result, reproducibility=reproducibility)
        if best == worst:
            return result, answers[worst], None
        return replace(result, best_values=judged[best].values), answers[worst], answers[best]


def _best_of(sample: Sample) -> str:
    return f"{sample.digest} best"


def _size(judged: Judged) -> float:
    """The largest error of an output over its reference's range."""
    return max((e.rel_range for e in judged.errors.values()), default=0.0)


_SearchSetKey = tuple[PrecisionPlan, tuple[str, ...], tuple[float, ...]]


class Evaluator:
    """Evaluates plans on one runner, each once, with the help of the cache.

    ``done``: this run's evaluations on the given samples, by plan. ``plans``: all plans evaluated.
    ``log``: the evaluations in order; the evaluators of a run share it.
    ``on_evaluation``: called after each evaluation.
    ``before_each``: called before each inference; may raise to end the work.
    ``on_inference``: called after each inference with their number and the expected number.
    ``workers``: how many plans run at a time. ``at_once``: samples of a search set in one call.
    """

    def __init__(
        self,
        runner: Runner,
        given: Sequence[Sample],
        criteria: Criteria,
        cache: Cache,
        run_key: str,
        log: list[Evaluation] | None = None,
    ) -> None:
        self.runner = runner
        self.requirements = criteria.requirements
        self.workers = 1
        self.at_once = 16
        self.done: dict[PrecisionPlan, Evaluation] = {}
        self.new_evaluations = 0
        self.plans: set[PrecisionPlan] = set()
        self.log: list[Evaluation] = [] if log is None else log
        self.on_evaluation: Callable[[Evaluation], None] = lambda _: None
        self.before_each: Callable[[], None] = lambda: None
        self.on_inference: Callable[[int, int], None] = lambda done, of: None
        self._given = list(given)
        self._criteria = criteria
        self._cache = cache
        timeout_s = runner.timeout_s if isinstance(runner, Patient) else None
        key = content_key(run_key, runner.name, dict(runner.versions))
        self._answers = Answers(cache, key, math.inf if timeout_s is None else timeout_s)
        self._execution = Execution(runner, criteria, lambda: self.before_each())
        self._search_sets: dict[_SearchSetKey, Evaluation] = {}
        self._lock = RLock()

    def key(self, *parts: str) -> str:
        """The cache's key of an entry for this runner, model and requirements."""
        return self._answers.key(*parts)

    def known(self, plan: PrecisionPlan, sample: Sample) -> SampleResult | None:
        """The result of ``plan`` on ``sample``; None if it was not run."""
        return self._answers.of(plan, sample)

    def knows(self, plan: PrecisionPlan) -> bool:
        """Whether ``plan`` was run on all given samples."""
        with self._lock:
            return plan in self.done or len(self._recall(plan)) == len(self._given)

    def evaluate(self, plan: PrecisionPlan) -> Evaluation:
        """The result of ``plan`` on the given samples, from the cache or newly executed."""
        return self.evaluate_many([plan])[0]

    def evaluate_many(self, plans: Sequence[PrecisionPlan]) -> list[Evaluation]:
        """The results of several plans; new ones run on ``workers`` threads; thread-safe."""
        missing = []
        with self._lock:
            for plan in dict.fromkeys(plans):
                if plan in self.done:
                    continue
                results = self._recall(plan)
                if len(results) == len(self._given):
                    self._note(self._together(plan, results))
                else:
                    missing.append((plan, results))
        completed = side_by_side(lambda m: self._complete(*m), missing, lambda _: self.workers)
        for plan, results in completed:
            with self._lock:
                self.new_evaluations += plan not in self.plans
                self._note(self._together(plan, results))
        return [self.done[plan] for plan in plans]

    def vector(self, plan: PrecisionPlan) -> Vector | None:
        """The signed errors on the given samples, in tolerances; None if one has none."""
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
        """The result of ``plan`` on other samples than the given ones; thread-safe.

        With a finite ``limit`` it ends once more than ``misses`` samples score above it. ``size``
        samples are judged together.
        """
        names: list[str] = []
        results: list[SampleResult] = []
        new = missed = 0
        for chunk in _chunks(search_set, -(-self.at_once // size) * size):
            rows: list[Row] = []
            try:
                for name, result in self._judged_sets(plan, chunk, size, rows):
                    names.append(name)
                    results.append(result)
                    missed += not meets(result, limit)
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
            return replace(answer, logged=self._logged(answer))

    def _judged_sets(
        self, plan: PrecisionPlan, samples: Sequence[Sample], size: int, rows: list[Row]
    ) -> Iterator[tuple[str, SampleResult]]:
        """The name and result of each set of ``size`` samples as it comes; adds to ``rows``."""
        sets = [samples[i : i + size] for i in range(0, len(samples), size)]
        collective = bool(self.requirements.collective)
        with self._lock:
            by_digest = {s.digest: self._answers.of(plan, s) for s in samples}
            set_values = [self._answers.of_all(plan, of) if collective else [] for of in sets]
        for place, of in enumerate(sets):  # a set with a new sample is judged anew
            if collective and any(by_digest[s.digest] is None for s in of):
                set_values[place] = None
        # Copies may be equal, as rotations of a few token ids are: these are run once.
        new: dict[str, Sample] = {}
        for of, values in zip(sets, set_values, strict=True):
            for s in of:
                if values is None or by_digest[s.digest] is None:
                    new.setdefault(s.digest, s)
        kept: dict[str, Arrays] = {}
        expected = len(new)
        executed = self._execution.run(plan, list(new.values()), kept=kept if collective else None)
        for of, values in zip(sets, set_values, strict=True):
            results = []
            for sample in of:
                result = by_digest[sample.digest]
                is_new = values is None or result is None
                if is_new and new.pop(sample.digest, None) is not None:
                    by_digest[sample.digest] = result = next(executed)
                    rows.append(self._answers.row(plan, sample, result))
                    self.on_inference(expected - len(new), expected)
                assert result is not None
                results.append(result)
            if size == 1 and not collective:
                yield of[0].name, results[0]
                continue
            if values is None:
                values, more = self._collective(plan, of, results, kept)
                rows += more
            score = self._criteria.score(results, values)
            yield some_of([s.name for s in of], 1), SampleResult.together(results, score)

    def _collective(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        results: Sequence[SampleResult],
        kept: dict[str, Arrays],
    ) -> tuple[list[float], list[Row]]:
        """The values of the metrics of all inputs, and the rows to cache."""
        values = self._criteria.collective_values(samples, results, kept)
        rows = [self._answers.row_of_all(plan, samples, values)]
        if any(r.reproducibility is not None for r in results):
            bests = {s.digest: kept[_best_of(s)] for s in samples if _best_of(s) in kept}
            best = values
            if bests:
                best = self._criteria.collective_values(samples, results, {**kept, **bests})
            rows.append(self._answers.row_of_all(plan, samples, best, best=True))
        return values, rows

    def _logged(self, answer: SearchSetResult) -> Evaluation | None:
        """The log's entry of ``answer``, added if new; None if nothing was run."""
        if not answer.results:
            return None
        key = (answer.plan, answer.names, tuple(r.score for r in answer.results))
        if key not in self._search_sets:
            entry = Evaluation.over(answer.plan, self.runner.name, answer.results, on=SEARCH_SET)
            missed, of = answer.missed(), len(answer.results)
            note = entry.note or f"{missed} of {of} samples miss; worst {answer.worst[0]}"
            result = self._search_sets[key] = replace(entry, note=note)
            self.log.append(result)
            self.on_evaluation(result)
        return self._search_sets[key]

    def _prepare(self, samples: Sequence[Sample]) -> None:
        """Compute the references and error samples of ``samples``."""
        with self._lock:  # two threads must not compute the same
            self._criteria.references.prepare(samples, self.before_each)
            if self._criteria.error_sample is not None:
                for sample in samples:
                    self.before_each()
                    self._criteria.error_sample(sample)

    def _complete(
        self, plan: PrecisionPlan, cached: dict[str, SampleResult]
    ) -> tuple[PrecisionPlan, dict[str, SampleResult]]:
        """Run the samples that ``cached`` lacks; caches them even if interrupted."""
        wanted = [s for s in self._given if s.digest not in cached]
        kept: dict[str, Arrays] = {}
        collective = bool(self.requirements.collective)
        prepare: Callable[[Sequence[Sample]], None] | None = self._prepare
        if isinstance(self.runner, Restartable):
            # One call for all samples: the next may reach another worker, which builds again.
            self._prepare(wanted)
            prepare = None
        results: list[SampleResult] = []
        rows: list[Row] = []
        executed = self._execution.run(
            plan, wanted, vectors=True, kept=kept if collective else None, prepare=prepare
        )
        try:
            for result in executed:
                rows.append(self._answers.row(plan, wanted[len(results)], result))
                results.append(result)
                if len(rows) >= _CHUNK_SAMPLES:
                    self._record(rows, plan)
                    rows = []
                self.on_inference(len(results), len(wanted))
            if collective:
                rows += self._collective(plan, self._given, results, kept)[1]
        finally:
            self._record(rows, plan)
        new = {s.digest: r for s, r in zip(wanted, results, strict=True)}
        return plan, {**cached, **new}

    def _record(self, rows: Sequence[Row], plan: PrecisionPlan | None = None) -> None:
        """Write ``rows`` and the runner's facts about ``plan`` in one transaction."""
        facts = dict(self.runner.facts(plan)) if plan is not None and rows else {}
        more = [self._answers.row_of_facts(plan, facts)] if plan is not None and facts else []
        with self._lock:
            self._cache.record([*rows, *more])

    def _together(self, plan: PrecisionPlan, by_digest: Mapping[str, SampleResult]) -> Evaluation:
        criteria, requirements = self._criteria, self.requirements
        facts = self.runner.facts(plan) or self._answers.facts(plan)
        results = [by_digest[s.digest] for s in self._given]
        score: float | None = None
        collective: tuple[float, ...] = ()
        if requirements.of_sets or criteria.share < 1.0:
            collective = tuple(self._answers.of_all(plan, self._given) or ())
            score = criteria.score(results, collective)
        values = criteria.values_of(results)
        evaluation = Evaluation.over(
            plan, self.runner.name, results, score=score, names=[s.name for s in self._given]
        )
        by_condition = requirements.by_condition(values, criteria.share, collective)
        evaluation = replace(evaluation, facts=facts, by_condition=by_condition)
        reproducibility = evaluation.reproducibility
        if reproducibility is None or (score is None and reproducibility.reproducible):
            return evaluation
        best = [r.best_values or v for r, v in zip(results, values, strict=True)]
        best_collective = self._answers.of_all(plan, self._given, best=True) or collective
        best_score = requirements.together(best, criteria.share, best_collective)
        if score is not None:  # otherwise each sample has its own
            reproducibility = reproducibility.of_set(best_score, evaluation.score)
        return replace(evaluation, best_score=best_score, reproducibility=reproducibility)

    def _note(self, result: Evaluation) -> None:
        self.done[result.plan] = result
        self.plans.add(result.plan)
        self.log.append(result)
        self.on_evaluation(result)

    def _recall(self, plan: PrecisionPlan) -> dict[str, SampleResult]:
        """The cached results of ``plan`` by the digests of the given samples."""
        if self.requirements.collective and self._answers.of_all(plan, self._given) is None:
            return {}
        cached = {s.digest: self._answers.of(plan, s) for s in self._given}
        needs_vector = self._criteria.error_sample is not None
        usable = {
            digest: result
            for digest, result in cached.items()
            if result is not None
            # An evaluation on a search set has no vector.
            and not (needs_vector and result.errors and result.vector is None)
        }
        # A metric of all inputs needs the outputs of all of them.
        return {} if self.requirements.collective and len(usable) < len(cached) else usable


def _chunks(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    stream = iter(samples)
    while chunk := list(islice(stream, size)):
        yield chunk
