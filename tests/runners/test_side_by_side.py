"""Inferences of small nodes are made side by side, and are the same."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph.graph import Graph
from bisect_trt.probe.references import References
from bisect_trt.runners import side_by_side as module
from bisect_trt.runners.emulator.whole_model import WholeModelRunner
from bisect_trt.runners.ort_reference import Reference
from bisect_trt.runners.side_by_side import Pace, side_by_side
from fixtures.models import residual


def test_small_nodes_are_told_by_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "thread_count", lambda: 4)
    small, large = Pace(10**12), Pace(1)
    assert small.at_once == large.at_once == 1, "nothing was timed"
    assert small.timed(lambda: "answer") == "answer"
    large.timed(lambda: time.sleep(1e-3))
    assert small.at_once == 4 and large.at_once == 1


def test_answers_come_in_order_and_some_are_in_work_at_a_time() -> None:
    meet = threading.Barrier(3)

    def work(item: int) -> int:
        meet.wait(60)  # only three at a time come past it
        return item

    assert list(side_by_side(work, range(9), 3)) == list(range(9))


def test_outputs_and_references_do_not_depend_on_how_many_are_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture = residual()
    graph = Graph(fixture.model)
    random = np.random.default_rng(0)
    given = {n: np.asarray(a) for n, a in fixture.inputs.items()}
    samples = [
        Sample(str(i), {n: a * np.float32(random.uniform(0.5, 1)) for n, a in given.items()})
        for i in range(8)
    ]
    plan = PrecisionPlan("fp16")
    alone = list(WholeModelRunner(graph).outputs(plan, samples))
    reference = Reference(graph)
    exact = [reference.outputs(sample) for sample in samples]
    monkeypatch.setattr(module, "thread_count", lambda: 4)
    monkeypatch.setattr(module, "_SMALL_NODE_S", np.inf)
    runner, again = WholeModelRunner(graph), Reference(graph)
    list(runner.outputs(plan, samples[:1]))
    assert runner._pace.at_once == 4
    for one, other in zip(alone, runner.outputs(plan, samples), strict=True):
        assert all(one[n].tobytes() == other[n].tobytes() for n in one)
    for one, other in zip(exact, side_by_side(again.outputs, samples, 4), strict=True):
        assert all(one[n].tobytes() == other[n].tobytes() for n in one)


def test_two_that_ask_for_the_same_reference_get_the_same(tmp_path: object) -> None:
    fixture = residual()
    references = References(Reference(Graph(fixture.model)), tmp_path / "refs")  # type: ignore[operator]
    sample = Sample("s", {n: np.asarray(a) for n, a in fixture.inputs.items()})
    found = list(side_by_side(references.of, [sample] * 8, 4))
    assert all(f is found[0] for f in found), "one is remembered, and given to all"
    assert references._bytes == sum(a.nbytes for a in found[0].values())
