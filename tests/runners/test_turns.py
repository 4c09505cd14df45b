"""A copy of many weights is held by one session at a time; of many nodes the sessions of all plans
and of one are open in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.runners import second_emulator
from bisect_trt.runners.concurrency import Turns
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.ort_session import opened, reference_session
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.second_emulator import WholeModelRunner
from tests.runners.test_segments import WIDTH, layers, network, sample
from tests.runners.test_shared_forms import RANDOM, chain

PLAN = PrecisionPlan(Precision.FP16)


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    """A product with a weight of 64 kB, which stays in its file."""
    weight = np.random.default_rng(0).standard_normal((128, 128), np.float32)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 128]) for n in "xy"]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    made = helper.make_graph(
        nodes, "g", values[:1], values[1:], [numpy_helper.from_array(weight, "w")]
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(made, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
    return Graph(load_model(tmp_path / "m.onnx").proto)


def sessions_made(monkeypatch: pytest.MonkeyPatch) -> list[ReferenceType[ort.InferenceSession]]:
    """Those that are opened from here on."""
    made: list[ReferenceType[ort.InferenceSession]] = []

    def seen(*given: Any, **named: Any) -> ort.InferenceSession:
        session = opened(*given, **named)
        made.append(ref(session))
        return session

    monkeypatch.setattr("bisect_trt.runners.ort_session.opened", seen)
    return made


def alive(made: Sequence[ReferenceType[ort.InferenceSession]]) -> int:
    return sum(session() is not None for session in made)


@pytest.mark.parametrize(("many", "together"), [(1 << 40, 2), (1, 1)])
def test_many_weights_are_held_in_turn(
    graph: Graph, many: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bisect_trt.runners.concurrency.MANY", many)
    made = sessions_made(monkeypatch)
    sample = Sample("s", {"x": np.linspace(-1, 1, 128, dtype=np.float32)[None]})
    reference = Reference(graph)
    second = WholeModelRunner(graph, turns=reference.turns)

    def answers() -> tuple[NDArray[Any], NDArray[Any]]:
        exact = reference.outputs(sample)["y"]
        return exact, next(iter(second.outputs(PLAN, [sample])))["y"]

    first = answers()
    assert alive(made) == together
    # Whoever had to go gives the same when it comes back.
    assert all(np.array_equal(*pair) for pair in zip(first, answers(), strict=True))
    assert alive(made) == together
    assert len(made) == (2 if together == 2 else 4)
    assert not np.array_equal(*first)


def test_of_many_nodes_sessions_of_all_plans_and_of_one_are_open_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, made = chain(RANDOM), sessions_made(monkeypatch)
    other = PLAN.with_pins(frozenset(layer.name for layer in graph.layers[::2]))

    def given(seed: int) -> Sample:
        x = np.random.default_rng(seed).standard_normal((2, WIDTH)).astype(np.float32)
        return Sample(f"s{seed}", {"x": x})

    def answers() -> tuple[list[int], list[NDArray[Any]]]:
        turns = Turns(graph)
        first = EmulatedRunner(graph, turns=turns)
        second = WholeModelRunner(graph, turns=turns)
        counts: list[int] = []
        found: list[NDArray[Any]] = []

        def ask(runner: EmulatedRunner | WholeModelRunner, plan: PrecisionPlan, *s: int) -> None:
            outputs = list(runner.outputs(plan, [given(seed) for seed in s]))
            counts.append(alive(made))
            found.extend(array for each in outputs for array in each.values())

        ask(first, PLAN, 1, 2)
        ask(second, PLAN, 1)
        first.foretell(PLAN, 100)
        ask(first, PLAN, 3, 4)
        ask(first, other, 1, 2)
        ask(second, other, 2)
        first.release()
        second.release()
        return counts, found

    together, expected = answers()
    monkeypatch.setattr("bisect_trt.runners.concurrency.MANY_NODES", 1)
    in_turn, found = answers()
    segments = together[0]
    assert segments > 4
    assert together == [segments, segments + 1, segments + 2, segments + 2, segments + 2]
    assert in_turn == [segments, 1, 2, segments, 1]
    assert alive(made) == 0
    assert all(np.array_equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("many", [False, True])
def test_of_many_nodes_those_of_a_baseline_are_let_go_behind_it(
    many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the baselines: FP32 and FP16 have sessions of one kind, TF32 its own."""
    if many:
        monkeypatch.setattr("bisect_trt.runners.concurrency.MANY_NODES", 1)
    made = sessions_made(monkeypatch)
    runner, given = EmulatedRunner(network()), sample(0)
    bases = (Precision.FP32, Precision.TF32, Precision.FP16)

    def answers() -> tuple[list[int], list[NDArray[Any]]]:
        counts, found = [], []
        for base in bases:
            (outputs,) = runner.outputs(PrecisionPlan(base), [given])
            counts.append(alive(made))
            found.extend(outputs.values())
        return counts, found

    (one, two, behind), found = answers()
    assert one > 1 and two > one and behind == (one if many else two)
    assert len(made) == two, "nothing is opened twice"
    assert all(map(np.array_equal, found, answers()[1]))
    # Resumed, the base's may be opened behind TF32's; and that of other pins is not a baseline.
    runner, tf32 = EmulatedRunner(network()), PrecisionPlan(Precision.TF32)
    pinned_in_tf32 = PrecisionPlan(Precision.FP16, frozenset(layers()[:3]), Precision.TF32)
    made.clear()
    for plan in (tf32, PLAN, pinned_in_tf32, PLAN, pinned_in_tf32):
        list(runner.outputs(plan, [given]))
    assert len(made) == alive(made) + two - one, "TF32's were let go, and none is opened twice"


