"""Makes a failing network smaller: first by blocks of the generator, then by nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import onnx
from onnx import helper

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.model.layers import node_names
from bisect_trt.model.load import load_model
from bisect_trt.search.minimise import one_minimal
from tests.fuzz.graphs import Recipe, generate
from tests.fuzz.net import Arrays, with_shapes
from tests.fuzz.relations import Case, Failure, failures
from tests.fuzz.transforms import reads
from tests.repair.graphs import run


def fewer_blocks(recipe: Recipe, fails: Callable[[Recipe], bool]) -> Recipe:
    """``recipe`` without every block that the failure does not need."""
    count = generate(recipe).drawn
    blocks = {str(number): number for number in range(count)}

    def without(kept: Collection[str]) -> Recipe:
        skipped = frozenset(number for name, number in blocks.items() if name not in kept)
        return replace(recipe, skipped=recipe.skipped | skipped)

    def asked(kept: frozenset[str]) -> bool:
        try:
            return fails(without(kept))
        except Exception:  # no network: the rest does not fit together
            return False

    found = one_minimal(list(blocks), asked, bool)
    return without(found.pinned)


def fewer_nodes(case: Case, failure: Failure) -> Case:
    """``case`` with a one-minimal set of nodes that still fails like ``failure``."""
    whole = load_model(case.model).proto
    named = dict(zip(node_names(whole.graph.node), whole.graph.node, strict=True))
    recorded = list(_recorded(whole, case.feeds))

    def asked(kept: frozenset[str]) -> bool:
        try:
            smaller = _part(case, named, kept, whole, recorded)
            return any(f.is_like(failure) for f in failures(smaller))
        except Exception:  # no model: a tensor without a type, or nothing left
            return False

    if not asked(frozenset(named)):
        return case
    found = one_minimal(list(named), asked, bool)
    return _part(case, named, found.pinned, whole, recorded)


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
