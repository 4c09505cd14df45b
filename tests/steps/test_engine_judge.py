"""The engine's judge with an engine and an emulator made of numbers: how many builds it spends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.steps.confirm import EngineJudge

LAYERS = [f"l{i}" for i in range(10)]


@dataclass(frozen=True)
class Found:
    """Of a search."""

    pinned: frozenset[str]
    limit: float


@dataclass(frozen=True)
class Said:
    """By the engine."""

    plan: PrecisionPlan
    score: float

    @property
    def verdict(self) -> Verdict:
        return Verdict.PASS if self.score <= 1.0 else Verdict.FAIL


class Engine:
    """Scores a set by its size, and counts what it is asked."""

    workers = 1

    def __init__(self, scores: dict[int, float]) -> None:
        self._scores, self.built = scores, list[int]()

    def evaluate(self, plan: PrecisionPlan) -> Any:
        count = len(plan.pinned)
        self.built.append(count)
        return Said(plan, self._scores[count])


def emulated(pins: frozenset[str]) -> float:
    return 1.5 - 0.1 * len(pins)


def searched(limit: float) -> Any:
    count = next(n for n in range(len(LAYERS) + 1) if 1.5 - 0.1 * n <= limit + 1e-9)
    return Found(frozenset(LAYERS[:count]), limit)


@pytest.mark.parametrize("best", [0.55, 0.62, 0.9])
def test_no_set_is_built_beyond_what_the_engine_refused(best: float) -> None:
    """An engine at its floor says nothing of how much wider a search may be: of 944 layers the
    next set had one pin, and cost a build and 25 s.
    """
    engine = Engine({5: 1.3, 7: 1.05, 8: best, 2: 2.0, 3: 1.9, 4: 1.8, 6: 1.1})
    judge = EngineJudge(
        engine=engine,  # type: ignore[arg-type]
        base=PrecisionPlan(Precision.FP16),
        ranked=LAYERS,
        search=searched,
        score=emulated,
        floors=(0.6, 0.6),
    )
    judgement = judge.decide(1.0)
    assert judgement.passed and len(judgement.plan.pinned) == 8
    assert engine.built == [5, 7, 8], "no fewer than 7 pins after 7 were refused"