@pytest.mark.parametrize("many", [False, True])
def test_of_many_nodes_the_reference_and_the_second_emulator_are_open_in_turn(
    graph: Graph, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many:
        monkeypatch.setattr("bisect_trt.runners.concurrency.MANY_NODES", 1)
    made, given_back = sessions_made(monkeypatch), list[int]()
    monkeypatch.setattr("bisect_trt.runners.concurrency.give_back", lambda: given_back.append(1))
    sample = Sample("s", {"x": np.linspace(-1, 1, 128, dtype=np.float32)[None]})
    reference = Reference(graph)
    second = WholeModelRunner(graph, turns=reference.turns)
    first = EmulatedRunner(graph, turns=reference.turns)
    before = len(made)
    list(first.outputs(PLAN, [sample]))
    beside = len(made) - before  # what searches stays open
    found = []
    for number in range(3):
        exact = reference.outputs(sample)["y"]
        assert alive(made) == beside + (1 if many or number == 0 else 2)
        found.append((exact, next(iter(second.outputs(PLAN, [sample])))["y"]))
        assert alive(made) == beside + (1 if many else 2)
    assert len(made) == beside + (6 if many else 2)
    assert bool(given_back) == many
    for exact, reduced in found:
        assert np.array_equal(exact, found[0][0]) and np.array_equal(reduced, found[0][1])


def test_many_threads_open_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bisect_trt.runners.concurrency.thread_count", lambda: 8)
    made, runner = sessions_made(monkeypatch), EmulatedRunner(network())
    several = [sample(seed) for seed in range(9)]
    list(runner.outputs(PLAN, several))
    segments = len(made)
    runner.release()  # the plan is known, its sessions are not there
    list(runner.outputs(PLAN, several))
    assert len(made) == 2 * segments
    # Of another plan they are.
    list(runner.outputs(PLAN.with_pins(frozenset(layers()[::2])), several))
    assert len(made) == 2 * segments


def test_sessions_that_no_plan_s_can_take_the_place_of_stay_open(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bisect_trt.runners.concurrency.MANY_NODES", 1)
    made, turns = sessions_made(monkeypatch), Turns(graph)
    first = EmulatedRunner(graph, turns=turns)  # too small to be cut
    second = WholeModelRunner(graph, turns=turns)
    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((1, 128), np.float32)
        for runner in (first, second):
            list(runner.outputs(PLAN, [Sample(str(seed), {"x": x})]))
    assert len(made) == 2


def test_no_session_is_opened_while_one_of_the_model_s_other_form_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bisect_trt.runners.concurrency.thread_count", lambda: 4)
    graph = Graph(
        onnx.parser.parse_model("""
            <ir_version: 8, opset_import: ["" : 17]>
            g (int64[4] ids) => (float[4, 2] y)
            <float[4, 2] table = {0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5}> {
                e = Gather(table, ids)
                y = Mul(e, e)
            }
        """)
    )
    (lookup,) = graph.lookups
    ids = Sample("ids", {"ids": np.arange(4)})
    moved = Sample("moved", {"ids": np.arange(4), lookup.source: np.ones((4, 2), np.float32)})
    runner = WholeModelRunner(graph)
    running: set[int] = set()
    plain = second_emulator._run

    def run(asked: tuple[ort.InferenceSession, Sample]) -> Any:
        running.add(id(asked))
        try:
            return plain(asked)
        finally:
            running.discard(id(asked))

    def opening(*given: Any, **named: Any) -> ort.InferenceSession:
        assert not running
        return reference_session(*given, **named)

    monkeypatch.setattr(second_emulator, "_run", run)
    monkeypatch.setattr(second_emulator, "reference_session", opening)
    found = list(runner.outputs(PLAN, [ids] * 6 + [moved] * 6 + [ids] * 2))
    alone = [next(iter(runner.outputs(PLAN, [s])))["y"] for s in (ids, moved)]
    for answer, expected in zip(found, [0] * 6 + [1] * 6 + [0] * 2, strict=True):
        assert np.array_equal(answer["y"], alone[expected])
