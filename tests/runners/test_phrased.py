"""Of many nodes of which nothing repeats, layers of a kind share sessions, and no bit changes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Event
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.phrases import shares_sessions
from bisect_trt.runners.concurrency import Sessions, Turns
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.phrased import PhrasedSegment
from bisect_trt.runners.segment_session import SegmentSession
from bisect_trt.runners.switched_session import KeptActivations, SwitchedSession
from tests.runners.test_segments import PAIRS, WIDTH, Asked, asked_of, branching, same
from tests.runners.test_shared_forms import RANDOM, chain


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bisect_trt.runners.concurrency.MANY_NODES", 1)
    monkeypatch.setattr("bisect_trt.model.phrases.FEWEST_NODES", 1)
    monkeypatch.setattr("bisect_trt.model.phrases._FREQUENT", 6)
    for room in ("runners.phrased", "model.phrases"):
        monkeypatch.setattr(f"bisect_trt.{room}.SESSION", 1)


@cache
def tangle(layers: int = 800) -> Graph:
    """Operators in no order that read each other in no order: weights, two outputs, a shape, a
    constant that all read, a tensor that is read twice, and an ``If`` that captures.
    """
    random = np.random.default_rng(2)
    nodes: list[onnx.NodeProto] = []
    weights = [numpy_helper.from_array(np.float32([0.9]), "shared")]

    def add(op: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"t{len(nodes)}_{i}" for i in range(outputs)]
        nodes.append(helper.make_node(op, inputs, names, f"/n{len(nodes)}", **attributes))
        return names[0]

    def weight(*shape: int) -> str:
        array = random.standard_normal(shape).astype(np.float32) * np.float32(0.3)
        weights.append(numpy_helper.from_array(array, f"w{len(weights)}"))
        return weights[-1].name

    recent = [add("Tanh", "x")]
    shape = add("Shape", "x")
    for number in range(layers):
        last, other = recent[-1], recent[int(random.integers(len(recent)))]
        match int(random.integers(8)):
            case 0:
                made = add("Tanh", add("MatMul", last, weight(WIDTH, WIDTH)))
            case 1:
                made = add("Add", last, weight(WIDTH))
            case 2:
                made = add("Mul", last, "shared")
            case 3:
                made = add("Add", last, other)
            case 4:
                half = add("Split", last, outputs=2, axis=1)
                made = add("Concat", half[:-1] + "1", half, axis=1)
            case 5:
                made = add("Reshape", last, shape)
            case 6:
                made = add("Mul", add("Sigmoid", other), last)
            case _:
                made = add("Add", add("Sin", last), last)
        if number == layers // 2:
            made = add("If", "flag", **branches(made, recent[0]))
        recent = [*recent, made][-6:]
    info = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    out = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in recent[-2:]]
    opset = [helper.make_opsetid("", 17)]
    graph = helper.make_graph(nodes, "g", info, out, weights)
    return Graph(helper.make_model(graph, opset_imports=opset, ir_version=8))


def branches(made: str, other: str) -> dict[str, onnx.GraphProto]:
    def body(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
        return helper.make_graph(nodes, name, [], [out])

    return {
        "then_branch": body("b", helper.make_node("Add", [made, other], ["inside"], "inner")),
        "else_branch": body("c", helper.make_node("Identity", [made], ["outside"])),
    }


def sample(seed: int) -> Sample:
    x = np.random.default_rng(seed).standard_normal((3, WIDTH)).astype(np.float32)
    return Sample(f"s{seed}", {"x": x, "flag": np.array(seed % 2 == 0)})


def given_to(graph: Graph, turns: Turns | None = None, **options: int) -> SwitchedSession:
    return SwitchedSession(graph, ConstantStore(graph), *PAIRS[0], 1, turns=turns, **options)


NAMES = [layer.name for layer in tangle().layers]


@cache
def both(low: Precision, pin: Precision) -> tuple[SwitchedSession, SwitchedSession]:
    """One by phrases, and one that always starts at the beginning and branches."""
    constants = ConstantStore(tangle())
    late = SwitchedSession(tangle(), constants, low, pin, 1, kept=KeptActivations(20_000))
    return late, branching(SwitchedSession(tangle(), constants, low, pin, 1, segments=1))


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(PAIRS), asked_of(NAMES))
def test_phrases_change_no_bit(precisions: tuple[Precision, Precision], asked: Asked) -> None:
    late, plain = both(*precisions)
    assert all(isinstance(segment, PhrasedSegment) for segment in late._segments)
    for seed, reduced in asked:
        for these in (reduced, reduced ^ {NAMES[-3]}):
            assert same(late.run(sample(seed), these), plain.run(sample(seed), these))


def test_effects_are_those_of_a_run_from_the_start() -> None:
    made, plain = given_to(tangle()), branching(given_to(tangle(), segments=1))
    wanted = NAMES[::29]
    found = dict(made.sensitivities(sample(0), wanted))
    assert set(found) == set(wanted)
    for name, outputs in found.items():
        assert outputs is not None
        assert same(outputs, plain.run(sample(0), frozenset({name})))


def test_layers_of_a_kind_share_a_session() -> None:
    graph = chain(RANDOM)
    made = given_to(graph)
    assert shares_sessions(graph)
    # Six operators, some of them by two; and those that round the input or the output.
    forms, sessions = len(made._one_of_each), len(made._sessions)
    assert forms < 30 and 100 < sessions < len(RANDOM), "some phrases are of several layers"
    assert made._whole is None
    assert made.at_once(sample(0)) == 1
    assert len(given_to(tangle())._one_of_each) < len(NAMES) / 4


def test_layers_of_many_kinds_keep_sessions_of_their_own() -> None:
    """Each reads a weight of another width."""
    nodes, weights, last = [], [], "x"
    for number in range(120):
        array = np.full([number + 1, number + 2], 0.1, np.float32)
        weights.append(numpy_helper.from_array(array, f"w{number}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{number}"], [f"t{number}"], f"n{number}"))
        last = f"t{number}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", last)]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    opset = [helper.make_opsetid("", 17)]
    graph = Graph(helper.make_model(made, opset_imports=opset, ir_version=8))
    assert not shares_sessions(graph)
    assert given_to(graph)._whole is not None


def test_fewer_nodes_are_run_by_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(tangle().proto.graph.node)
    monkeypatch.setattr("bisect_trt.model.phrases.FEWEST_NODES", count + 1)
    assert not shares_sessions(tangle())
    assert given_to(tangle())._whole is not None


def test_what_phrases_hand_on_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made, alive = given_to(chain(RANDOM)), list[int]()
    plain = SegmentSession.run

    def counted(self: SegmentSession, tensors: Mapping[str, Any], setting: Any) -> Any:
        alive.append(len(tensors))
        return plain(self, tensors, setting)

    monkeypatch.setattr(SegmentSession, "run", counted)
    made.run(Sample("s", {"x": np.ones((2, WIDTH), np.float32)}), frozenset())
    assert len(alive) == len(made._sessions)
    assert max(alive) == 2, "the input, and what the phrase before gave"


def test_what_fails_is_named_as_the_model_names_it() -> None:
    graph = chain(["Sin", "MatMul", *RANDOM])
    x = Sample("s", {"x": np.ones((1, WIDTH + 1), np.float32)})
    with pytest.raises(RunnerFailedError, match=r"'/MatMul_1'") as failed:
        given_to(graph).run(x, frozenset())
    assert "@" not in str(failed.value)


@pytest.mark.parametrize("sessions", [Sessions.SECOND, Sessions.REFERENCE])
def test_shared_sessions_make_room(sessions: Sessions) -> None:
    """They are opened again in no time, and let nobody else go for that."""
    graph = tangle()
    turns = Turns(graph)
    made = given_to(graph, turns)
    reduced = frozenset(NAMES[::2])
    expected = made.run(sample(0), reduced)
    assert made.is_ready(reduced)
    let_go = []

    class Other:
        def release(self) -> None:
            let_go.append(self)

    other = Other()
    turns.introduce(other, sessions)
    turns.make_room(sessions)
    assert not made.is_ready(reduced)
    made._kept = KeptActivations()
    assert same(made.run(sample(0), reduced), expected)
    assert made.is_ready(reduced) and not let_go


@pytest.mark.parametrize("place", [0, 300, -1])
def test_what_nobody_reads_is_not_run(place: int) -> None:
    """Dead layers, one after the other: a phrase of them would give nothing."""
    proto = onnx.ModelProto()
    proto.CopyFrom(tangle().proto)
    nodes = list(proto.graph.node)
    for number in range(10):
        source = nodes[place].output[0] if number == 0 else f"dead{number - 1}"
        proto.graph.node.append(helper.make_node("Cos", [source], [f"dead{number}"], f"d{number}"))
    graph = Graph(proto)
    made, plain = given_to(graph), branching(given_to(graph, segments=1))
    assert isinstance(made._segments[0], PhrasedSegment)
    for reduced in (frozenset(NAMES[::3]), frozenset({"d0", "d3", *NAMES[-2:]})):
        assert same(made.run(sample(1), reduced), plain.run(sample(1), reduced))


def test_a_scan_has_no_phrases() -> None:
    """Of a body whose outputs have no shape ONNX Runtime asks the nodes before the Scan."""
    text = f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, {WIDTH}] x) => (float[m, {WIDTH}] y)
        <int64[2] shape = {{3, {WIDTH}}}, float[{WIDTH}] start = {{{", ".join(["0"] * WIDTH)}}}> {{
            reshaped = Reshape(x, shape)
            a = Tanh(reshaped)
            end, y = Scan <num_scan_inputs = 1, body = b (float[{WIDTH}] s, float[{WIDTH}] e)
                => (t, u) {{ t = Add(s, e)  u = Tanh(t) }}> (start, a)
        }}
    """
    model = onnx.parser.parse_model(text)
    last = model.graph.node[-1]
    last.output[1] = "scanned"
    tail = chain(RANDOM).proto
    for node in tail.graph.node:
        node.input[0] = "scanned" if node.input[0] == "x" else node.input[0]
    model.graph.node.extend(tail.graph.node)
    model.graph.initializer.extend(tail.graph.initializer)
    model.graph.output[0].name = tail.graph.output[0].name
    graph = Graph(model)
    made, plain = given_to(graph), branching(given_to(graph, segments=1))
    assert not shares_sessions(graph) and len(made._segments) > 1
    x = Sample("s", {"x": np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)})
    reduced = frozenset(layer.name for layer in graph.layers[::2])
    assert same(made.run(x, reduced), plain.run(x, reduced))


