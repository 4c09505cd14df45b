"""The result of a plan on one sample, on several, and on a search set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    """One plan on one sample; the worst of several runs.

    ``score``: in tolerances; infinite if not finite or not run.
    ``values``: by condition, in its metric's unit. ``errors``: by output. Empty if not run.
    ``note``: what went wrong, if anything.
    ``vector``: the signed errors at the sampled elements, in tolerances.
    ``reproducibility``: how several runs differ. ``best_values``: of the best run.
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
        """The result of a finished run, with the verdict that follows from its errors."""
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
        """Several samples as one, with their common ``score`` and the worst one's errors."""
        worst = max(samples, key=_badness)
        seconds = sum(s.seconds for s in samples)
        verdict = verdict_of(score, worst.verdict)
        common = reproducibility_of(samples)
        return SampleResult(
            verdict, score, (), worst.errors, seconds, worst.note, reproducibility=common
        )


def _badness(sample: SampleResult) -> tuple[float, bool]:
    # All are infinite: NaN and infinities come before plans that were not run.
    return sample.score, sample.verdict is Verdict.NON_FINITE


def reproducibility_of(samples: Sequence[SampleResult]) -> Reproducibility | None:
    """The reproducibility of several samples together; None if each was run once."""
    several = [s.reproducibility for s in samples if s.reproducibility is not None]
    return together(several) if several else None


def verdict_of(score: float, worst: Verdict) -> Verdict:
    """The verdict of several samples together; a few may miss."""
    if score <= 1.0:
        return Verdict.PASS
    return Verdict.FAIL if worst is Verdict.PASS else worst


@dataclass(frozen=True)
class Evaluation:
    """One plan over several samples; ``score`` is their common one.

    ``worst``, ``mean``: the errors over the samples by output; empty if the plan was not run.
    ``facts``: what the runner adds. ``on``: the kind of samples, or :data:`SEARCH_SET`.
    ``by_condition``: the score of each condition on the given samples.
    ``worst_on``: the sample that has ``score``, if one does.
    ``seen_in``: the log's entry that this was made from.
    ``best_score``: the score of each sample's best run, if runs differ.
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
        """Whether it is on the given inputs."""
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
        """The results of one plan on one or more ``samples`` taken together."""
        seconds = sum(s.seconds for s in samples)
        worst = max(samples, key=_badness)
        shown = worst.score if score is None else score
        # The score of a set need not be any sample's.
        worst_on = next((n for n, s in zip(names, samples, strict=False) if s.score == shown), "")
        broken = next((s for s in samples if not s.errors), None)
        if broken is not None and score is not None and math.isfinite(score):
            samples, broken = [s for s in samples if s.errors], None  # one that may miss
        if broken is not None:
            verdict, score, note = broken.verdict, math.inf, broken.note
            return Evaluation(
                plan, runner, verdict, score, {}, {}, seconds, note, on=on, worst_on=worst_on
            )
        worst = max(samples, key=_badness)  # without the broken ones
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
        """The same evaluation judged by ``limit`` times the tolerance."""
        if limit == 1.0:
            return self
        score = self.score / limit
        verdict = self.verdict
        if verdict in (Verdict.PASS, Verdict.FAIL):
            verdict = Verdict.PASS if score <= 1.0 else Verdict.FAIL
        return replace(self, score=score, verdict=verdict, seen_in=self.seen_in or self)


@dataclass(frozen=True)
class SearchSetResult:
    """One plan on a search set, as far as it was run.

    ``names``, ``results``: of each sample, or of each set if conditions are on sets, in order.
    ``logged``: the log's entry of it.
    """

    plan: PrecisionPlan
    names: tuple[str, ...]
    results: tuple[SampleResult, ...]
    logged: Evaluation | None = None

    def passed(self, limit: float = 1.0) -> int:
        """How many samples meet ``limit`` times the tolerance."""
        return sum(meets(result, limit) for result in self.results)

    def missed(self, limit: float = 1.0) -> int:
        """How many samples do not meet ``limit`` times the tolerance."""
        return len(self.results) - self.passed(limit)

    def score(self, misses: int = 0) -> float:
        """The largest score without the ``misses`` worst samples; 0 if none is left."""
        scores = sorted((r.score for r in self.results), reverse=True)
        return scores[misses] if len(scores) > misses else 0.0

    @property
    def worst(self) -> tuple[str, float]:
        """The sample with the largest score, and the score; ("", NaN) if none was run."""
        pairs = zip(self.names, (r.score for r in self.results), strict=True)
        return max(pairs, key=lambda pair: pair[1], default=("", math.nan))


def meets(result: SampleResult, limit: float) -> bool:
    """Whether a result is finite and within ``limit`` times the tolerance."""
    finished = result.verdict in (Verdict.PASS, Verdict.FAIL)
    return finished and result.score <= limit


def worst_judged(evaluations: Iterable[Evaluation]) -> Evaluation:
    """The evaluation of the judge that says worst of a plan."""
    return max(evaluations, key=lambda found: (not found.verdict.passed, found.score))
