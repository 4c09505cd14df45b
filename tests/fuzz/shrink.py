"""Makes a failing network smaller: first by blocks of the generator, then by nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import onnx
from onnx import helper

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.model.layers import node_names
from bisect_trt.model.load import load_model
from bisect_trt.search.minimise import one_minimal
from tests.execute import run
from tests.fuzz.graphs import Recipe, generate
from tests.fuzz.net import Arrays, with_shapes
from tests.fuzz.relations import Case
from tests.fuzz.transforms import reads

RUN_OF_NODES = 8
"""Nodes that are taken away together at first."""


def fewer_blocks(recipe: Recipe, fails: Callable[[Recipe], bool], ends: float) -> Recipe:
    """``recipe`` without blocks that the failure does not need; none goes when the clock is at
    ``ends``.
    """
    count = generate(recipe).drawn
    blocks = {str(number): number for number in range(count)}

    def without(kept: Collection[str]) -> Recipe:
        skipped = frozenset(number for name, number in blocks.items() if name not in kept)
        return replace(recipe, skipped=recipe.skipped | skipped)

    def asked(kept: frozenset[str]) -> bool:
        try:
            return time.monotonic() < ends and fails(without(kept))
        except Exception:  # no network: the rest does not fit together
            return False

    found = one_minimal(list(blocks), asked, bool)
    return without(found.pinned)


def fewer_nodes(
    case: Case, fails: Callable[[Case], bool], ends: float, needed: Collection[str] = ()
) -> Case:
    """``case`` without nodes that ``fails`` does not need: none of ``needed`` goes, and none at all
    when the clock is at ``ends``.
    """
    whole = load_model(case.model).proto
    named = dict(zip(node_names(whole.graph.node), whole.graph.node, strict=True))
    try:
        recorded = list(_recorded(whole, case.feeds))
    except Exception:  # ONNX Runtime refuses what failed, or its inner tensors as outputs
        return case

    def asked(kept: Collection[str]) -> bool:
        try:
            return time.monotonic() < ends and fails(_part(case, named, kept, whole, recorded))
        except Exception:  # no model: a tensor without a type, or nothing left
            return False

    kept = [name for name in named if name not in needed]
    if not asked(named):
        return case
    for size in (RUN_OF_NODES, 1):
        runs = {str(start): kept[start : start + size] for start in range(0, len(kept), size)}

        def joined(chosen: Collection[str], runs: dict[str, list[str]] = runs) -> list[str]:
            return [name for start in chosen for name in runs[start]]

        found = one_minimal(list(runs), lambda chosen: asked({*needed, *joined(chosen)}), bool)
        kept = joined(found.pinned)
    return _part(case, named, {*needed, *kept}, whole, recorded)


def _recorded(model: onnx.ModelProto, feeds: Collection[Arrays]) -> Iterator[Arrays]:
    """Every tensor of the main graph, by name, for each of ``feeds``."""
    more = onnx.ModelProto()
    more.CopyFrom(model)
    present = {o.name for o in more.graph.output}
    inner = [o for node in more.graph.node for o in node.output if o and o not in present]
    more.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    return (run(more, feed) | feed for feed in feeds)


def _part(
    case: Case,
    named: dict[str, onnx.NodeProto],
    kept: Collection[str],
    whole: onnx.ModelProto,
    recorded: list[Arrays],
) -> Case:
    """The ``kept`` nodes alone, fed with what the others gave."""
    nodes = []
    for name, node in named.items():
        if name in kept:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = name
            nodes.append(copy)
    read = set().union(*(reads(node) for node in nodes))
    made = {o for node in nodes for o in node.output if o}
    stored = [t for t in whole.graph.initializer if t.name in read]
    given = sorted(read - made - {t.name for t in stored})
    ends = sorted(made - read) + [o.name for o in whole.graph.output if o.name in made & read]
    kinds = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in recorded[0].items()}
    graph = helper.make_graph(
        nodes,
        "part",
        [helper.make_tensor_value_info(n, kinds[n], recorded[0][n].shape) for n in given],
        [helper.make_tensor_value_info(n, kinds[n], None) for n in ends],
        stored,
    )
    model = onnx.ModelProto()
    model.CopyFrom(whole)
    model.graph.CopyFrom(graph)
    plan = PrecisionPlan(case.plan.base, case.plan.pinned & set(kept))
    feeds = tuple(
        {n: a[n] for n in given}
        for a in recorded
        if all(a[n].shape == recorded[0][n].shape for n in given)
    )
    return Case(with_shapes(model), feeds, plan, case.seed)
