"""Costs of plans: work counted by hand, tables exact where they were measured, sums over blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.models.model_builder import Builder
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.cost import (
    BlockCost,
    CostTable,
    LayerWork,
    block_starts,
    crossing_values,
    engines_to_build,
    estimated_table,
    layer_works,
    measured_table,
)
from bisect_trt.model.graph import Graph
from tests.networks import parsed

FP16 = Precision.FP16


def plan(pinned: Sequence[str] | frozenset[str] = ()) -> PrecisionPlan:
    return PrecisionPlan(FP16, frozenset(pinned))


def graph_of(body: str, inputs: str = "float[4,8] x", outputs: str = "float[4,8] y") -> Graph:
    return Graph(parsed(body, inputs, outputs))


def network(stages: int = 10, width: int = 24) -> Graph:
    """A network of convolutions and point-wise layers, halved in size by every third stage."""
    to = Builder(np.random.default_rng(0))
    x, wide = "x", 3
    for stage in range(stages):
        convolved = to.convolution(x, wide, width, 3, stride=2 if stage % 3 == 2 else 1)
        x, wide = to.add("Add", to.add("Relu", convolved), convolved), width
    return Graph(to.model({"x": np.zeros((2, 3, 64, 64), np.float32)}, [x]))


NETWORK = network()
SHAPES = {"x": (2, 3, 64, 64)}
TABLE = estimated_table(NETWORK, SHAPES, FP16)
NAMES = [work.name for block in TABLE.blocks for work in block]


def halves(block: Sequence[LayerWork]) -> tuple[frozenset[str], frozenset[str]]:
    matrix = frozenset(work.name for work in block if work.is_matrix)
    return matrix, frozenset(work.name for work in block) - matrix


@pytest.mark.parametrize(
    ("body", "inputs", "products"),
    [
        ("y = MatMul(x, w)", "float[4,8] x, float[8,8] w", 4 * 8 * 8),
        ("y = Gemm <transA = 1> (x, w)", "float[8,4] x, float[8,8] w", 4 * 8 * 8),
        ('y = Einsum <equation = "ij,jk->ik"> (x, w)', "float[4,6] x, float[6,8] w", 4 * 6 * 8),
        ("y = Conv <group = 2> (x, w)", "float[1,4,8,10] x, float[6,2,3,3] w", 6 * 48 * 18),
        ("y = ConvTranspose (x, w)", "float[1,4,3,3] x, float[4,2,2,2] w", 36 * 2 * 4),
        (
            "y = LSTM <hidden_size = 5> (x, w, r)",
            "float[7,2,3] x, float[1,20,3] w, float[1,20,5] r",
            7 * 2 * (20 * 3 + 20 * 5),
        ),
    ],
)
def test_multiply_adds_of_matrix_layers(body: str, inputs: str, products: int) -> None:
    graph = graph_of(body, inputs, "float[a] y")
    graph.proto.graph.output[0].type.tensor_type.ClearField("shape")
    given = {
        i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim)
        for i in graph.proto.graph.input
    }
    (work,) = layer_works(Graph(graph.proto), given, FP16)
    assert work.is_matrix and work.multiply_adds == products


def test_bytes_by_precision() -> None:
    (work,) = layer_works(graph_of("y = Add(x, x)"), {"x": (4, 8)}, FP16)
    assert (work.values, work.multiply_adds, work.is_matrix) == (64, 0, False)
    assert work.bytes_at(FP16) == 128 and work.bytes_at(Precision.TF32) == 256


def test_sizes_are_those_of_the_given_inputs() -> None:
    graph = graph_of("y = Relu(x)", "float[n,c] x", "float[n,c] y")
    (small,), (large,) = (layer_works(graph, {"x": s}, FP16) for s in ((1, 2), (10, 20)))
    assert (small.values, large.values) == (4, 400)


def test_an_embedding_reads_the_rows_that_it_gives() -> None:
    graph = graph_of("y = Gather(t, x)", "float[1000,8] t, int64[4] x", "float[4,8] y")
    (work,) = layer_works(graph, {"t": (1000, 8), "x": (4,)}, FP16)
    assert work.values == 2 * 4 * 8


def test_a_tensor_of_unknown_shape_counts_like_what_it_is_made_from() -> None:
    graph = graph_of(
        "a = Compress(x, c) z = Relu(a) y = Identity(z)", "float[4,8] x, bool[3] c", "float[n] y"
    )
    works = {work.op: work for work in layer_works(graph, {"x": (4, 8), "c": (3,)}, FP16)}
    assert works["Relu"].values == 2 * 32


def test_everything_in_fp32_costs_everything_and_everything_reduced_nothing() -> None:
    assert TABLE.predicted(plan()) == 0.0 and TABLE.time(plan()) == 1.0
    assert TABLE.predicted(plan(NAMES)) == pytest.approx(TABLE.extra) and TABLE.extra > 0.0
    assert TABLE.saving_kept(plan()) == 1.0
    assert TABLE.saving_kept(plan(NAMES)) == pytest.approx(0.0, abs=1e-12)


def test_a_block_costs_its_entry() -> None:
    for block, cost in zip(TABLE.blocks, TABLE.costs, strict=True):
        matrix, others = halves(block)
        assert TABLE.predicted(plan(matrix | others)) == pytest.approx(cost.whole)
        assert TABLE.predicted(plan(matrix)) == pytest.approx(cost.matrix)
        assert TABLE.predicted(plan(others)) == pytest.approx(cost.others)


@given(st.lists(st.sampled_from(NAMES)))
def test_blocks_add_up(pinned: list[str]) -> None:
    kept = frozenset(pinned)
    parts = (kept & {work.name for work in block} for block in TABLE.blocks)
    assert TABLE.predicted(plan(kept)) == pytest.approx(
        sum(TABLE.predicted(plan(part)) for part in parts)
    )


@given(st.sets(st.sampled_from(NAMES)), st.sampled_from(NAMES))
def test_one_more_layer_is_never_estimated_cheaper(pinned: set[str], further: str) -> None:
    fewer, more = plan(frozenset(pinned)), plan(frozenset(pinned | {further}))
    assert TABLE.predicted(more) >= TABLE.predicted(fewer) - 1e-12


@given(st.permutations(range(len(NAMES))), st.sets(st.sampled_from(NAMES)))
def test_names_do_not_matter(order: list[int], pinned: set[str]) -> None:
    renamed = dict(zip(NAMES, (f"layer{number}" for number in order), strict=True))
    proto = onnx.ModelProto()
    proto.CopyFrom(NETWORK.proto)
    for node in proto.graph.node:
        node.name = renamed[node.name]
    table = estimated_table(Graph(proto), SHAPES, FP16)
    other = table.predicted(plan([renamed[name] for name in pinned]))
    assert other == pytest.approx(TABLE.predicted(plan(frozenset(pinned))))


def test_layers_that_the_table_does_not_know_cost_nothing() -> None:
    assert TABLE.predicted(plan(["elsewhere", NAMES[0]])) == TABLE.predicted(plan([NAMES[0]]))


def test_reshaping_is_free_and_copying_is_not() -> None:
    graph = graph_of(
        "a = Relu(x) b = Reshape(a, s) c = Transpose(b) y = Relu(c)",
        "float[4,8] x, int64[2] s",
        "float[p,q] y",
    )
    views, copies = (
        work
        for work in layer_works(graph, {"x": (4, 8), "s": (2,)}, FP16)
        if work.op in ("Reshape", "Transpose")
    )
    assert (views.moved, copies.moved > 0.0) == (0.0, True)
    table = estimated_table(graph, {"x": (4, 8), "s": (2,)}, FP16)
    assert table.predicted(plan([views.name])) == 0.0


def test_a_network_of_views_costs_nothing() -> None:
    table = estimated_table(graph_of("y = Identity(x)"), {"x": (4, 8)}, FP16)
    (name,) = (work.name for block in table.blocks for work in block)
    assert table.predicted(plan([name])) == 0.0 and math.isnan(table.saving_kept(plan([name])))


def test_a_network_without_layers_costs_nothing() -> None:
    table = estimated_table(
        graph_of("y = Add(x, x)", "int64[2] x", "int64[2] y"), {"x": (2,)}, FP16
    )
    assert table.blocks == () and table.predicted(plan()) == 0.0
    assert engines_to_build(table) == (frozenset(),)


@pytest.mark.parametrize("op", ["MatMul(x, x)", "Softmax(x)"])
def test_a_single_layer_is_a_whole_block(op: str) -> None:
    graph = graph_of(f"y = {op}", "float[64,64] x", "float[64,64] y")
    table = estimated_table(graph, {"x": (64, 64)}, FP16)
    (block,) = table.blocks
    assert table.predicted(plan([block[0].name])) == pytest.approx(table.extra) and table.extra > 0


def test_without_matrix_layers_the_cost_is_linear_in_what_moves() -> None:
    graph = graph_of("a = Softmax(x) b = Softmax(a) y = Softmax(b)")
    table = estimated_table(graph, {"x": (4, 8)}, FP16, count=1)
    names = [work.name for work in table.blocks[0]]
    for count in range(4):
        predicted = table.predicted(plan(names[:count]))
        assert predicted == pytest.approx(table.extra * count / 3)


def test_strict_fp32_costs_more_than_tf32() -> None:
    strict = estimated_table(NETWORK, SHAPES, FP16, kept=Precision.FP32)
    assert strict.extra > TABLE.extra
    of_tf32 = estimated_table(NETWORK, SHAPES, Precision.TF32)
    assert of_tf32.extra > 0 and all(cost.matrix == cost.whole for cost in of_tf32.costs)


def test_others_are_cheap_beside_matrix_layers() -> None:
    matrix, others = halves([work for block in TABLE.blocks for work in block])
    whole = TABLE.extra
    assert 0 < TABLE.predicted(plan(others)) < TABLE.predicted(plan(matrix)) < whole


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e6)), min_size=1, max_size=300),
    st.integers(1, 16),
)
def test_blocks_are_consecutive_and_cover_all(
    layers: list[tuple[float, float]], count: int
) -> None:
    works = [LayerWork(f"{n}", "Conv", m, m, 1, 1, 0, True) for n, (m, _) in enumerate(layers)]
    starts = block_starts(works, [alive for _, alive in layers], count)
    assert starts[0] == 0 and len(starts) <= count and starts[-1] < len(works)
    assert all(begin < end for begin, end in pairwise(starts))


def test_networks_are_cut_where_little_crosses() -> None:
    works = [LayerWork(f"{n}", "Conv", 1e6, 1e6, 1, 1, 0, True) for n in range(40)]
    crossing = [1e3 if number % 10 == 9 else 1e6 for number in range(40)]
    assert block_starts(works, crossing, 4) == (0, 10, 20, 30)


def test_what_crosses_is_made_before_and_read_later() -> None:
    graph = graph_of("a = Relu(x) b = Relu(a) c = Add(a, b) y = Relu(c)")
    assert crossing_values(graph, {"x": (4, 8)}, FP16) == (32.0, 64.0, 32.0, 32.0)


def test_a_network_has_blocks_of_similar_size() -> None:
    assert 8 <= len(TABLE.blocks) <= 16
    assert max(map(len, TABLE.blocks)) <= len(NAMES) / 3


def truth(seed: int) -> CostTable:
    """What the engines of a network might cost, in ms, far from the estimate."""
    random = np.random.default_rng(seed)
    whole = random.gamma(0.7, 0.5, len(TABLE.blocks))
    costs = np.stack([whole, whole * random.random(len(whole)), 0.1 * whole], axis=1)
    return TABLE.with_entries(costs, 4.0, "ms")


def test_engines_keep_blocks_or_halves() -> None:
    engines = engines_to_build(TABLE)
    matrix, others = halves([work for block in TABLE.blocks for work in block])
    assert engines[:4] == (frozenset(), frozenset(NAMES), matrix, others)
    assert 8 < len(engines) <= 12
    for pinned in engines:
        for block in TABLE.blocks:
            parts = halves(block)
            assert pinned & (parts[0] | parts[1]) in (*parts, parts[0] | parts[1], frozenset())


@given(st.integers(0, 1000))
def test_enough_engines_give_every_entry(seed: int) -> None:
    true = truth(seed)
    engines = [frozenset[str](), frozenset(NAMES)]
    for block in TABLE.blocks:
        matrix, others = halves(block)
        engines += [matrix, others, matrix | others]
    found = measured_table(TABLE, engines, [true.time(plan(p)) for p in engines])
    assert (found.unit, found.reduced) == ("ms", 4.0)
    for block in TABLE.blocks:
        for part in halves(block):
            expected = true.predicted(plan(part))
            assert found.predicted(plan(part)) == pytest.approx(expected, abs=0.05 * true.extra)


def test_twelve_engines_predict_further_ones_better_than_the_estimate() -> None:
    engines, off = engines_to_build(TABLE), np.zeros(2)
    for seed in range(10):
        true, random = truth(seed), np.random.default_rng(seed)
        found = measured_table(TABLE, engines, [true.time(plan(p)) for p in engines])
        scale = true.extra / TABLE.extra
        for _ in range(20):
            begin, end = np.sort(random.choice(len(NAMES) + 1, 2, replace=False))
            kept = plan(NAMES[begin:end])
            expected, estimated = true.predicted(kept), scale * TABLE.predicted(kept)
            off += np.abs([found.predicted(kept) - expected, estimated - expected]) / true.extra
    assert off[0] < 0.7 * off[1]


def test_what_the_engines_measured_is_given_back() -> None:
    true, engines = truth(3), engines_to_build(TABLE)
    found = measured_table(TABLE, engines, [true.time(plan(p)) for p in engines])
    for pinned in engines:
        assert found.time(plan(pinned)) == pytest.approx(
            true.time(plan(pinned)), abs=0.03 * true.extra
        )


def test_an_fp32_that_is_no_slower_gives_no_saving() -> None:
    engines = engines_to_build(TABLE)
    found = measured_table(TABLE, engines, [4.0] * len(engines))
    assert abs(found.extra) < 0.02 * 4.0


def test_a_table_needs_the_two_ends() -> None:
    with pytest.raises(ValueError, match="nothing pinned"):
        measured_table(TABLE, [frozenset(NAMES)], [1.0])


def test_a_half_without_work_leaves_the_other_the_whole() -> None:
    (only,) = (
        estimated_table(graph_of("y = Softmax(x)"), {"x": (4, 8)}, FP16)
        .with_entries(np.array([[1.0, 2.0, 3.0]]), 1.0, "ms")
        .costs
    )
    assert only == BlockCost(whole=3.0, matrix=0.0, others=3.0)
