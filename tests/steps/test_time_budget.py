"""``--budget``: a run ends in time with the best plan so far, tested, and says so."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bisect_trt
from bisect_trt import Result
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import BudgetSpentError, Observer, TimeBudget, TimedObserver
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.reduction.oracle import Budget
from bisect_trt.runners.emulator import EmulatedRunner
from fixtures.models import healthy, residual
from tests.command import run_of
from tests.copies import FEW
from tests.engines import Judged, Unsteady

FIXTURE = residual()


class Clock:
    """A clock that stands still until it is told to jump."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("bisect_trt.base.interrupt.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Watch(Observer):
    """Lets ``seconds`` pass after so many ``calls`` of progress in ``step``."""

    def __init__(self, clock: Clock, step: str, calls: int, seconds: float) -> None:
        self._clock, self._step, self._calls, self._seconds = clock, step, calls, seconds
        self._here = ""
        self.best_sets: list[int] = []

    def step(self, name: str) -> None:
        self._here = name

    def best(self, pins: int) -> None:
        self.best_sets.append(pins)

    def progress(self, done: int, expected: int, note: str) -> None:
        if self._here == self._step:
            self._calls -= 1
            if self._calls == 0:
                self._clock.now += self._seconds


def run(out: Path, observer: Observer, **options: Any) -> Result:
    return run_of(FIXTURE, out, observer=observer, **options, limits=FEW)


def test_the_last_quarter_is_kept_for_the_end(clock: Clock) -> None:
    budget = TimeBudget(1.0)
    clock.now = 44.0
    budget.check()
    clock.now = 45.0
    with pytest.raises(BudgetSpentError):
        budget.check()
    assert budget.cut_short
    budget.search_ended()
    budget.check()
    assert budget.left_s == 15.0
    clock.now = 60.0
    with pytest.raises(BudgetSpentError):
        TimedObserver(Observer(), budget).progress(1, 2, "x")
    assert Budget(None, budget).is_spent and not Budget(None, TimeBudget(None)).is_spent


def test_a_part_of_what_is_left_may_be_spent(clock: Clock) -> None:
    budget = TimeBudget(1.0)
    clock.now = 15.0
    with budget.part(0.5):
        assert budget.left_s == pytest.approx(15.0)
        clock.now = 31.0
        with pytest.raises(BudgetSpentError):
            budget.check()
        with budget.part(0.5):  # of nothing
            assert budget.left_s == pytest.approx(-1.0)
    assert budget.left_s == pytest.approx(14.0)
    endless = TimeBudget(None)
    with endless.part(0.5):
        assert endless.left_s == float("inf")


def test_what_is_written_at_the_end_has_its_time(clock: Clock) -> None:
    budget = TimeBudget(1.0)
    budget.keep(4.0)
    assert budget.left_s == 0.75 * 56.0
    budget.search_ended()
    assert budget.left_s == 56.0
    budget.keep(1000.0)
    assert budget.left_s == 56.0 * 7 / 8, "reading many inputs is no measure of it"
    endless = TimeBudget(None)
    endless.keep(4.0)
    assert endless.left_s == float("inf")


@pytest.mark.slow
def test_a_robust_search_ends_with_the_smallest_set_that_passed(
    clock: Clock, tmp_path: Path
) -> None:
    watch = Watch(clock, "bisect", 14, 50.0)
    result = run(tmp_path, watch, budget=1.0)
    assert result.out_of_time and result.passed and result.exit_code == 0
    assert watch.best_sets and len(result.pinned) == min(watch.best_sets)
    assert "The budget of 1 minutes ended the search" in result.sentence
    assert result.validation is not None and result.validation.given.passed == 1
    assert result.validation.perturbed.tested >= 8 and result.ranked
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["budget"] == {"minutes": 1.0, "ended_the_search": True}
    assert saved["pinned"] == result.pinned and (tmp_path / "model.typed.onnx").exists()
    assert "ended the search" in (tmp_path / "report.md").read_text()
    again = run(tmp_path, Observer(), budget=1000.0)
    assert not again.out_of_time and again.passed
    assert json.loads((tmp_path / "run.json").read_text())["budget"]["ended_the_search"] is False


def test_what_a_refuted_answer_holds_on_is_said_of_that_answer(
    clock: Clock, tmp_path: Path
) -> None:
    """Its last test, which it misses, takes it back for nobody: the pins, the score and the counts
    are those of one plan.
    """
    result = run(tmp_path, Watch(clock, "bisect", 24, 50.0), budget=1.0, robust=0)
    assert result.out_of_time and result.validation is not None
    assert 0 < len(result.pinned) < result.layer_count, "all pins miss nothing"
    assert result.validation.perturbed.passed < result.validation.perturbed.tested
    assert result.score == pytest.approx(result.validation.given.worst_score)


