"""A probe: one plan executed, compared with the reference, judged, and written to the journal.

The prober is the only place that runs plans. It answers from the journal where it can, and computes
the reference only when a new probe needs it, so that a repeated command makes no inference at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError, one_line
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.verdict import Verdict
from bisect_trt.numerics.error_sample import ErrorSampler
from bisect_trt.numerics.requirements import Requirements
from bisect_trt.numerics.tensor_error import (
    SHAPE_CHANGED,
    TensorError,
    mean_of,
    tensor_error,
    worst_of,
)
from bisect_trt.probe.journal import RunFolder, content_key
from bisect_trt.runners.base import Runner

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class ProbeResult:
    """What one plan showed. ``score`` is in multiples of the tolerance (at most 1 passes, inf is
    not finite).

    ``worst`` and ``mean`` give each output's errors over the samples; ``vector`` the sampled signed
    errors, in tolerances, if the prober had a sampler; ``seconds`` the wall time of the probe;
    ``facts`` what the runner adds.
    """

    plan: PrecisionPlan
    runner: str
    verdict: Verdict
    score: float
    worst: Mapping[str, TensorError]
    mean: Mapping[str, TensorError]
    seconds: float
    note: str = ""
    vector: NDArray[np.float32] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def under(self, limit: float) -> ProbeResult:
        """The same outcome judged against ``limit`` times the tolerance."""
        if limit == 1.0:
            return self
        score = self.score / limit
        verdict = self.verdict
        if verdict in (Verdict.PASS, Verdict.FAIL):
            verdict = Verdict.PASS if score <= 1.0 else Verdict.FAIL
        return replace(
            self,
            score=score,
            verdict=verdict,
            vector=None if self.vector is None else self.vector / np.float32(limit),
        )


class Prober:
    """Runs plans on one runner and judges them by ``requirements``; ``done`` holds this run's
    probes.

    ``log`` lists them in order, and may be shared with another prober of the same run.
    """

    def __init__(
        self,
        runner: Runner,
        references: Callable[[], Sequence[Arrays]],
        requirements: Requirements,
        folder: RunFolder,
        run_key: str,
        workers: int = 1,
        log: list[ProbeResult] | None = None,
    ) -> None:
        self.runner = runner
        self.requirements = requirements
        self.make_sampler: Callable[[], ErrorSampler | None] | None = None
        self.done: dict[PrecisionPlan, ProbeResult] = {}
        self.new_probes = 0
        self.log: list[ProbeResult] = [] if log is None else log
        self.on_probe: Callable[[ProbeResult], None] = lambda _: None
        self._references = references
        self._folder = folder
        self._key = content_key(run_key, runner.name, dict(runner.versions))
        self.workers = workers
        self._lock = RLock()

    def key(self, *parts: str) -> str:
        """The journal's key of an answer of this runner on this model, inputs and requirements."""
        return content_key(self._key, *parts)

    @cached_property
    def sampler(self) -> ErrorSampler | None:
        """What reduces a probe's outputs to a vector, made when the first new probe needs it."""
        return self.make_sampler() if self.make_sampler is not None else None

    def probe(self, plan: PrecisionPlan) -> ProbeResult:
        """The result of ``plan``, from this run, the journal, or a new execution."""
        return self.probe_many([plan])[0]

    def probe_many(self, plans: Sequence[PrecisionPlan]) -> list[ProbeResult]:
        """The results of several plans; new ones run on ``workers`` threads, results are journalled
        in order.

        May be called from several threads at a time: the one journal is written under a lock.
        """
        missing = []
        with self._lock:
            for plan in dict.fromkeys(plans):
                if plan not in self.done:
                    recalled = self._recall(plan)
                    if recalled is None:
                        missing.append(plan)
                    else:
                        self._note(recalled)
            if missing:
                self._prepare()
        for result in self._execute_all(missing):
            with self._lock:
                self._record(result)
                self.new_probes += 1
                self._note(result)
        return [self.done[plan] for plan in plans]

    def _prepare(self) -> None:
        """What every execution needs, made once and not by two threads."""
        self._references()
        if self.make_sampler is not None:
            _ = self.sampler

    def _execute_all(self, plans: Sequence[PrecisionPlan]) -> list[ProbeResult]:
        if len(plans) > 1 and self.workers > 1:
            with ThreadPoolExecutor(self.workers) as pool:
                return list(pool.map(self._execute, plans))
        return [self._execute(plan) for plan in plans]

    def _execute(self, plan: PrecisionPlan) -> ProbeResult:
        references = self._references()
        began = time.perf_counter()
        errors: dict[str, list[TensorError]] = {}
        score, vectors = 0.0, []
        try:
            for number, outputs in enumerate(self.runner.outputs(plan)):
                reference = references[number]
                for name in reference:
                    errors.setdefault(name, []).append(tensor_error(reference[name], outputs[name]))
                score = max(score, self.requirements.score(reference, outputs))
                if self.make_sampler is not None and self.sampler is not None:
                    vectors.append(self.sampler.errors(number, outputs))
        except RunnerFailedError as error:
            note = (
                one_line(error) if not error.log else f"{one_line(error)} | {' | '.join(error.log)}"
            )
            spent = time.perf_counter() - began
            return ProbeResult(plan, self.runner.name, error.verdict, math.inf, {}, {}, spent, note)
        seconds = time.perf_counter() - began
        worst = {name: worst_of(e) for name, e in errors.items()}
        mean = {name: mean_of(e) for name, e in errors.items()}
        verdict, note = (Verdict.PASS if score <= 1.0 else Verdict.FAIL), ""
        changed = [name for name, e in worst.items() if e.nonfinite == SHAPE_CHANGED]
        if changed:
            note = f"the shape of output {changed[0]!r} changed"
        elif not all(e.finite for e in worst.values()):
            verdict = Verdict.NON_FINITE
        vector = np.concatenate(vectors) if vectors else None
        facts = self.runner.facts(plan)
        return ProbeResult(
            plan, self.runner.name, verdict, score, worst, mean, seconds, note, vector, facts
        )

    def _note(self, result: ProbeResult) -> None:
        self.done[result.plan] = result
        self.log.append(result)
        self.on_probe(result)

    def _record(self, result: ProbeResult) -> None:
        meta = {
            "verdict": result.verdict.value,
            "score": result.score,
            "seconds": result.seconds,
            "note": result.note,
            "worst": {n: vars(e) for n, e in result.worst.items()},
            "mean": {n: vars(e) for n, e in result.mean.items()},
            "facts": dict(result.facts),
        }
        payload = b"" if result.vector is None else result.vector.tobytes()
        self._folder.record(self.key("probe", result.plan.to_json()), "probe", meta, payload)

    def _recall(self, plan: PrecisionPlan) -> ProbeResult | None:
        found = self._folder.recall(self.key("probe", plan.to_json()))
        if found is None:
            return None
        meta, payload = found
        vector = np.frombuffer(payload, np.float32) if payload else None
        return ProbeResult(
            plan,
            self.runner.name,
            Verdict(meta["verdict"]),
            meta["score"],
            {n: TensorError(**e) for n, e in meta["worst"].items()},
            {n: TensorError(**e) for n, e in meta["mean"].items()},
            meta["seconds"],
            meta["note"],
            vector,
            meta["facts"],
        )
