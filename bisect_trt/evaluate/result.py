"""The result of a plan on one sample, on several, and on a search set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.outcomes import InputKind, Reproducibility, Verdict, together
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.metrics.errors import SHAPE_CHANGED, TensorError, mean_of, worst_of
from bisect_trt.metrics.requirements import Judged

Vector = NDArray[np.float32]
SEARCH_SET = "search_set"


@dataclass(frozen=True)
class SampleResult:
    """One plan on one sample; of several runs the worst.

    ``score`` is in tolerances: at most 1 passes, infinite is not finite or not run. ``values`` are
    the conditions' in their metrics' units and ``errors`` the outputs'; both are empty where the
    plan could not be run. ``vector`` holds the signed errors at the sampled elements, in
    tolerances. ``reproducibility`` says how several runs differ, and ``best_values`` are the best
    run's where another was worse.
    """

    verdict: Verdict
    score: float
    values: tuple[float, ...]
    errors: Mapping[str, TensorError]
    seconds: float = 0.0
    note: str = ""
    vector: Vector | None = None
    reproducibility: Reproducibility | None = None
    best_values: tuple[float, ...] = ()

    @staticmethod
    def of(judged: Judged, vector: Vector | None = None) -> SampleResult:
        """The result of a run that ended, with the verdict that follows from its errors."""
        verdict, note = (Verdict.PASS if judged.score <= 1.0 else Verdict.FAIL), ""
        changed = [name for name, e in judged.errors.items() if e.nonfinite == SHAPE_CHANGED]
        if changed:
            note = f"the shape of output {changed[0]!r} changed"
        elif not all(e.finite for e in judged.errors.values()):
            verdict = Verdict.NON_FINITE
        return SampleResult(
            verdict, judged.score, judged.values, judged.errors, note=note, vector=vector
        )

    @staticmethod
    def together(samples: Sequence[SampleResult], score: float) -> SampleResult:
        """Several samples as one, ``score`` that of all of them; without errors of its own."""
        worst = max(samples, key=_badness)
        seconds = sum(s.seconds for s in samples)
        verdict = verdict_of(score, worst.verdict)
        seen = reproducibility_of(samples)
        return SampleResult(
            verdict, score, (), worst.errors, seconds, worst.note, reproducibility=seen
        )


def _badness(sample: SampleResult) -> tuple[float, bool]:
    return sample.score, sample.verdict is Verdict.NON_FINITE


def reproducibility_of(samples: Sequence[SampleResult]) -> Reproducibility | None:
    """The reproducibility of several samples together; None where each was run once."""
    found = [s.reproducibility for s in samples if s.reproducibility is not None]
    return together(found) if found else None


def verdict_of(score: float, worst: Verdict) -> Verdict:
    """The verdict of several samples together: a worst one that is spared does not count."""
    if score <= 1.0:
        return Verdict.PASS
    return Verdict.FAIL if worst is Verdict.PASS else worst


@dataclass(frozen=True)
class Evaluation:
    """One plan over several samples; ``score`` is that of all together.

    ``worst`` and ``mean`` give each output's errors over the samples, empty where the plan could
    not be run; ``facts`` is what the runner adds. ``on`` says on which samples: the given ones, or
    a search set. ``best_score`` is the score by each sample's best run, where some run was worse.
    ``by_condition`` has each condition's score on the given samples. ``worst_on`` names the sample
    that has ``score``, if one does. ``seen_in`` is the log's entry that this was made from.
    """

    plan: PrecisionPlan
    runner: str
    verdict: Verdict
    score: float
    worst: Mapping[str, TensorError]
    mean: Mapping[str, TensorError]
    seconds: float
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    on: str = InputKind.GIVEN
    reproducibility: Reproducibility | None = None
    by_condition: tuple[float, ...] = ()
    worst_on: str = ""
    seen_in: Evaluation | None = field(default=None, compare=False, repr=False)
    best_score: float | None = None

    @property
    def on_given(self) -> bool:
        """Whether it was run on the given inputs, not on a search set."""
        return self.on == InputKind.GIVEN

    @staticmethod
    def over(
        plan: PrecisionPlan,
        runner: str,
        samples: Sequence[SampleResult],
        *,
        on: str = InputKind.GIVEN,
        score: float | None = None,
        names: Sequence[str] = (),
    ) -> Evaluation:
        """The results of one plan on ``samples`` (one at least) taken together."""
        seconds = sum(s.seconds for s in samples)
        # Values that are not finite are worse than any finite error, whatever came first.
        worst = max(samples, key=_badness)
        told = worst.score if score is None else score  # that of a set is no sample's
        worst_on = next((n for n, s in zip(names, samples, strict=False) if s.score == told), "")
        broken = next((s for s in samples if not s.errors), None)
        if broken is not None and score is not None and math.isfinite(score):
            samples, broken = [s for s in samples if s.errors], None  # spared
        if broken is not None:
            verdict, score, note = broken.verdict, math.inf, broken.note
            return Evaluation(
                plan, runner, verdict, score, {}, {}, seconds, note, on=on, worst_on=worst_on
            )
        worst = max(samples, key=_badness)  # none that was spared
        outputs = list(samples[0].errors)
        return Evaluation(
            plan,
            runner,
            worst.verdict if score is None else verdict_of(score, worst.verdict),
            worst.score if score is None else score,
            {name: worst_of([s.errors[name] for s in samples]) for name in outputs},
            {name: mean_of([s.errors[name] for s in samples]) for name in outputs},
            seconds,
            worst.note,
            on=on,
            reproducibility=reproducibility_of(samples),
            worst_on=worst_on,
        )

    def under(self, limit: float) -> Evaluation:
        """The same outcome judged against ``limit`` times the tolerance."""
        if limit == 1.0:
            return self
        score = self.score / limit
        verdict = self.verdict
        if verdict in (Verdict.PASS, Verdict.FAIL):
            verdict = Verdict.PASS if score <= 1.0 else Verdict.FAIL
        return replace(self, score=score, verdict=verdict, seen_in=self.seen_in or self)


@dataclass(frozen=True)
class SearchSetResult:
    """One plan on a search set of samples, as far as it was run.

    ``names`` and ``results`` go together, in the order of running; where a condition is on sets of
    inputs, each entry is a set. ``logged`` is the log's entry of it, if it has one.
    """

    plan: PrecisionPlan
    names: tuple[str, ...]
    results: tuple[SampleResult, ...]
    logged: Evaluation | None = None

    def passed(self, limit: float = 1.0) -> int:
        """How many of the samples met ``limit`` times the tolerance."""
        return sum(meets(result, limit) for result in self.results)

    def missed(self, limit: float = 1.0) -> int:
        """How many did not."""
        return len(self.results) - self.passed(limit)

    def score(self, misses: int = 0) -> float:
        """The largest score but for ``misses`` samples; 0 where none was run beyond them."""
        scores = sorted((r.score for r in self.results), reverse=True)
        return scores[misses] if len(scores) > misses else 0.0

    @property
    def worst(self) -> tuple[str, float]:
        """The sample with the largest score, and that; ("", NaN) where none was run."""
        pairs = zip(self.names, (r.score for r in self.results), strict=True)
        return max(pairs, key=lambda pair: pair[1], default=("", math.nan))


def meets(result: SampleResult, limit: float) -> bool:
    """Whether a sample is a clear pass within ``limit`` times the tolerance."""
    finished = result.verdict in (Verdict.PASS, Verdict.FAIL)
    return finished and result.score <= limit
