"""An evaluation that starts behind a cut gives what one from the start gives, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.device import Device
from bisect_trt.runners.switched_session import KeptActivations, SegmentSession, SwitchedSession
from bisect_trt.runners.values import owned, value_of

BLOCKS, WIDTH = 24, 16
PAIRS = [
    (Precision.FP16, Precision.FP32),
    (Precision.FP16, Precision.TF32),
    (Precision.BF16, Precision.FP32),
    (Precision.TF32, Precision.FP32),
]


@cache
def network(blocks: int = BLOCKS) -> Graph:
    """Residual blocks with a skip over all of them, a shape that follows from the input, a constant
    that all read, an If that captures a tensor of an earlier block, and an input that nobody reads.
    """
    random = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights = [numpy_helper.from_array(np.float32([1.5]), "shared")]

    def add(op: str, *inputs: str, **attributes: object) -> str:
        name = f"t{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [name], f"/n{len(nodes)}", **attributes))
        return name

    def weight(*shape: int) -> str:
        array = random.standard_normal(shape).astype(np.float32) * np.float32(0.3)
        weights.append(numpy_helper.from_array(array, f"w{len(weights)}"))
        return weights[-1].name

    x = first = add("Add", "x", weight(WIDTH))
    shape = add("Shape", "x")
    for block in range(blocks):
        y = add("Mul", add("Tanh", add("MatMul", x, weight(WIDTH, WIDTH))), "shared")
        x = add("Reshape", add("Add", x, y), shape)
        if block == blocks // 2:
            branch = [helper.make_node("Mul", [x, first], ["inside"], "inner")]
            outputs = [helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)]
            body = helper.make_graph(branch, "b", [], outputs)
            other = helper.make_graph(
                [helper.make_node("Identity", [x], ["outside"])],
                "c",
                [],
                [helper.make_tensor_value_info("outside", TensorProto.FLOAT, None)],
            )
            x = add("If", "flag", then_branch=body, else_branch=other)
    last = add("Concat", x, first, axis=1)
    info = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        helper.make_tensor_value_info("unread", TensorProto.INT64, [1]),
    ]
    given_out = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in (last, y)]
    graph = helper.make_graph(nodes, "g", info, given_out, weights)
    opset = [helper.make_opsetid("", 17)]
    return Graph(helper.make_model(graph, opset_imports=opset, ir_version=8))


def sample(seed: int) -> Sample:
    random = np.random.default_rng(seed)
    x = random.standard_normal((3, WIDTH)).astype(np.float32)
    return Sample(f"s{seed}", {"x": x, "flag": np.array(seed % 2 == 0), "unread": np.array([1])})


def session(low: Precision, pin: Precision, segments: int, kept_bytes: int) -> SwitchedSession:
    graph = network()
    kept = KeptActivations(kept_bytes)
    return SwitchedSession(
        graph, ConstantStore(graph), low, pin, threads=1, kept=kept, segments=segments
    )


@cache
def pair(low: Precision, pin: Precision) -> tuple[SwitchedSession, SwitchedSession]:
    """One that keeps activations at cuts, and one that always starts at the beginning."""
    return session(low, pin, 16, 20_000), session(low, pin, 1, 0)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in other.items()}


def layers() -> list[str]:
    return [layer.name for layer in network().layers]


@pytest.fixture
def run_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts how often each segment is run."""
    places: list[int] = []
    plain = SegmentSession.run

    def counted(self: SegmentSession, *arguments: object) -> object:
        places.append(id(self))
        return plain(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SegmentSession, "run", counted)
    yield places


Asked = list[tuple[int, frozenset[str]]]


def asked_of(names: Sequence[str]) -> st.SearchStrategy[Asked]:
    """A few samples' seeds, each with the layers that are reduced."""
    one = st.tuples(st.integers(0, 1), st.frozensets(st.sampled_from(names)))
    return st.lists(one, min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PAIRS), asked_of(layers()))
def test_a_late_start_changes_no_bit(precisions: tuple[Precision, Precision], asked: Asked) -> None:
    late, plain = pair(*precisions)
    for seed, reduced in asked:
        # Everything but one late layer is the search's usual question.
        for these in (reduced, reduced ^ {layers()[-3]}):
            assert same(late.run(sample(seed), these), plain.run(sample(seed), these))


