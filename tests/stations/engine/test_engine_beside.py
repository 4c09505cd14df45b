"""What is done beside the search where an engine decides: engines built before they are asked for,
and the table of their layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from numpy.typing import NDArray

from bisect_trt import pipeline
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.steps import engine_baselines as engine_baselines
from bisect_trt.steps import samples, select_robust
from bisect_trt.steps.engine_baselines import EngineBaselines, with_table
from bisect_trt.steps.engine_diagnosis import EngineTable
from fixtures.models import residual
from tests.engines import Engine, Judged, WorseOnDraws

pytestmark = pytest.mark.usefixtures("few_draws")


class Foreseen(WorseOnDraws):
    """One that is told what it may be asked."""

    builds_ahead = True

    def __init__(self, fixture: Any) -> None:
        super().__init__(fixture)
        self.spare: list[tuple[PrecisionPlan, int]] = []
        self.kept: list[tuple[PrecisionPlan, int]] = []

    def build_ahead(
        self,
        plan: PrecisionPlan,
        tensors: Sequence[str] = (),
        copies: int = 1,
        *,
        spare: bool = False,
    ) -> None:
        if spare:
            self.spare.append((plan, len(self.built)))

    def give_up(self, but: PrecisionPlan) -> None:
        self.kept.append((but, len(self.built)))


@pytest.mark.slow
def test_what_follows_a_refusal_is_begun_before_it(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prefix is built beside the engine that is asked now, and kept when that is
    refused.
    """
    monkeypatch.setattr(select_robust, "MOST_SHRUNK", 0)
    engine = Foreseen(residual())
    result, _ = judged(residual(), engine, robust=0.95)
    asked = [p for p in engine.built if p.base is Precision.FP16 and p.pinned]
    assert result.passed and len(asked) >= 2, "the first set was refused"
    foreseen = [plan for plan, _ in engine.spare]
    assert len(foreseen) == len(asked)
    for before, after, (plan, built) in zip(asked, asked[1:], engine.spare, strict=False):
        assert before.pinned < plan.pinned <= after.pinned
        assert built == engine.built.index(before), "before the engine that may be refused is asked"
        assert (after, engine.built.index(after)) in engine.kept


@pytest.mark.slow
def test_what_an_engine_is_asked_next_is_made_ready_while_it_is_built(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The references of the copies that test it, and the trade-off curve; the answer is the
    same."""
    looked, results, computed = samples._has_reference, [], []
    for ahead in (False, True):
        engine, before_it = Foreseen(residual()), []
        engine.builds_ahead = ahead

        def look(context: Any, sample: Sample, engine: Any = engine, kept: Any = before_it) -> bool:
            kept.append(not [p for p in engine.built if p.base is Precision.FP16 and p.pinned])
            return looked(context, sample)

        monkeypatch.setattr(samples, "_has_reference", look)
        out = tmp_path / f"{ahead}"
        results.append(judged(residual(), engine, robust=0.95, out=out)[0])
        computed.append(sum(before_it))
    late, early = results
    assert computed[1] > computed[0] + 2 * 8, (
        "the test's copies, of two kinds, and the trade-off curve's"
    )
    assert late.pinned == early.pinned and late.validation == early.validation
    pd.testing.assert_frame_equal(late.tradeoff, early.tradeoff)


class Traced(Engine):
    """One process: it must not be asked while its layers are looked at."""

    busy = False

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        assert not self.busy
        return super().outputs(plan, samples)


@pytest.mark.slow
@pytest.mark.parametrize("emulated_on", ["gpu", "cpu"])
def test_the_table_of_layers_is_made_beside_the_search(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, emulated_on: str
) -> None:
    """Where a GPU emulates; it is in the tables, and the engine is asked when it is done."""
    fixture, engine, begun, told = residual(), Traced(residual()), Event(), []
    name = "marking all outputs changes this engine's result"

    def trace(problem: Any, context: Any, _: Any, plan: Any, layers: Any, ended: Any = None) -> Any:
        engine.busy = ended is not None
        beside = ended is not None and begun.wait(60.0)
        assert beside == (emulated_on == "gpu")
        assert not beside or wanted.wait(60.0), "until the engine is asked next"
        rows = {layer: {"engine_max_abs": 0.5} for layer in layers["layer"]}
        engine.busy = False
        return EngineTable(rows, "marked outputs", 3.0, 1, "", 1.0)

    searched = pipeline.find_cause

    def find_cause(*arguments: Any) -> Any:
        begun.set()
        return searched(*arguments)

    joined, wanted = pipeline.with_table, Event()

    def with_table(*arguments: Any) -> Any:
        wanted.set()
        return joined(*arguments)

    monkeypatch.setattr(pipeline, "with_table", with_table)
    monkeypatch.setattr(engine_baselines, "trace_engine", trace)
    monkeypatch.setattr(pipeline, "find_cause", find_cause)
    monkeypatch.setattr(Observer, "finding", lambda _, message: told.append(message))
    if emulated_on == "gpu":
        monkeypatch.setattr(engine_baselines, "CPU", object())
    result, _ = judged(fixture, engine, robust=0.95)
    assert result.passed and result.engine.layer_errors_from == "marked outputs"
    assert set(result.layers["engine_max_abs"]) == {0.5}
    assert sum(name in message for message in told) == 1
    assert sum(name in found.message for found in result.findings) == 1


@pytest.mark.parametrize("why", ["it broke", "the time is over"])
def test_a_search_is_not_lost_with_the_table(why: str) -> None:
    """It explains, and decides nothing."""
    tracing: Future[EngineTable | None] = Future()
    if why == "it broke":
        tracing.set_exception(RunnerFailedError(why, Verdict.CRASHED))
    context: Any = SimpleNamespace(
        time=SimpleNamespace(left_s=0.01 if why == "the time is over" else math.inf),
        found=lambda findings: tuple(findings),
    )
    few: Any = dict.fromkeys(f.name for f in fields(EngineBaselines))
    known = EngineBaselines(**{**few, "findings": (), "tracing": tracing})
    ended = with_table(known, context)
    assert ended.table is None and ended.tracing is None
    assert why in ended.findings[0].message and with_table(ended, context) is ended
