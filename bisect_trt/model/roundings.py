"""What is rounded when: operands, results, operators that only move values."""

from __future__ import annotations

from dataclasses import dataclass, field

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import EXACT, Movers, Precision, PrecisionPlan
from bisect_trt.model.graph import (
    CAST_HAS_BF16,
    PRODUCTS_BROADCAST,
    Graph,
    lacks_bf16,
    operators,
    raised,
)
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import FLOAT, HAVE_BF16, MOVES
from bisect_trt.model.tensor_types import captured_names


@dataclass(frozen=True)
class Rounding:
    """``tensor`` rounded on account of ``layer``, which reads or gives it in ``slot``.

    ``constant`` is true for a tensor of the file, which can be rounded before anything runs.
    ``maker`` is the layer that has rounded the tensor already where it is reduced too.
    """

    tensor: str
    layer: str
    slot: int
    constant: bool = False
    maker: str | None = None


@dataclass(frozen=True)
class NodeRoundings:
    """What one node of the main graph rounds where it is reduced, by slot; empty for no layer."""

    operands: dict[int, Rounding] = field(default_factory=dict)
    results: dict[int, Rounding] = field(default_factory=dict)


def is_rounded(state: Precision, wanted: Precision) -> bool:
    """Whether values that are rounded to ``state`` need no further rounding to ``wanted``.

    FP16 and BF16 values have at most 10 explicit mantissa bits, so they are TF32 values as well.
    """
    if wanted is Precision.FP32 or state is wanted:
        return True
    return wanted is Precision.TF32 and state.is_storage


def list_roundings(graph: Graph, precision: Precision) -> list[NodeRoundings]:
    """The roundings of every node of ``graph`` where it runs at ``precision``, in the file's order.

    The bodies of control flow are not opened: such a layer rounds inside as a whole.
    """
    makers: dict[str, str] = {}
    found = []
    for index, (node, name) in enumerate(zip(graph.proto.graph.node, graph.names, strict=True)):
        role = graph.role(index, precision)
        operands = {
            slot: Rounding(
                tensor := node.input[slot],
                name,
                slot,
                tensor in graph.float_constants,
                makers.get(tensor),
            )
            for slot in role.reduced_in
        }
        results = {slot: Rounding(node.output[slot], name, slot) for slot in role.reduced_out}
        makers.update((rounding.tensor, name) for rounding in results.values())
        found.append(NodeRoundings(operands, results))
    return found


_MOVE_TOO = frozenset({"Dropout"})
"""At inference."""


def list_movers(graph: Graph, precision: Precision) -> Movers:
    """The layers that move values and read no constant; none of TF32, which rounds operands."""
    if not precision.is_storage:
        return Movers()
    names, types = graph.names, graph.types
    layers = {x.index for x in graph.layers_at(precision)}
    maker: dict[str, str] = {}
    readers: dict[str, list[str]] = {name: [EXACT] for name in graph.outputs}
    nodes = graph.proto.graph.node
    for index, (node, name) in enumerate(zip(nodes, names, strict=True)):
        is_layer = index in layers
        reduced = graph.role(index, precision).reduced_in if is_layer else ()
        for slot, tensor in enumerate(node.input):
            if tensor and types.type_of(tensor) == FLOAT:
                readers.setdefault(tensor, []).append(name if slot in reduced else EXACT)
        for tensor in captured_names(node):
            readers.setdefault(tensor, []).append(name if is_layer else EXACT)
        if is_layer:
            maker.update((o, name) for o in node.output if o)
    sources: dict[str, tuple[str, ...]] = {}
    read_by: dict[str, tuple[str, ...]] = {}
    for index in sorted(layers):
        node, role = nodes[index], graph.role(index, precision)
        if node.op_type not in MOVES | _MOVE_TOO or role.kind is not Kind.LAYER:
            continue
        read = [node.input[slot] for slot in role.reduced_in]
        if any(tensor in graph.float_constants for tensor in read):
            continue
        sources[names[index]] = tuple(dict.fromkeys(maker.get(t, EXACT) for t in read))
        given = [r for o in node.output if o for r in readers.get(o, ())]
        read_by[names[index]] = tuple(dict.fromkeys(given))
    return Movers(sources, read_by)


def with_roundings(graph: Graph, base: Precision) -> Graph:
    """``graph``, or the model at the first opset in which roundings to ``base`` and TF32 can run.

    A model before opset 7 that cannot be converted stays as it is, without a TF32 baseline.

    Raises:
        BadInputError: BF16 is asked for and the opset cannot be raised.
    """
    if base is Precision.BF16:
        return graph.raised(CAST_HAS_BF16) if graph.opset < CAST_HAS_BF16 else graph
    if graph.opset >= PRODUCTS_BROADCAST:
        return graph
    try:
        return graph.raised(PRODUCTS_BROADCAST)
    except BadInputError:
        return graph


def with_bf16_operators(graph: Graph, plan: PrecisionPlan) -> Graph:
    """``graph``, or the model at opset 22 where a reduced operator has no BF16 form in its own.

    Raises:
        BadInputError: the opset cannot be raised.
    """
    return graph.raised(HAVE_BF16) if _lacks_bf16(graph, plan) else graph


def check_can_be_written(graph: Graph, plan: PrecisionPlan) -> None:
    """Refuse a model of which ``plan`` cannot be written, before a search is made for nothing.

    Raises:
        BadInputError: the opset cannot be raised.
    """
    if plan.base is Precision.BF16 and _lacks_bf16(graph, plan):
        raised(graph.proto, HAVE_BF16)  # not kept: that would be a second model for the whole run


def _lacks_bf16(graph: Graph, plan: PrecisionPlan) -> bool:
    """Whether a reduced operator has no BF16 form in the model's opset."""
    nodes = graph.proto.graph.node
    reduced = operators(nodes[x.index] for x in graph.layers if x.name not in plan.pinned)
    return lacks_bf16(reduced, graph.opset)


def with_new_nodes_pinned(source: Graph, converted: Graph, plan: PrecisionPlan) -> PrecisionPlan:
    """``plan`` with pins on the nodes that raising the opset added: they are nobody's layers."""
    if converted is source:
        return plan
    return plan.with_pins(plan.pinned.union(set(converted.names).difference(source.names)))
