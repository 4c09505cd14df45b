"""What is rounded when: the one place that says so.

A layer at a reduced precision reads its float operands rounded and, where the precision is a
storage format, gives its float results rounded. Constants are rounded offline. An operand that
arrives rounded already is left alone. The emulated model writes these roundings for one plan, the
switched model a switch for each, and the way node by node makes them as it goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bisect_trt.core.precision import Precision
from bisect_trt.graph.model.graph import Graph


@dataclass(frozen=True)
class Rounding:
    """``tensor`` rounded on account of ``layer``, which reads or gives it in ``slot``.

    ``constant`` is true for a tensor of the file, which can be rounded before anything runs.
    ``maker`` is the layer that has rounded the tensor already where it is lowered too, None where
    no layer does.
    """

    tensor: str
    layer: str
    slot: int
    constant: bool = False
    maker: str | None = None


@dataclass(frozen=True)
class NodeRoundings:
    """What one node of the main graph rounds where it is lowered, by slot; empty for no layer."""

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