@pytest.mark.parametrize(("low", "pin"), PAIRS)
def test_switches_that_select_give_what_those_that_branch_give(
    low: Precision, pin: Precision, run_segments: list[int]
) -> None:
    """As on a GPU, where nothing is cut."""
    graph = network()
    device = Device(name="planted")
    selects = SwitchedSession(graph, ConstantStore(graph, device), low, pin, device=device)
    plans = (frozenset(layers()[::2]), frozenset(layers()), frozenset[str]())
    found = [selects.run(sample(7), reduced) for reduced in plans]
    assert len(run_segments) == len(plans)
    _, branches = pair(low, pin)
    for outputs, reduced in zip(found, plans, strict=True):
        assert same(outputs, branches.run(sample(7), reduced))


def test_an_evaluation_starts_where_its_plan_first_differs(run_segments: list[int]) -> None:
    late = session(*PAIRS[0], 16, 1 << 20)
    names = layers()
    late.run(sample(0), frozenset(names))
    every = len(run_segments)
    assert every > 3
    run_segments.clear()
    late.run(sample(0), frozenset(names[:-1]))
    assert len(run_segments) == 1
    late.run(sample(0), frozenset(names[1:]))
    assert len(run_segments) == 1 + every, "the first layer changes everything"
    run_segments.clear()
    late.run(sample(1), frozenset(names[:-1]))
    assert len(run_segments) == every, "another input shares nothing"


def test_what_is_kept_stays_within_its_budget(run_segments: list[int]) -> None:
    owner = owned(np.zeros(100, np.float32))
    kept = KeptActivations(1_000)
    for key in "abc":  # of 400 bytes each
        kept.keep(key, {"x": value_of(owner)})
        kept.first_of(["a"])  # is used last
    assert [kept.first_of([key]) is None for key in "abc"] == [False, True, False]
    graph, names = network(), layers()
    late = SwitchedSession(graph, ConstantStore(graph), *PAIRS[0], threads=1, kept=kept)
    late.run(sample(0), frozenset(names))
    every = len(run_segments)
    kept.clear()
    late.run(sample(0), frozenset(names))
    assert len(run_segments) == 2 * every


def test_sensitivities_are_runs_with_one_layer_reduced() -> None:
    late, plain = pair(*PAIRS[0])
    found = dict(late.sensitivities(sample(4), layers()))
    assert set(found) == set(layers())
    for name, outputs in found.items():
        assert outputs is not None
        assert same(outputs, plain.run(sample(4), frozenset({name})))


@pytest.mark.parametrize("precisions", PAIRS, ids=str)
@pytest.mark.parametrize("between", [TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT32])
def test_casts_that_undo_each_other_are_read_by_bodies(
    precisions: tuple[Precision, Precision], between: int
) -> None:
    """ONNX Runtime takes the second away where the first reads an input of its session."""
    text = f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y) {{
            there = Cast <to = {between}> (x)
            back = Cast <to = 1> (there)
            y = Tanh(back)
        }}
    """
    graph = Graph(onnx.parser.parse_model(text))
    x = Sample("s", {"x": np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)})
    device = Device(name="planted")
    selects = SwitchedSession(graph, ConstantStore(graph, device), *precisions, device=device)
    branches = SwitchedSession(graph, ConstantStore(graph), *precisions)
    back = x.arrays["x"].astype(helper.tensor_dtype_to_np_dtype(between)).astype(np.float32)
    exact = branches.run(x, frozenset())["y"]
    assert np.allclose(exact, np.tanh(back), atol=1e-3)
    for reduced in (frozenset[str](), frozenset(layer.name for layer in graph.layers)):
        assert same(selects.run(x, reduced), branches.run(x, reduced))


def test_segments_without_switches_are_told_apart(run_segments: list[int]) -> None:
    """Whatever was kept at the first of their cuts was taken for what is alive at the last."""
    nodes = [helper.make_node("Cast", ["x"], ["d0"], "in", to=TensorProto.DOUBLE)]
    nodes += [helper.make_node("Neg", [f"d{i}"], [f"d{i + 1}"], f"neg{i}") for i in range(200)]
    nodes += [helper.make_node("Cast", ["d200"], ["f"], "out", to=TensorProto.FLOAT)]
    nodes += [helper.make_node("Exp", ["f"], ["y"], "exp")]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy"]
    graph = Graph(
        helper.make_model(
            helper.make_graph(nodes, "late", values[:1], values[1:]),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=9,
        )
    )
    session = SwitchedSession(graph, ConstantStore(graph), Precision.FP16, Precision.FP32)
    sample = Sample("s", {"x": np.linspace(-2.0, 2.0, 6, dtype=np.float32).reshape(2, 3)})
    for _ in range(3):
        for reduced in ((), ("exp",)):
            outputs = session.run(sample, frozenset(reduced))
            np.testing.assert_allclose(outputs["y"], np.exp(sample.arrays["x"]), rtol=2e-3)
            assert len(run_segments) > 2
