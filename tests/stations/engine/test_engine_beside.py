"""What is done beside the search where an engine decides: the table of its layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from numpy.typing import NDArray

from bisect_trt import pipeline
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.steps import engine_baselines as engine_baselines
from bisect_trt.steps.engine_baselines import EngineBaselines, with_table
from bisect_trt.steps.engine_diagnosis import EngineTable
from fixtures.models import residual
from tests.engines import Engine, Judged

pytestmark = pytest.mark.usefixtures("few_draws")


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