class Slow(EmulatedRunner):
    """The emulator with a second for each inference."""

    clock: Clock

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Arrays]:
        for outputs in super().outputs(plan, samples):
            self.clock.now += 1.0
            yield outputs


def test_many_inputs_end_in_time_and_go_on_where_they_were(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred, of which the first run has time for thirty: none of its answers is lost."""
    monkeypatch.setattr(Slow, "clock", clock, raising=False)
    monkeypatch.setattr("bisect_trt.steps.open_runners.EmulatedRunner", Slow)
    random = np.random.default_rng(0)
    ((name, array),) = FIXTURE.inputs.items()
    inputs = [{name: array * (1.0 + random.random(dtype=np.float32))} for _ in range(100)]
    known = []
    for _ in range(3):
        result = bisect_trt.bisect(
            FIXTURE.model,
            inputs,
            require="rel_range<=1",
            runner="emulated",
            out=tmp_path,
            budget=0.5,
            holdout="none",
            limits=FEW,
        )
        assert result.out_of_time and not result.passed and clock.now <= 31.0
        clock.now = 0.0
        with closing(sqlite3.connect(tmp_path / "cache.sqlite")) as cache:
            query = "SELECT count(*) FROM answers WHERE kind = 'evaluation'"
            known.append(cache.execute(query).fetchone()[0])
    assert known[0] >= 20 and known[1] >= known[0] + 20 and known[2] >= known[1] + 20


class SlowOnDraws(Unsteady):
    """A reproducible engine on which a draw takes much longer than the emulator's time promises."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(FIXTURE, lambda *_: 0)
        self._clock = clock

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Any]:
        for sample in samples:
            self._clock.now += 40.0 if sample.copied else 0.0
            yield from super().outputs(plan, [sample])


def test_draws_that_spend_the_budget_leave_a_report_of_one_process(
    clock: Clock, judged: Judged
) -> None:
    result, engine = judged(FIXTURE, SlowOnDraws(clock), budget=1.0)
    assert engine.process == 1, "there was no time to build in another"
    assert result.passed and result.engine.reproducibility.processes == 1
    assert result.validation is not None and result.validation.perturbed.tested < 59
    assert (Path(result.folder) / "report.html").exists()


@pytest.mark.parametrize("step", ["baselines", "triage", "bisect"])
def test_a_fitted_search_ends_with_what_every_judge_passed(
    step: str, clock: Clock, tmp_path: Path
) -> None:
    result = run(tmp_path, Watch(clock, step, 3, 50.0), budget=1.0, robust=0)
    assert result.out_of_time and result.passed and result.exit_code == 0
    assert not result.complete and 0 < len(result.pinned) <= result.layer_count
    assert result.score <= 1.0 and "best plan so far" in result.sentence
    if step != "baselines":
        assert result.validation is not None and result.validation.given.passed == 1


def test_all_pins_are_the_answer_where_only_fp32_was_run(clock: Clock, tmp_path: Path) -> None:
    result = run(tmp_path, Watch(clock, "baselines", 1, 100.0), budget=1.0)
    assert result.out_of_time and result.passed and len(result.pinned) == result.layer_count
    assert (
        result.validation is not None
        and result.validation.given.passed == 1
        and result.validation.unfinished
    )


class TooLate(Observer):
    """Lets all the time pass before the first inference."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def step(self, name: str) -> None:
        self._clock.now += 100.0 * (name == "baselines")


def test_no_time_at_all_is_no_plan_and_a_whole_report(clock: Clock, tmp_path: Path) -> None:
    result = run(tmp_path, TooLate(clock), budget=1.0)
    assert result.out_of_time and not result.passed and result.exit_code == 1
    assert "no plan is known to pass yet" in result.sentence
    assert {"run.json", "report.html", "report.md", "junit.xml"} <= {
        p.name for p in tmp_path.iterdir()
    }


def test_what_is_done_in_time_is_as_ever(clock: Clock, tmp_path: Path) -> None:
    result = run_of(healthy(), tmp_path, budget=5, limits=FEW)
    assert not result.out_of_time and result.cause.value == "none"
    assert "budget" not in result.sentence


def test_reading_inputs_ends_with_the_budget_too(tmp_path: Path) -> None:
    """A loader may never end, and nothing can be searched with what it gave so far."""

    def forever() -> Iterator[Mapping[str, Any]]:
        while True:
            time.sleep(0.05)
            yield FIXTURE.inputs

    heard: list[int] = []

    class Hears(Observer):
        def progress(self, done: int, expected: int, note: str) -> None:
            heard.append(done)

    with pytest.raises(BadInputError, match=r"budget=0.03: what the search has of it was over"):
        bisect_trt.bisect(
            FIXTURE.model,
            forever,
            require=FIXTURE.require,
            runner="emulated",
            out=tmp_path,
            budget=0.03,
            observer=Hears(),
            limits=FEW,
        )
    assert heard and heard == sorted(heard)
