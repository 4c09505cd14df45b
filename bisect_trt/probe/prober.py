"""A probe: one plan executed, compared with the reference, judged, and written to the journal.

The prober is the only place that runs plans. It keeps an answer for each plan and sample, recalls
what the journal has, and computes a reference only when a new answer needs it, so that a repeated
command makes no inference at all and one more sample does not forget the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from threading import RLock

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.requirements.error_sample import ErrorSample
from bisect_trt.numerics.requirements.requirements import Requirements
from bisect_trt.probe.answers import Answers
from bisect_trt.probe.execution import Execution
from bisect_trt.probe.journal import Journal, Row, content_key
from bisect_trt.probe.panel_log import PanelLog
from bisect_trt.probe.references import References
from bisect_trt.probe.result import PanelResult, ProbeResult, SampleResult, Vector, meets
from bisect_trt.probe.sets import Sets
from bisect_trt.runners.base import Anticipating, Patient, Runner

_RECORDED = 64
"""New answers of one probe that a killed process may lose."""


class Prober:
    """Runs plans on one runner and judges them.

    ``done`` holds this run's probes of the given samples by plan, ``plans`` every plan that was
    asked about; ``log`` lists the probes in order, and may be shared with another prober of the
    same run. ``on_probe`` hears of each; ``before_each`` is called before each inference, and may
    raise to end the work; ``on_inference`` hears after each on how many, of the samples that were
    asked about together, the plan in work was run.

    Args:
        runner: what executes the plans.
        given: the samples of :meth:`probe`.
        references: what the outputs are held against.
        requirements: the judge.
        journal: where answers are kept.
        run_key: the content that every answer depends on, samples apart.
        error_sample: the elements of a sample whose signed errors are kept with each answer on the
            given samples; None where nobody needs them.
        workers: probes at a time.
        log: shared with the run's other probers.
        at_once: how many samples of a panel are handed to the runner at a time.
        share: of the given samples that must meet the requirements.
    """

    def __init__(
        self,
        runner: Runner,
        given: Sequence[Sample],
        references: References,
        requirements: Requirements,
        journal: Journal,
        run_key: str,
        error_sample: Callable[[Sample], ErrorSample] | None,
        workers: int = 1,
        log: list[ProbeResult] | None = None,
        at_once: int = 16,
        share: float = 1.0,
    ) -> None:
        self.runner = runner
        self.requirements = requirements
        self.workers = workers
        self.done: dict[PrecisionPlan, ProbeResult] = {}
        self.new_probes = 0
        self.plans: set[PrecisionPlan] = set()
        self.log: list[ProbeResult] = [] if log is None else log
        self._panels = PanelLog(self.log, runner.name, lambda result: self.on_probe(result))
        self.on_probe: Callable[[ProbeResult], None] = lambda _: None
        self.before_each: Callable[[], None] = lambda: None
        self.on_inference: Callable[[int, int], None] = lambda done, of: None
        self._given = list(given)
        self._at_once = at_once
        self._error_sample = error_sample
        self._journal = journal
        waits = runner.timeout_s if isinstance(runner, Patient) else None
        key = content_key(run_key, runner.name, dict(runner.versions))
        self._answers = Answers(journal, key, math.inf if waits is None else waits)
        self._execution = Execution(
            runner, references, requirements, self._answers, share, lambda: self.before_each()
        )
        self._lock = RLock()
        self._sets = Sets(
            self._execution, self._answers, self._lock, lambda *told: self.on_inference(*told)
        )

    def key(self, *parts: str) -> str:
        """The journal's key of an answer of this runner on this model and these requirements."""
        return self._answers.key(*parts)

    def known(self, plan: PrecisionPlan, sample: Sample) -> SampleResult | None:
        """What ``plan`` showed on ``sample``; None if it was not run."""
        return self._answers.of(plan, sample)

    def knows(self, plan: PrecisionPlan) -> bool:
        """Whether ``plan`` was run on all given samples."""
        given = {s.digest for s in self._given}
        with self._lock:
            return plan in self.done or len(self._recall(plan)) == len(given)

    def probe(self, plan: PrecisionPlan) -> ProbeResult:
        """The result of ``plan`` on the given samples, from this run, the journal, or a new
        execution.
        """
        return self.probe_many([plan])[0]

    def probe_many(self, plans: Sequence[PrecisionPlan]) -> list[ProbeResult]:
        """The results of several plans; new ones run on ``workers`` threads.

        May be called from several threads at a time: the one journal is written under a lock.
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
                self.new_probes += plan not in self.plans
                self._note(self._together(plan, known))
        return [self.done[plan] for plan in plans]

    def vector(self, plan: PrecisionPlan) -> Vector | None:
        """As :meth:`Answers.vector`, on the given samples."""
        return self._answers.vector(plan, self._given)

    def judge(
        self,
        plan: PrecisionPlan,
        panel: Iterable[Sample],
        *,
        limit: float = math.inf,
        misses: int = 0,
        size: int = 1,
    ) -> PanelResult:
        """The result of ``plan`` on other samples than the given ones; each answer is kept.

        May be called from several threads.

        Args:
            plan: what to run.
            panel: the samples in order; may be a generator, of which a few are in memory at a time.
            limit: if it is finite, the run ends once more than ``misses`` samples are no clear pass
                within so many tolerances.
            misses: how many may miss it.
            size: how many samples make a set that is judged together.

        Returns:
            The results in the panel's order, a sample or a set each, as far as it was run.
        """
        names: list[str] = []
        results: list[SampleResult] = []
        new = missed = 0
        for chunk in _chunks(panel, -(-self._at_once // size) * size):
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
        answer = PanelResult(plan, tuple(names), tuple(results))
        with self._lock:
            self.new_probes += new > 0 and plan not in self.plans
            self.plans.add(plan)
            return replace(answer, logged=self._panels.entry(answer))

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
        """Run the samples that ``known`` lacks and journal them: whoever ends it in the middle goes
        on there, but for metrics that see all of them.
        """
        wanted = [s for s in self._given if s.digest not in known]
        kept: dict[str, Arrays] | None = {} if self.requirements.collective else None
        prepare: Callable[[Sequence[Sample]], None] | None = self._prepare
        if isinstance(self.runner, Anticipating):
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
            self._journal.record([*rows, *more])

    def _together(self, plan: PrecisionPlan, known: Mapping[str, SampleResult]) -> ProbeResult:
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
        found = ProbeResult.over(plan, self.runner.name, results, facts, score=score, names=names)
        found, seen = replace(found, by_condition=each), found.steadiness
        if seen is None or (score is None and seen.steady):
            return found
        best = [r.best_values or v for r, v in zip(results, values, strict=True)]
        by_best = self._answers.of_all(plan, self._given, best=True) or told
        least = self.requirements.together(best, self._execution.share, by_best)
        if score is not None:  # where each must hold, the samples' own scores tell
            seen = seen.of_set(least, found.score)
        return replace(found, best_score=least, steadiness=seen)

    def _note(self, result: ProbeResult) -> None:
        self.done[result.plan] = result
        self.plans.add(result.plan)
        self.log.append(result)
        self.on_probe(result)

    def _recall(self, plan: PrecisionPlan) -> dict[str, SampleResult]:
        """What the journal knows of ``plan``, by the given samples' digests."""
        if self.requirements.collective and self._answers.of_all(plan, self._given) is None:
            return {}
        found = {s.digest: self._answers.of(plan, s) for s in self._given}
        wanted = self._error_sample is not None
        usable = {
            digest: result
            for digest, result in found.items()
            if result is not None
            and not (wanted and result.errors and result.vector is None)  # asked on a panel
        }
        # A metric of all inputs needs the outputs of all of them.
        return {} if self.requirements.collective and len(usable) < len(found) else usable


def _chunks(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    stream = iter(samples)
    while chunk := list(islice(stream, size)):
        yield chunk
