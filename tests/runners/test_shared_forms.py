"""Of many nodes, segments that differ in their weights alone share sessions, and no bit changes."""

from __future__ import annotations

from functools import cache

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
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.segment_session import _WORTH_SETTLING, SegmentForm
from bisect_trt.runners.switched_session import KeptActivations, SwitchedSession
from tests.runners.test_segments import (
    PAIRS,
    WIDTH,
    Asked,
    asked_of,
    branching,
    network,
    same,
    sample,
)


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bisect_trt.runners.concurrency.MANY_NODES", 1)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each session of a form that is opened from here on."""
    found: list[int] = []
    plain = SegmentForm._opened

    def counted(self: SegmentForm, *arguments: object) -> object:
        found.append(id(self))
        return plain(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SegmentForm, "_opened", counted)
    return found


def forms(of: SwitchedSession) -> int:
    return len({id(segment.form) for segment in of._segments})


def chain(operators: list[str]) -> Graph:
    """``operators`` one after the other; those of two operands read a weight of their own."""
    random, nodes, weights, last = np.random.default_rng(1), [], [], "x"
    for number, op in enumerate(operators):
        reads = [last]
        if op in ("Add", "Mul", "MatMul"):
            shape = (WIDTH, WIDTH) if op == "MatMul" else (WIDTH,)
            array = random.standard_normal(shape).astype(np.float32) * np.float32(0.4)
            weights.append(numpy_helper.from_array(array, f"w{number}"))
            reads.append(f"w{number}")
        nodes.append(helper.make_node(op, reads, [f"t{number}"], f"/{op}_{number}"))
        last = f"t{number}"
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", WIDTH]) for n in ("x", last))
    made = helper.make_graph(nodes, "g", [x], [y], weights)
    opset = [helper.make_opsetid("", 17)]
    return Graph(helper.make_model(made, opset_imports=opset, ir_version=8))


REPEATED = ["MatMul", "Tanh", "Add", "Mul"] * 60
RANDOM = list(np.random.default_rng(5).choice(["Tanh", "Sin", "Erf", "Add", "Mul", "Relu"], 240))


def given_to(graph: Graph, **options: int) -> SwitchedSession:
    return SwitchedSession(graph, ConstantStore(graph), *PAIRS[0], 1, **options)


LONG = network(96)
NAMES = [layer.name for layer in LONG.layers]


@cache
def both(low: Precision, pin: Precision) -> tuple[SwitchedSession, SwitchedSession]:
    """One that shares, and one that always starts at the beginning and branches."""
    constants = ConstantStore(LONG)
    late = SwitchedSession(LONG, constants, low, pin, 1, kept=KeptActivations(20_000))
    return late, branching(SwitchedSession(LONG, constants, low, pin, 1, segments=1))


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(PAIRS), asked_of(NAMES))
def test_one_session_for_many_segments_changes_no_bit(
    precisions: tuple[Precision, Precision], asked: Asked
) -> None:
    """An ``If`` that captures tensors stands between the blocks, and a skip goes over them all."""
    late, plain = both(*precisions)
    assert 2 * forms(late) <= len(late._segments) and late._whole is None
    for seed, reduced in asked:
        for these in (reduced, reduced ^ {NAMES[-3]}):
            assert same(late.run(sample(seed), these), plain.run(sample(seed), these))


