"""The rows of the choices, where the costs of plans are known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bisect_trt.base.outcomes import AS_IS, FP32, KNEE, PLAN, REPAIRED
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.cost import BlockCost, CostTable, LayerWork
from bisect_trt.report.choices import Choice, Passes, saved_by_repair
from bisect_trt.report.rows import timed, with_knee

FP16 = PrecisionPlan(Precision.FP16)


def table_of(*names: str) -> CostTable:
    """Each layer is a block that takes half as long again in FP32."""
    works = [LayerWork(name, "MatMul", 1.0, 1.0, 1.0, 1.0, 0.0, is_matrix=True) for name in names]
    costs = tuple(BlockCost(0.5, 0.5, 0.0) for _ in works)
    return CostTable(tuple((work,) for work in works), costs, 1.0)


def row(name: str, plan: PrecisionPlan, *, repaired: bool = False) -> Choice:
    pinned = tuple(sorted(plan.pinned))
    return Choice(name, plan, pinned, repaired=repaired, worst_score=0.5, passes=Passes.NO)


def test_a_repaired_graph_whose_plan_is_fp32_saves_nothing() -> None:
    """Such as where the budget has ended before any plan passed."""
    fp32 = PrecisionPlan(Precision.FP32)
    everything = row(FP32, PrecisionPlan(Precision.FP32, frozenset("ab")))
    given = [row(AS_IS, FP16), row(REPAIRED, fp32, repaired=True), everything]
    own, its = (SimpleNamespace(costs=table_of(*names)) for names in ("ab", "ac"))
    answered = SimpleNamespace(run_statistics=its, state=None)
    state: Any = SimpleNamespace(
        engine=None, judgement=None, bf16=None, timing=None, repaired=answered, fitted=None
    )
    others: Any = {REPAIRED: None}
    found = timed(given, state, own, others)  # type: ignore[arg-type]
    assert [one.saving_kept for one in found] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("repaired", [False, True])
def test_the_knee_of_another_graph_is_a_row_though_its_layers_are_a_row_of_the_first(
    *, repaired: bool
) -> None:
    knee = FP16.with_pins("a")
    layers = [SimpleNamespace(name=name) for name in "ab"]
    state: Any = SimpleNamespace(
        tradeoff=SimpleNamespace(knee=knee), problem=SimpleNamespace(layers=layers)
    )
    found = SimpleNamespace(verdict=SimpleNamespace(passed=True), score=0.5)
    statistics: Any = SimpleNamespace(worst_of=lambda *_: found, emulators=())
    of = row(REPAIRED, FP16, repaired=True) if repaired else None
    given = [row(AS_IS, FP16), row(PLAN, knee)]
    names = [one.name for one in with_knee(given, state, statistics, of)]
    assert (KNEE in names) == repaired


def test_rows_of_timed_engines_have_their_milliseconds_and_what_the_repair_saves() -> None:
    def engine(ms: float) -> Any:
        return SimpleNamespace(facts={"latency_ms": ms})

    its = SimpleNamespace(costs=table_of("a", "c"))
    repaired = SimpleNamespace(
        judgement=None, engine=SimpleNamespace(base=engine(1.25), fp32=engine(3.0))
    )
    state: Any = SimpleNamespace(
        engine=SimpleNamespace(base=engine(1.0), fp32=engine(3.0)),
        judgement=SimpleNamespace(result=engine(2.0)),
        bf16=None,
        timing=None,
        repaired=SimpleNamespace(run_statistics=its, state=repaired),
        fitted=None,
    )
    everything = row(FP32, PrecisionPlan(Precision.FP32, frozenset("ab")))
    plan, edited = row(PLAN, FP16.with_pins("ab")), row(REPAIRED, FP16, repaired=True)
    own: Any = SimpleNamespace(costs=table_of("a", "b"))
    others: Any = {REPAIRED: None}
    found = timed([row(AS_IS, FP16), edited, plan, everything], state, own, others)
    assert [one.latency_ms for one in found] == [1.0, 1.25, 2.0, 3.0]
    assert [one.saving_kept for one in found] == [1.0, 0.875, 0.5, 0.0]
    assert not any(one.is_estimated for one in found)
    told = "without the repair 2 layers in FP32, with it 0; 2.000 ms and 1.250 ms"
    assert saved_by_repair(found) == told
    assert saved_by_repair([one for one in found if one.name != REPAIRED]) == ""


def test_fitted_weights_have_no_knee() -> None:
    """The file has FP32 weights where the row "weights fitted" keeps layers, and nowhere else."""
    state: Any = SimpleNamespace(tradeoff=SimpleNamespace(knee=FP16.with_pins("a")))
    fitted = replace(row("weights fitted", FP16.with_pins("b")), fitted=True)
    statistics: Any = SimpleNamespace(worst_of=None, emulators=())
    assert with_knee([fitted], state, statistics, fitted) == [fitted]
