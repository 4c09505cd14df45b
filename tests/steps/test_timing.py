"""What rounds of times say: medians, spreads, which plans take the same time, advice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bisect_trt.base.errors import RunnerUnavailableError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners.device import GpuCondition
from bisect_trt.runners.tensorrt.timing import RoundTimes, StoredEngine
from bisect_trt.steps.timing import (
    Build,
    PlanTime,
    Spread,
    Timing,
    spread_of,
    store_engines,
    time_engines,
)
from tests.networks import parsed


def timing(condition: GpuCondition | None = None, **rounds: RoundTimes) -> Timing:
    return Timing({name: PlanTime(times) for name, times in rounds.items()}, {}, condition)


def times(graph_ms: list[float], plain_ms: list[float] | None = None) -> RoundTimes:
    return RoundTimes(tuple(graph_ms), tuple(plain_ms or graph_ms))


def test_a_spread_is_median_and_quartiles() -> None:
    assert spread_of([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert spread_of([]) is None and spread_of([1.0, math.nan]) is None


def test_differences_within_the_spread_are_equal() -> None:
    found = timing(
        fast=times([1.00, 1.10, 0.95, 1.05, 1.00]),
        noisy=times([1.05, 1.05, 1.05, 1.00, 1.05]),
        slow=times([1.30, 1.42, 1.24, 1.36, 1.31]),
    )
    assert found.fastest() == ("fast", "noisy")
    assert found.equal("noisy", "fast") and not found.equal("slow", "fast")


def test_a_drifting_clock_does_not_hide_a_steady_difference() -> None:
    drift = np.linspace(1.0, 2.0, 9)
    found = timing(fast=times(drift.tolist()), slow=times((drift + 0.02).tolist()))
    assert found.fastest() == ("fast",)
    assert found.difference("slow", "fast").median_ms == pytest.approx(0.02)


def test_what_the_clock_cannot_tell_is_equal() -> None:
    assert timing(a=times([0.100] * 9), b=times([0.101] * 9)).equal("a", "b")
    assert not timing(a=times([0.100] * 9), b=times([0.110] * 9)).equal("a", "b")


def test_plans_are_compared_by_graph_replay_where_all_have_it() -> None:
    # det at batch 1: single enqueues order these two the wrong way round.
    fewer, more = times([1.04] * 5, [1.39] * 5), times([0.92] * 5, [1.97] * 5)
    found = timing(fewer=fewer, more=more)
    assert found.by_graph and found.fastest() == ("more",) and found.ms("more") == 0.92
    uncaptured = times([math.nan] * 5, [1.5] * 5)
    mixed = timing(fewer=fewer, more=more, uncaptured=uncaptured)
    assert not mixed.by_graph and mixed.fastest() == ("fewer",) and mixed.ms("more") == 1.97
    assert mixed.plans["uncaptured"].graph is None


def test_a_plan_without_an_engine_is_left_out() -> None:
    found = timing(works=times([1.0] * 3), fails=RoundTimes(failure="cannot be built"))
    assert found.fastest() == ("works",) and found.by_graph
    assert found.plans["fails"].failure and math.isnan(found.ms("fails"))
    with pytest.raises(ValueError, match="has no times"):
        found.difference("works", "fails")
    assert timing(fails=RoundTimes(failure="no")).fastest() == ()


def test_launches_are_named_where_graphs_are_worth_it() -> None:
    found = timing(
        launches=times([0.71] * 3, [1.19] * 3),
        work=times([4.08] * 3, [4.11] * 3),
        uncaptured=times([math.nan] * 3, [1.0] * 3),
    )
    assert found.advice("launches") == (
        "Most of the time is launches: use CUDA graphs (0.71 ms instead of 1.19 ms)."
    )
    assert found.advice("work") == found.advice("uncaptured") == ""


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (None, []),
        (GpuCondition(1980, 1980, 1), []),
        (GpuCondition(1980, 1980, None), []),
        (GpuCondition(1200, 1980, 1), ["1200 of 1980 MHz"]),
        (GpuCondition(1200, 1980, 2), ["1200 of 1980 MHz", "Another process"]),
        (GpuCondition(1980, 1980, 4), ["3 other processes"]),
    ],
)
def test_slow_clocks_and_other_processes_are_noted(
    condition: GpuCondition | None, words: list[str]
) -> None:
    notes = timing(condition, a=times([1.0])).notes()
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_the_run_s_own_processes_are_no_others() -> None:
    found = Timing({}, {}, GpuCondition(1980, 1980, 3), own_processes=3)
    assert found.notes() == () and len(replace(found, own_processes=2).notes()) == 1


GRAPH = Graph(parsed("h = Softmax(x) y = Exp(h)"))
SAMPLE = Sample("s", {"x": np.ones((1, 16), np.float32)})


def both(graph: Graph) -> dict[str, Build]:
    return {name: Build(graph, PrecisionPlan(Precision(name))) for name in ("fp16", "fp32")}


def test_engines_are_built_by_several_processes(tmp_path: Path) -> None:
    """By the real builder of TensorRT for RTX, which needs no GPU."""
    stored = store_engines(
        both(GRAPH), SAMPLE, tmp_path, module="tensorrt_rtx", builders=2, run=False
    )
    files = [Path(engine.file) for engine in stored.values() if isinstance(engine, StoredEngine)]
    assert list(stored) == ["fp16", "fp32"] and len(files) == 2
    assert all(file.stat().st_size > 1000 and file.parent == tmp_path for file in files)


def test_a_plan_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    graph = Graph(parsed("y = Det(x)", outputs="float y"))
    stored = store_engines(both(graph), SAMPLE, tmp_path, module="tensorrt_rtx", run=False)
    assert all(isinstance(found, str) and "Det_y" in found for found in stored.values())


def test_without_a_gpu_nothing_is_timed() -> None:
    """On a machine with a GPU both plans are."""
    try:
        found = time_engines(both(GRAPH), SAMPLE, module="tensorrt_rtx", rounds=3)
    except RunnerUnavailableError as error:
        assert "GPU" in str(error) or "cuda-python" in str(error)
    else:
        assert all(plan.plain is not None for plan in found.plans.values())
