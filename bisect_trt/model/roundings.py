"""Lists what a plan rounds, and raises models to an opset that has the roundings."""

from __future__ import annotations

from dataclasses import dataclass, field

from bisect_trt.base.plan import EXACT, Movers, Precision
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import FLOAT, MOVES
from bisect_trt.model.walk import captured_names


@dataclass(frozen=True)
class Rounding:
    """A ``tensor`` that is rounded because ``layer`` reads or gives it in ``slot``.

    ``constant`` says that the tensor can be rounded before the model runs. ``maker`` is the layer
    that gives the tensor, and has rounded it already if reduced too.
    """

    tensor: str
    layer: str
    slot: int
    constant: bool = False
    maker: str | None = None


@dataclass(frozen=True)
class NodeRoundings:
    """The roundings of one reduced node of the main graph, by slot; empty if it is no layer."""

    operands: dict[int, Rounding] = field(default_factory=dict)
    results: dict[int, Rounding] = field(default_factory=dict)


def is_rounded(state: Precision, wanted: Precision) -> bool:
    """Whether values that are rounded to ``state`` are unchanged by rounding to ``wanted``."""
    if wanted is Precision.FP32 or state is wanted:
        return True
    # FP16 and BF16 have at most 10 explicit mantissa bits, so their values are TF32 values too.
    return wanted is Precision.TF32 and state.is_storage


def list_roundings(graph: Graph, precision: Precision) -> list[NodeRoundings]:
    """The roundings of each node if it runs at ``precision``, in the file's order.

    Bodies of control flow are left out: they are reduced as a whole.
    """
    makers: dict[str, str] = {}
    found = []
    for index, (node, name) in enumerate(graph.named_nodes()):
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


def list_movers(graph: Graph, precision: Precision) -> Movers:
    """The layers that only move values and read no constant."""
    if not precision.is_storage:  # TF32 rounds operands of products only
        return Movers()
    names, types = graph.names, graph.types
    layers = {x.index for x in graph.layers_at(precision)}
    maker: dict[str, str] = {}
    # An output of the model stays FP32, as if a layer in FP32 read it.
    readers: dict[str, list[str]] = {name: [EXACT] for name in graph.outputs}
    nodes = graph.proto.graph.node
    for index, (node, name) in enumerate(graph.named_nodes()):
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
        # At inference, Dropout moves values too.
        if node.op_type not in MOVES | {"Dropout"} or role.kind is not Kind.LAYER:
            continue
        read = [node.input[slot] for slot in role.reduced_in]
        if any(tensor in graph.float_constants for tensor in read):
            continue
        sources[names[index]] = tuple(dict.fromkeys(maker.get(t, EXACT) for t in read))
        given = [r for o in node.output if o for r in readers.get(o, ())]
        read_by[names[index]] = tuple(dict.fromkeys(given))
    return Movers(sources, read_by)
