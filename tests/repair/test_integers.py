"""Rule *integers*: what computes lengths, positions and indices stays in FP32, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

import bisect_trt
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.graph import to_emulated, to_typed
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import digest_of
from bisect_trt.model.tensor_types import infer_types
from bisect_trt.repair.edits import Proposal, Ranges, Rule
from bisect_trt.repair.integers import propose_integers
from bisect_trt.repair.rules import PROPOSE, edited
from bisect_trt.report.headline import headline
from bisect_trt.report.record import read_run
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import load
from bisect_trt.steps.repair import Refused, Repair, find_repair
from fixtures.build import GraphBuilder
from tests.command import call
from tests.copies import EIGHT, FEW
from tests.repair.graphs import graph_of, networks, ranges_of, run
from tests.repair.test_commands_know_it import Ran, made
from tests.repair.test_rules import normal

FLOAT, INT64, BOOL, DOUBLE = (
    TensorProto.FLOAT,
    TensorProto.INT64,
    TensorProto.BOOL,
    TensorProto.DOUBLE,
)
Make = Callable[[GraphBuilder, str], str]


def length(b: GraphBuilder) -> str:
    """The number of frames of ``x`` as a float vector of one value: /Cast."""
    frames = b.op("Gather", b.op("Shape", "x"), b.weight([1], np.int64))
    return str(b.op("Cast", frames, to=FLOAT))


def integers(b: GraphBuilder, tensor: str) -> str:
    """``tensor`` as a vector of integers."""
    return flat(b, b.op("Cast", tensor, to=INT64))


def flat(b: GraphBuilder, tensor: str) -> str:
    return str(b.op("Reshape", tensor, b.weight([-1], np.int64)))


def whole_model(b: GraphBuilder, outputs: dict[str, str]) -> onnx.ModelProto:
    """A model that takes ``x`` of a dynamic length; ``outputs`` name tensors and their types."""
    named = {b.rename_output(tensor, name): [None] for name, tensor in outputs.items()}
    shape = [1, "T"]
    return b.model({"x": shape}, named, integers=[n for n in named if n.startswith("int")])


def frames(count: int, seed: int = 1) -> dict[str, NDArray[Any]]:
    return {"x": normal(seed, 1, count)}


def kept_by_rule(model: onnx.ModelProto, count: int = 3001) -> set[str]:
    """The layers that the rule keeps in FP32; the graph must stay as it is."""
    graph = graph_of(model)
    found = edited(graph, (Rule.INTEGERS,), lambda g: ranges_of(g, [frames(count)]))
    assert found.graph.proto.SerializeToString() == graph.proto.SerializeToString()
    assert found.kept <= {layer.name for layer in graph.layers_at(Precision.FP16)}
    return set(found.kept)


def kept_where(make: Make, count: int = 3001, arithmetic: str = "Mul") -> set[str]:
    """What is kept where ``make`` reads three times a length, /Cast and /Mul."""
    b = GraphBuilder(1, opset=17)
    tensor = b.op(arithmetic, length(b), b.weight(3.0))
    return kept_by_rule(whole_model(b, {"int": make(b, tensor)}), count)


def positions(b: GraphBuilder) -> str:
    ends = (b.weight(np.array(n), np.int64) for n in (0, 4000, 1))
    return str(b.op("Cast", b.op("Range", *ends), to=FLOAT))


def compared(operator: str, *, swapped: bool = False) -> Make:
    def make(b: GraphBuilder, tensor: str) -> str:
        sides = [positions(b), tensor]
        return integers(b, b.op(operator, *(reversed(sides) if swapped else sides)))

    return make


def ranged(b: GraphBuilder, tensor: str) -> str:
    limit = b.op("Squeeze", tensor)
    return integers(b, b.op("Range", b.weight(0.0), limit, b.weight(500.0)))


def resized(b: GraphBuilder, tensor: str) -> str:
    scales = b.op("Concat", b.weight(np.ones(1)), b.op("Div", tensor, b.weight(4000.0)), axis=0)
    return flat(b, b.op("Shape", b.op("Resize", "x", "", scales)))


def hot(b: GraphBuilder, tensor: str) -> str:
    values = b.weight(np.array([0, 1]), np.int32)
    chosen = b.op("OneHot", b.weight(np.array([2]), np.int64), tensor, values)
    return integers(b, chosen)


def counted_by_mask(b: GraphBuilder, tensor: str) -> str:
    """Positions among the frames above 0, by a cumulative sum of truth values."""
    voiced = b.op("Cast", b.op("Greater", "x", b.weight(0.0)), to=FLOAT)
    places = b.op("Mul", b.op("CumSum", voiced, b.weight(np.array(1), np.int64)), voiced)
    return integers(b, b.op("Add", places, tensor))


KEPT: dict[str, Make] = {
    "Cast": integers,
    "Cast to Boolean": lambda b, t: integers(b, b.op("Cast", t, to=BOOL)),
    "Floor, Ceil, Round": lambda b, t: integers(
        b, b.op("Round", b.op("Ceil", b.op("Floor", b.op("Div", t, b.weight(7.0)))))
    ),
    **{op: compared(op) for op in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")},
    "Less, swapped": compared("Less", swapped=True),
    "a constant": lambda b, t: integers(b, b.op("Less", t, b.weight(9000.0))),
    "Range": ranged,
    "sizes of Resize": resized,
    "depth of OneHot": hot,
    "CumSum of truth values": counted_by_mask,
    "Shape beside it": lambda b, t: integers(
        b, b.op("Expand", t, b.op("Add", b.op("Shape", t), b.weight([1], np.int64)))
    ),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_ends_in_integers_is_kept_whole(kind: str) -> None:
    b = GraphBuilder(1, opset=17)
    tensor = b.op("Mul", length(b), b.weight(3.0))
    model = whole_model(b, {"int": KEPT[kind](b, tensor)})
    layers = {layer.name for layer in Graph(model).layers_at(Precision.FP16)}
    assert kept_by_rule(model) == layers - {"/Resize"} and {"/Cast", "/Mul"} <= layers


def by_matrix(b: GraphBuilder, tensor: str) -> str:
    return integers(
        b, b.op("MatMul", b.op("Unsqueeze", tensor, b.weight([0], np.int64)), b.normal(1, 4))
    )


def by_argmax(b: GraphBuilder, tensor: str) -> str:
    return str(b.op("ArgMax", tensor, axis=0))


def by_double(b: GraphBuilder, tensor: str) -> str:
    return integers(b, b.op("Cast", tensor, to=DOUBLE))


def by_shape(b: GraphBuilder, tensor: str) -> str:
    return str(b.op("Shape", tensor))


def in_quantised(b: GraphBuilder, tensor: str) -> str:
    zero = b.weight(np.array(0), np.int8)
    return integers(
        b,
        b.op(
            "DequantizeLinear",
            b.op("QuantizeLinear", tensor, b.weight(64.0), zero),
            b.weight(64.0),
            zero,
        ),
    )


@pytest.mark.parametrize("make", [by_matrix, by_argmax, by_double, by_shape, in_quantised])
def test_other_consumers_keep_nothing(make: Make) -> None:
    assert kept_where(make) == set()


def test_one_reader_of_data_frees_the_layer_and_what_is_before_it() -> None:
    b = GraphBuilder(2, opset=17)
    first = b.op("Mul", length(b), b.weight(3.0))
    second = b.op("Add", first, b.weight(0.5))
    whole = integers(b, b.op("Floor", second))
    model = whole_model(b, {"int": whole, "y": b.op("Sin", first)})
    assert kept_by_rule(model) == {"/Add", "/Floor"}


def test_an_output_in_float_is_a_reader() -> None:
    b = GraphBuilder(3, opset=17)
    tensor = b.op("Mul", length(b), b.weight(3.0))
    whole = integers(b, tensor)
    assert kept_by_rule(whole_model(b, {"int": whole, "y": tensor})) == set()


@pytest.mark.parametrize("inside", [False, True])
def test_a_body_is_a_reader_and_is_never_kept(inside: bool) -> None:
    b = GraphBuilder(4, opset=17)
    tensor = b.op("Mul", length(b), b.weight(3.0))
    bodies = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Add", [tensor if inside else "x", "x"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, FLOAT, [1, None])],
        )
        for name in ("then", "else")
    }
    chosen = b.op("If", b.op("Cast", b.weight(np.array(1), np.int64), to=BOOL), **bodies)
    outputs = {"int": integers(b, tensor), "int_of_body": integers(b, chosen)}
    assert kept_by_rule(whole_model(b, outputs)) == (set() if inside else {"/Cast", "/Mul"})


def test_what_a_matrix_computes_is_data_until_it_is_rounded() -> None:
    """A duration model: only the whole numbers behind Ceil are counted exactly."""
    b = GraphBuilder(5, opset=17)
    flat = b.op("Transpose", "x", perm=[1, 0])
    spoken = b.op("Mul", b.op("Exp", b.op("MatMul", flat, b.normal(1, 1))), b.weight(3.0))
    spoken = b.op("Ceil", spoken)
    total = b.op("ReduceSum", spoken, keepdims=0)
    model = whole_model(b, {"int": integers(b, b.op("Clip", total, b.weight(1.0)))})
    assert kept_by_rule(model) == {"/Ceil", "/ReduceSum", "/Clip"}


@pytest.mark.parametrize("other", ["threshold", "integer", "positions"])
def test_activations_compared_with_a_threshold_are_data(other: str) -> None:
    """A number of the input is a decision about data, unless it is compared with positions."""
    b = GraphBuilder(6, opset=17)
    moved = b.op("ReduceMax", b.op("Mul", "x", b.weight(5000.0)), keepdims=0)
    against = {
        "threshold": lambda: b.weight(0.5),
        "integer": lambda: b.op("Cast", b.weight(np.array(2), np.int64), to=FLOAT),
        "positions": lambda: positions(b),
    }[other]()
    model = whole_model(b, {"int": integers(b, b.op("Less", against, moved))})
    expected = {"/Mul", "/ReduceMax", "/Cast"} if other == "positions" else set()
    assert kept_by_rule(model) == expected


@pytest.mark.parametrize(
    ("count", "arithmetic", "at_stake"),
    [
        (512, "Add", False),
        (513, "Add", True),
        (170, "Mul", False),
        (171, "Mul", True),
        (12, "Div", True),
    ],
)
def test_whole_numbers_far_below_2048_are_not_at_stake(
    count: int, arithmetic: str, at_stake: bool
) -> None:
    b = GraphBuilder(7, opset=17)
    amount = b.weight(-1.0 if arithmetic == "Add" else 3.0)
    model = whole_model(b, {"int": integers(b, b.op(arithmetic, length(b), amount))})
    assert kept_by_rule(model, count) == ({"/Cast", f"/{arithmetic}"} if at_stake else set())


def test_each_chain_is_an_edit_of_its_own() -> None:
    b = GraphBuilder(8, opset=17)
    lengths = [b.op("Mul", length(b), b.weight(2.0)) for _ in "ab"]
    small = b.op("Cast", b.op("Greater", "x", b.weight(0.0)), to=FLOAT)
    joined = b.op("Sub", b.op("Add", *lengths), b.weight(1.0))
    alone = b.op("Mul", length(b), b.weight(3.0))
    made_integers = [integers(b, tensor) for tensor in (joined, alone, small)]
    model = whole_model(b, {f"int{k}": t for k, t in enumerate(made_integers)})
    graph = graph_of(model)
    edits, refusals = propose_integers(graph, ranges_of(graph, [frames(3001)]))
    first = ("/Cast", "/Mul", "/Cast_1", "/Mul_1", "/Add", "/Sub")
    assert [edit.kept for edit in edits] == [first, ("/Cast_3", "/Mul_2")] and not refusals
    assert all(edit.kept == edit.nodes and not edit.replaced for edit in edits)


STEPS = ("Add", "Sub", "Mul", "Div", "Max", "Floor", "Ceil", "Abs")


@st.composite
def with_length(draw: Any) -> tuple[onnx.ModelProto, int]:
    """A network beside random arithmetic on its length, which gives an integer."""
    b = GraphBuilder(draw(st.integers(0, 2**16)), opset=draw(st.sampled_from([13, 17, 21])))
    tensor = length(b)
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6)):
        constant = float(draw(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 7.0, 160.0])))
        amount = [] if step in ("Floor", "Ceil", "Abs") else [b.weight(constant)]
        tensor = b.op(step, tensor, *amount)
    scored = b.op("Tanh", b.op("MatMul", b.op("Transpose", "x", perm=[1, 0]), b.normal(1, 3)))
    named = {"int": [None], "y": [None, 3]}
    b.rename_output(integers(b, tensor), "int")
    b.rename_output(b.op("Mul", scored, b.weight(0.3)), "y")
    return b.model({"x": [1, "T"]}, named, integers=["int"]), draw(st.integers(1, 5000))


@given(with_length())
@settings(max_examples=60, deadline=None)
def test_kept_lengths_are_exact_and_the_other_layers_do_not_change(
    made_of: tuple[onnx.ModelProto, int],
) -> None:
    model, count = made_of
    kept, feed = frozenset(kept_by_rule(model, count)), frames(count)
    plain, plan = PrecisionPlan(Precision.FP16), PrecisionPlan(Precision.FP16, kept)
    exact, before = run(model, feed), run(to_emulated(model, plain), feed)
    after = run(to_emulated(model, plan), feed)
    # Not kept means not at stake: then everything reduced counts exactly.
    np.testing.assert_array_equal(after["int"], exact["int"])
    np.testing.assert_array_equal(after["y"], before["y"])
    typed = to_typed(model, plan)
    onnx.checker.check_model(typed, full_check=True)
    types = infer_types(typed)
    layers = {layer.name for layer in Graph(model).layers_at(Precision.FP16)}
    found = {n.name: types.type_of(n.output[0]) for n in typed.graph.node if n.name in layers}
    assert {name for name, kind in found.items() if kind == FLOAT and name not in kept} <= {"/Mul"}
    assert all(found[name] == FLOAT for name in kept)


@given(networks())
@settings(max_examples=30, deadline=None)
def test_networks_without_integers_keep_nothing(
    made_of: tuple[onnx.ModelProto, list[dict[str, NDArray[np.float32]]]],
) -> None:
    model, feeds = made_of
    graph = graph_of(model)
    assert propose_integers(graph, ranges_of(graph, feeds)) == ((), ())


# The proof, and whole runs


def masked_mean() -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """Frames beyond half of the length, computed in float, do not count in a mean."""
    b = GraphBuilder(9, opset=17)
    b.scope = "/len"
    half = b.op("Div", b.op("Sub", length(b), b.weight(1.0)), b.weight(2.0))
    whole = integers(b, b.op("Floor", b.op("Add", half, b.weight(1.0))))
    b.scope = ""
    h = b.op("Tanh", b.op("MatMul", b.op("Transpose", "x", perm=[1, 0]), b.normal(1, 4)))
    b.rename_output(b.op("ReduceMean", h, axes=[0], keepdims=0), "y")
    b.rename_output(whole, "int")
    model = b.model({"x": [1, "T"]}, {"int": [1], "y": [4]}, integers=["int"])
    return model, frames(5002)


CHAIN = ["/len/Cast", "/len/Sub", "/len/Div", "/len/Add", "/len/Floor"]


def repair_of(folder: Path, **options: Any) -> Repair | Refused:
    model, feed = masked_mean()
    given_inputs: Any = [feed]
    its = Settings(model=model, inputs=given_inputs, out=folder, runner="emulated", **options)
    problem = load(its, Observer())
    with open_context(problem, Observer()) as context:
        return find_repair(context.problem, context, tuple(PROPOSE))


def test_the_proof_runs_the_chain_in_fp32(tmp_path: Path) -> None:
    found = repair_of(tmp_path)
    assert isinstance(found, Repair)
    assert found.rules == (Rule.INTEGERS,) and found.kept == set(CHAIN)
    assert found.original.missed == found.tried and found.repaired.missed == 0
    assert found.change.share == 0.0 and found.headroom >= 2


def test_layers_that_the_user_keeps_are_the_user_s(tmp_path: Path) -> None:
    reduced = repair_of(tmp_path / "reduced", keep_reduced="^/len/Floor$")
    assert isinstance(reduced, Refused)
    assert [r.reason for r in reduced.refused] == ["--keep-reduced names one of its layers"]
    pinned = repair_of(tmp_path / "pinned", keep_fp32="^/len/")
    assert isinstance(pinned, Refused), "everything is right with those"


def keeps_data(graph: Graph, ranges: Ranges) -> Proposal:
    """A wrong rule: it keeps the network's layers in place of the lengths'."""
    edits, refusals = propose_integers(graph, ranges)
    return tuple(replace(e, nodes=("/Tanh",), kept=("/Tanh",)) for e in edits), refusals


def forgets_one(graph: Graph, ranges: Ranges) -> Proposal:
    """A wrong rule: it leaves out the first layer of each chain."""
    edits, refusals = propose_integers(graph, ranges)
    return tuple(replace(e, nodes=e.nodes[1:], kept=e.kept[1:]) for e in edits), refusals


@pytest.mark.parametrize("wrong", [keeps_data, forgets_one])
def test_a_wrong_rule_is_taken_back(
    wrong: Callable[[Graph, Ranges], Proposal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROPOSE, Rule.INTEGERS, wrong)  # type: ignore[arg-type]
    found = repair_of(tmp_path)
    assert isinstance(found, Refused)
    assert [r.reason for r in found.refused] == ["taken back: without it the error is as small"]


def test_indices_that_fp32_cannot_take_twice_as_large_are_proved(tmp_path: Path) -> None:
    """Inputs twice as large would leave the table in FP32 too."""
    b = GraphBuilder(10, opset=17)
    row = b.op("Mul", "x", b.weight(100.0))
    picked = b.op("Gather", b.normal(5000), integers(b, b.op("Add", row, b.weight(1.0))), axis=0)
    b.rename_output(picked, "y")
    model = b.model({"x": [3]}, {"y": [3]})
    feed = {"x": np.array([27.0, 31.0, 45.0], np.float32)}
    its = Settings(model=model, inputs=[feed], out=tmp_path, runner="emulated")
    problem = load(its, Observer())
    with open_context(problem, Observer()) as context:
        found = find_repair(context.problem, context, tuple(PROPOSE))
    assert isinstance(found, Repair) and found.kept == {"/Mul", "/Add"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run whose only repair keeps layers; to be read only."""
    return made(*masked_mean(), tmp_path_factory.mktemp("lengths"), "--repair", "integers")


