"""The journal's rows of one runner on one model: what each plan showed on each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.core.steadiness import Steadiness
from bisect_trt.core.verdict import Verdict
from bisect_trt.numerics.errors.tensor_error import TensorError
from bisect_trt.probe.journal import Journal, Row, content_key
from bisect_trt.probe.result import SampleResult, Vector


class Answers:
    """Reads and makes rows of ``journal``; ``key`` is the content that all of them depend on. The
    runner waits ``patience`` seconds: what one that waited for less gave up is asked again.
    """

    def __init__(self, journal: Journal, key: str, patience: float = math.inf) -> None:
        self._journal = journal
        self._key = key
        self._patience = patience

    def key(self, *parts: str) -> str:
        """The key of one answer."""
        return content_key(self._key, *parts)

    def of(self, plan: PrecisionPlan, sample: Sample) -> SampleResult | None:
        """What ``plan`` showed on ``sample``; None if it was not run."""
        found = self._journal.recall(self._sample_key(plan, sample))
        if found is None:
            return None
        meta, payload = found
        verdict = Verdict(meta["verdict"])
        if verdict is Verdict.TIMED_OUT and self._patience > meta.get("patience", 0.0):
            return None
        return SampleResult(
            verdict,
            meta["score"],
            tuple(meta["values"]),
            {n: TensorError(**e) for n, e in meta["errors"].items()},
            meta["seconds"],
            meta["note"],
            np.frombuffer(payload, np.float32) if payload else None,
            Steadiness(**meta["steadiness"]) if meta.get("steadiness") else None,
            tuple(meta.get("best_values", ())),
        )

    def vector(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Vector | None:
        """The signed errors of ``plan`` at the sampled elements of ``samples``, one sample after
        the other, in tolerances; None where it was not run, could not be, or nobody needs them.

        They are read when they are asked for: those of a thousand plans are 16 MB a sample.

        Args:
            plan: what was run.
            samples: on which samples.
        """
        found = [self.of(plan, sample) for sample in samples]
        vectors = [r.vector for r in found if r is not None and r.vector is not None]
        return np.concatenate(vectors) if len(vectors) == len(found) else None

    def row(self, plan: PrecisionPlan, sample: Sample, result: SampleResult) -> Row:
        """The row that :meth:`of` reads.

        Args:
            plan: what was run.
            sample: on which sample.
            result: what it showed.
        """
        meta: dict[str, Any] = {
            "verdict": result.verdict.value,
            "score": result.score,
            "values": list(result.values),
            "seconds": result.seconds,
            "note": result.note,
            "errors": {n: vars(e) for n, e in result.errors.items()},
        }
        if result.verdict is Verdict.TIMED_OUT:
            meta["patience"] = self._patience
        if result.steadiness is not None:
            meta["steadiness"] = vars(result.steadiness)
        if result.best_values:
            meta["best_values"] = list(result.best_values)
        payload = b"" if result.vector is None else result.vector.tobytes()
        return Row(self._sample_key(plan, sample), "probe", meta, payload)

    def of_all(
        self, plan: PrecisionPlan, samples: Sequence[Sample], *, best: bool = False
    ) -> list[float] | None:
        """The values of the collective metrics on ``samples``; None if they were not asked for.

        Args:
            plan: what was run.
            samples: on which samples.
            best: by the best run of each, where some was worse, in place of the worst.
        """
        found = self._journal.recall(self._key_of_all(plan, samples, best=best))
        return None if found is None else [float(v) for v in found[0]]

    def row_of_all(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        values: Sequence[float],
        *,
        best: bool = False,
    ) -> Row:
        """The row that :meth:`of_all` reads.

        Args:
            plan: what was run.
            samples: on which samples, in this order.
            values: of the collective metrics.
            best: as there.
        """
        return Row(self._key_of_all(plan, samples, best=best), "together", list(values))

    def facts(self, plan: PrecisionPlan) -> dict[str, Any]:
        """What the runner added to ``plan``; empty where it adds nothing."""
        found = self._journal.recall(self.key("facts", plan.digest))
        return dict(found[0]) if found is not None else {}

    def row_of_facts(self, plan: PrecisionPlan, facts: dict[str, Any]) -> Row:
        """The row that :meth:`facts` reads."""
        return Row(self.key("facts", plan.digest), "facts", facts)

    def _sample_key(self, plan: PrecisionPlan, sample: Sample) -> str:
        return self.key("probe", plan.digest, sample.digest)

    def _key_of_all(self, plan: PrecisionPlan, samples: Sequence[Sample], *, best: bool) -> str:
        by = ["best runs"] if best else []
        return self.key("together", *by, plan.digest, *(s.digest for s in samples))