def test_all_copies_are_opened_once(opened: list[int]) -> None:
    graph = chain(REPEATED)
    made = given_to(graph)
    assert shares_sessions(graph)
    # Six blocks each, and what rounds the output.
    assert len(made._segments) == 11 and forms(made) == 2
    reduced = frozenset(layer.name for layer in graph.layers)
    x = Sample("s", {"x": np.linspace(-1, 1, 2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)})
    expected = made.run(x, reduced)
    assert len(opened) == 2
    made.release()
    assert same(made.run(x, reduced), expected)
    assert len(opened) == 4, "what was closed is opened once more"
    # Copies count together: a plan that is the same in all of them needs no switches soon.
    reference = branching(given_to(graph, segments=1))
    for number in range(_WORTH_SETTLING // 9 + 2):
        other = Sample(f"o{number}", {"x": x.arrays["x"] + np.float32(number)})
        one = made.run(other, reduced)
        assert same(one, reference.run(other, reduced))
    assert len(made._segments[1].form._settled) == 1 and not made._segments[-1].form._settled


@pytest.mark.parametrize("settings_in_use", [2, 3, 8])
def test_no_more_settings_are_settled_than_have_a_place(
    settings_in_use: int, opened: list[int]
) -> None:
    """Others would take their places in turn, and open a session each time."""
    graph = chain(REPEATED)
    made = given_to(graph)
    form = made._segments[0].form
    flags = len(form.segment.flags) + len(form.segment.weights)
    asked = [np.arange(flags) % (number + 2) == 0 for number in range(settings_in_use)]
    for _ in range(8 * _WORTH_SETTLING):
        for setting in asked:
            form.session_for(setting)
    assert len(form._settled) == 2 and len(opened) == 3
    # What is not asked for any more gives way.
    later = np.zeros(flags, np.bool_)
    for _ in range(3 * _WORTH_SETTLING):
        form.session_for(later)
    assert later.tobytes() in form._settled and len(opened) == 4


def test_quantised_blocks_of_other_scales_are_told_apart() -> None:
    """Their scales are no weights: each is a part of its segment."""

    def quantised(scales: float) -> Graph:
        values, nodes, last = [], [], "x"
        for number in range(80):
            scale = np.float32(0.05 + scales * number)
            values.append(numpy_helper.from_array(scale, f"s{number}"))
            ends = [f"q{number}", f"d{number}", f"t{number}"]
            nodes.append(helper.make_node("QuantizeLinear", [last, f"s{number}"], ends[:1]))
            nodes.append(helper.make_node("DequantizeLinear", [ends[0], f"s{number}"], ends[1:2]))
            nodes.append(helper.make_node("Tanh", [ends[1]], ends[2:]))
            last = ends[2]
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4]) for n in ("x", last))
        made = helper.make_graph(nodes, "g", [x], [y], values)
        opset = [helper.make_opsetid("", 17)]
        return Graph(helper.make_model(made, opset_imports=opset, ir_version=8))

    for graph, same_scales in ((quantised(0.0), True), (quantised(0.001), False)):
        made = given_to(graph)
        assert shares_sessions(graph) == same_scales
        assert (made._whole is None) == same_scales


def test_a_network_without_copies_is_run_as_ever() -> None:
    graph = chain(RANDOM)
    made = given_to(graph)
    assert not shares_sessions(graph)
    assert forms(made) == len(made._segments) > 4 and made._whole is not None
    assert made._segments[0]._names is None


def test_weights_of_another_shape_are_another_network() -> None:
    """Half of the blocks have a weight for each column, the others one for all."""
    graph = chain(REPEATED)
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    for tensor in proto.graph.initializer:
        if int(tensor.name[1:]) >= 120 and len(tensor.dims) == 1:
            tensor.CopyFrom(numpy_helper.from_array(np.float32([0.5]), tensor.name))
    made = given_to(Graph(proto))
    assert forms(made) == 4  # both, the last, and one where they meet
    x = Sample("s", {"x": np.ones((1, WIDTH), np.float32)})
    reduced = frozenset(layer.name for layer in graph.layers[::3])
    plain = branching(given_to(Graph(proto), segments=1))
    assert same(made.run(x, reduced), plain.run(x, reduced))


def test_what_fails_is_named_as_the_model_names_it() -> None:
    graph = chain(REPEATED)
    x = Sample("s", {"x": np.ones((1, WIDTH + 1), np.float32)})
    with pytest.raises(RunnerFailedError, match=r"'/MatMul_0'") as failed:
        given_to(graph).run(x, frozenset())
    assert "@" not in str(failed.value)


def test_effects_are_those_of_a_run_from_the_start() -> None:
    graph = chain(REPEATED)
    made, plain = given_to(graph), branching(given_to(graph, segments=1))
    x = Sample("s", {"x": np.linspace(-2, 2, WIDTH, dtype=np.float32)[None]})
    names = [layer.name for layer in graph.layers][::7]
    found = dict(made.sensitivities(x, names))
    assert list(found) and set(found) == set(names)
    for name, outputs in found.items():
        assert outputs is not None
        assert same(outputs, plain.run(x, frozenset({name})))