def test_a_run_counts_the_kept_layers_in_its_row(ran: Ran) -> None:
    rows = {row["name"]: row for row in json.loads((ran.out / "run.json").read_text())["choices"]}
    assert (
        sorted(rows["repaired"]["pinned"]) == sorted(CHAIN) and rows["repaired"]["kept_fp32"] == 5
    )
    assert rows["as it is"]["passes"] == "no" and rows["repaired"]["passes"] != "no"
    (row,) = read_run(ran.out).repair.rows
    assert row.rule == "integers" and row.identity == "kept in FP32: it computes integers"
    assert list(row.nodes) == CHAIN and row.nodes_added == 0


def test_the_repaired_model_is_the_original_but_for_what_it_says(ran: Ran, tmp_path: Path) -> None:
    original, repaired = onnx.load(ran.model), onnx.load(ran.repaired)
    assert {p.key for p in repaired.metadata_props} >= {"bisect_trt.repairs"}
    del repaired.metadata_props[:]
    assert repaired.SerializeToString(True) == original.SerializeToString(True)
    ended = call("repair", ran.repaired, "--input", ran.inputs, "--out", tmp_path / "again")
    assert ended.exit_code == 0, ended.output
    assert "REPAIRED   integers: everything in FP16 but 5 layers misses 0 of" in ended.output
    (row,) = json.loads((tmp_path / "again" / "repair.json").read_text())["repairs"]
    assert row["nodes"] == CHAIN, "the same again, and no more"


