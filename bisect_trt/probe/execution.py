"""A plan executed and held against the reference: on one sample, and on several together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bisect_trt.core.errors import BadInputError, RunnerFailedError, one_line
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.core.steadiness import Steadiness
from bisect_trt.core.verdict import Verdict
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.errors.apart import farthest_apart
from bisect_trt.numerics.requirements.error_sample import ErrorSample
from bisect_trt.numerics.requirements.requirements import Judged, Requirements
from bisect_trt.probe.answers import Answers
from bisect_trt.probe.journal import Row
from bisect_trt.probe.references import References
from bisect_trt.probe.result import SampleResult
from bisect_trt.runners.base import Repeated, Runner

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
    steadiness: Steadiness | None = None
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

        Args:
            plan: what to run.
            samples: on which samples.
            error_sample: the elements whose signed errors are kept, if any.
            kept: where the outputs are put, by the sample's digest, if they are needed.
            prepare: called with some of the samples before they are run, which then are, together;
                None where all may be.
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
                yield SampleResult.of(runs.judged, spent, vector, runs.steadiness, runs.best_values)
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
        steadiness = Steadiness(
            outputs.runs, differing, passed, min(scores), scores[worst], apart, name, sample.name
        )
        chosen = _Runs(answers[worst][0], judged[worst], steadiness)
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
        """The score of ``samples`` together, and the rows to journal.

        Args:
            plan: what was run.
            samples: on which samples.
            results: of each.
            told: the collective metrics' values; None where they must be computed.
            kept: what they are then computed from: the outputs by the samples' digests.
        """
        rows = []
        if told is None:
            told = self._told(samples, results, kept)
            rows = [self._answers.row_of_all(plan, samples, told)]
            if any(r.steadiness is not None for r in results):  # in the place of earlier runs'
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