def test_a_constant_that_is_an_output() -> None:
    """No segment gives it: the model stays in one piece."""
    proto = onnx.ModelProto()
    proto.CopyFrom(tangle().proto)
    array = numpy_helper.from_array(np.float32([1.0, 2.0]), "value")
    proto.graph.node.append(helper.make_node("Constant", [], ["fixed"], "c", value=array))
    proto.graph.output.append(helper.make_tensor_value_info("fixed", TensorProto.FLOAT, [2]))
    graph = Graph(proto)
    made = given_to(graph)
    assert len(made._segments) == 1 and not shares_sessions(graph)
    found = made.run(sample(0), frozenset(NAMES))
    assert found["fixed"].tolist() == [1.0, 2.0]
    whole = given_to(tangle()).run(sample(0), frozenset(NAMES))
    assert same({name: found[name] for name in whole}, whole)


def test_sessions_may_be_closed_while_they_run() -> None:
    made, plain = given_to(tangle()), branching(given_to(tangle(), segments=1))
    asked = [frozenset(NAMES[n::4]) for n in range(4)] * 3
    done = Event()

    def close() -> int:
        times = 0
        while not done.wait(0.002):
            made.release()
            times += 1
        return times

    with ThreadPoolExecutor(3) as pool:
        closed = pool.submit(close)
        found = list(pool.map(lambda p: made.run(sample(p[0]), p[1]), enumerate(asked)))
        done.set()
        assert closed.result() > 0
    for number, (reduced, outputs) in enumerate(zip(asked, found, strict=True)):
        assert same(outputs, plain.run(sample(number), reduced))
    made.release()
    assert not any(session.is_open or session._fed for session in made._sessions)