def test_verify_and_export_take_the_row(ran: Ran, tmp_path: Path) -> None:
    target = tmp_path / "typed.onnx"
    code, output = ran.ends(
        "export", ran.model, "--format", "onnx", *("--choice", "repaired", "--output", target)
    )
    assert code == 0, output
    types = infer_types(typed := onnx.load(target))
    kinds = {n.name: types.type_of(n.output[0]) for n in typed.graph.node}
    assert [kinds[name] for name in CHAIN] == [FLOAT] * 5
    assert kinds["/MatMul"] == TensorProto.FLOAT16
    ran = ran.copy(tmp_path)
    plan = json.loads(ran.plan.read_text())
    plan |= {"graph": "repaired", "pinned": CHAIN, "repaired_sha256": digest_of(ran.repaired)}
    ran.plan.write_text(json.dumps(plan))
    for model in (ran.model, ran.repaired):
        code, output = ran.ends("verify", model)
        assert code == 0 and "The plan holds." in output, output


def test_lengths_are_kept_beside_an_edit(tmp_path: Path) -> None:
    """Squares leave the range, and a length is counted in float: two rules together."""
    b = GraphBuilder(11, opset=17)
    b.scope = "/len"
    whole = integers(b, b.op("Floor", b.op("Div", length(b), b.weight(2.0))))
    b.scope = ""
    h = b.op("MatMul", b.op("Transpose", "x", perm=[1, 0]), b.normal(1, 8, scale=400.0))
    mean = b.op("ReduceMean", b.op("Mul", h, h), axes=[-1], keepdims=1)
    h = b.op("Div", h, b.op("Sqrt", b.op("Add", mean, b.weight(0.1))))
    b.rename_output(b.op("ReduceMean", h, axes=[0], keepdims=0), "y")
    b.rename_output(whole, "int")
    model = b.model({"x": [1, "T"]}, {"int": [1], "y": [8]}, integers=["int"])
    feed = {"x": np.abs(normal(12, 1, 5002)) + 1}
    found = bisect_trt.bisect(model, [feed], runner="emulated", out=tmp_path, limits=EIGHT)
    assert found.repair.rules == ["scale", "integers"] and found.is_repaired and found.passed
    assert sorted(found.pinned) == ["/len/Cast", "/len/Div", "/len/Floor"]
    assert found.plan.chosen == frozenset()
    words = "The graph is repaired (scale, integers): 3 layers stay in FP32 and the requirement is"
    assert words in headline(found) and headline(read_run(tmp_path)) == headline(found)
    typed = infer_types(onnx.load(tmp_path / "model.typed.onnx"))
    kinds = [typed.type_of(f"/len/{op}_output_0") for op in ("Cast", "Div", "Floor")]
    assert kinds == [FLOAT] * 3


