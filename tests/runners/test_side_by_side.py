"""Inferences are made side by side where there is room, and are the same."""

from __future__ import annotations

import threading

import numpy as np
import onnx
import pytest

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.references import References
from bisect_trt.model.graph import Graph
from bisect_trt.model.shapes import inference_bytes
from bisect_trt.runners import concurrency as module
from bisect_trt.runners.concurrency import Headroom, side_by_side
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.emulator import SwitchedSession
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.second_emulator import WholeModelRunner
from fixtures.models import residual


def samples_of(count: int) -> tuple[Graph, list[Sample]]:
    """A fixture and inputs of it."""
    fixture = residual()
    random = np.random.default_rng(0)
    return Graph(fixture.model), [
        Sample(
            str(i),
            {n: np.asarray(a) * np.float32(random.uniform(0.5, 1)) for n, a in given.items()},
        )
        for i, given in enumerate([fixture.inputs] * count)
    ]


def test_as_many_as_have_room_and_no_more_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, (sample,) = samples_of(1)
    each = inference_bytes(graph, sample.shapes)
    assert each is not None and each >= sum(a.nbytes for a in sample.arrays.values())
    monkeypatch.setattr(module, "thread_count", lambda threads=0: threads or 4)
    for room, expected in ((100 * each, 4), (3 * each, 3), (each // 2, 1)):
        assert Headroom(graph, room_bytes=room).at_once(sample) == expected


def test_what_is_not_told_of_its_size_is_run_alone() -> None:
    fixture = residual()
    model = onnx.ModelProto()
    model.CopyFrom(fixture.model)
    model.graph.node[0].domain = "elsewhere"  # what follows it has no shape that can be told
    sample = Sample("s", fixture.inputs)
    assert inference_bytes(Graph(model), sample.shapes) is None
    assert Headroom(Graph(model)).at_once(sample) == 1


def test_answers_come_in_order_and_some_are_in_work_at_a_time() -> None:
    meet = threading.Barrier(3)

    def work(item: int) -> int:
        meet.wait(60)  # only three at a time come past it
        return item

    assert list(side_by_side(work, range(9), lambda _: 3)) == list(range(9))


def test_what_has_no_room_beside_others_is_in_work_alone() -> None:
    lock, running, together = threading.Lock(), set[int](), list[set[int]]()
    meet = threading.Barrier(3)

    def work(item: int) -> int:
        with lock:
            running.add(item)
            together.append(set(running))
        if item < 3:
            meet.wait(60)
        with lock:
            running.remove(item)
        return item

    assert list(side_by_side(work, range(9), lambda i: 1 if i == 5 else 3)) == list(range(9))
    assert {0, 1, 2} in together
    assert all(len(found) == 1 for found in together if max(found) >= 5)


def test_outputs_and_references_do_not_depend_on_how_many_are_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, samples = samples_of(8)
    plan = PrecisionPlan("fp16")
    alone = list(WholeModelRunner(graph).outputs(plan, samples))
    reference = Reference(graph)
    exact = [reference.outputs(sample) for sample in samples]
    monkeypatch.setattr(module, "thread_count", lambda threads=0: threads or 4)
    runner, again = WholeModelRunner(graph), Reference(graph)
    assert again.at_once(samples[0]) == 4
    for one, other in zip(alone, runner.outputs(plan, samples), strict=True):
        assert all(one[n].tobytes() == other[n].tobytes() for n in one)
    for one, other in zip(exact, side_by_side(again.outputs, samples, lambda _: 4), strict=True):
        assert all(one[n].tobytes() == other[n].tobytes() for n in one)


def test_two_that_ask_for_the_same_reference_get_the_same(tmp_path: object) -> None:
    fixture = residual()
    references = References(Reference(Graph(fixture.model)), tmp_path / "refs")  # type: ignore[operator]
    sample = Sample("s", {n: np.asarray(a) for n, a in fixture.inputs.items()})
    found = list(side_by_side(references.of, [sample] * 8, lambda _: 4))
    assert all(f is found[0] for f in found), "one is remembered, and given to all"


def test_a_worker_makes_no_more_at_once_than_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, (sample,) = samples_of(1)
    monkeypatch.setattr(module, "thread_count", lambda threads: threads or 64)
    assert Headroom(graph).at_once(sample) == 64
    session = SwitchedSession(
        graph, ConstantStore(graph), Precision.FP16, Precision.FP32, threads=3
    )
    assert session.at_once(sample) == 3


def test_a_reader_that_stops_waits_for_nothing() -> None:
    """The interpreter drops a Ctrl-C that comes while it closes a generator."""
    end = threading.Event()

    def work(item: int) -> int:
        assert item == 0 or end.wait(60)
        return item

    answers = side_by_side(work, range(9), lambda _: 2)
    assert next(answers) == 0
    answers.close()
    end.set()


def test_inferences_of_a_large_model_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, (sample,) = samples_of(1)
    monkeypatch.setattr(module, "thread_count", lambda threads=0: threads or 4)
    assert Headroom(graph).at_once(sample) == 4
    assert Headroom(graph, large_bytes=1).at_once(sample) == 1