@pytest.mark.parametrize(("percent", "repaired"), [(0.0, False), (100.0, True)])
def test_a_repair_that_keeps_more_than_may_be_spent_is_no_answer(
    tmp_path: Path, percent: float, *, repaired: bool
) -> None:
    model, feed = masked_mean()
    options = {"augmented": "none", "weights": "nearest", "max_cost": percent}
    found = bisect_trt.bisect(
        model, [feed], runner="emulated", out=tmp_path, limits=EIGHT, **options
    )
    assert {choice.name for choice in found.choice_rows} > {"repaired"}, "it is shown in any case"
    assert found.is_repaired == repaired and found.passed == repaired


def test_nothing_else_is_kept_beside_the_chain(tmp_path: Path) -> None:
    """The search on the repaired graph adds no layer, and without repair finds the same ones."""
    model, feed = masked_mean()
    found = bisect_trt.bisect(
        model, [feed], runner="emulated", out=tmp_path, limits=EIGHT, augmented="none"
    )
    rows = {choice.name: choice for choice in found.choice_rows}
    assert rows["repaired"].pinned and rows["repaired"].plan.chosen == frozenset()
    again = bisect_trt.bisect(
        model, [feed], runner="emulated", out=tmp_path / "none", limits=FEW, repair="none"
    )
    assert again.pinned and set(again.pinned) <= set(CHAIN), "the search finds them too"
