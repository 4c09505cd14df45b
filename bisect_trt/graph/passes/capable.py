"""The model at an opset in which a plan can be written, and the plan for what that adds."""

from __future__ import annotations

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.opset import (
    CAST_HAS_BF16,
    PRODUCTS_BROADCAST,
    lacks_bf16,
    operators,
    raised,
)
from bisect_trt.graph.tensors.operator_rules import HAVE_BF16


def with_roundings(graph: Graph, base: Precision) -> Graph:
    """``graph``, or the model at the first opset in which the roundings to ``base``, and to TF32,
    can be written and run.

    A model before opset 7 that cannot be converted stays as it is: only its TF32 baseline then
    cannot be run.

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
    """``graph``, or the model at opset 22 where an operator that ``plan`` lowers has no BF16 form
    in its own opset.

    Raises:
        BadInputError: the opset cannot be raised.
    """
    return graph.raised(HAVE_BF16) if _lacks_bf16(graph, plan) else graph


def check_can_be_written(graph: Graph, plan: PrecisionPlan) -> None:
    """Refuse a model of which ``plan`` cannot be written, before a search is made for nothing. The
    raised model is not kept: that would be a second one for the whole run.

    Args:
        graph: the model.
        plan: everything lowered that may be.

    Raises:
        BadInputError: the opset cannot be raised.
    """
    if plan.base is Precision.BF16 and _lacks_bf16(graph, plan):
        raised(graph.proto, HAVE_BF16)


def _lacks_bf16(graph: Graph, plan: PrecisionPlan) -> bool:
    """Whether an operator that ``plan`` lowers has no BF16 form in the model's opset."""
    nodes = graph.proto.graph.node
    lowered = operators(nodes[x.index] for x in graph.layers if x.name not in plan.pinned)
    return lacks_bf16(lowered, graph.opset)


def with_new_nodes_pinned(source: Graph, converted: Graph, plan: PrecisionPlan) -> PrecisionPlan:
    """``plan`` with pins on the nodes that raising the opset added: they are nobody's layers.

    Args:
        source: the model that the plan is for.
        converted: the same at the higher opset.
        plan: over the layers of ``source``.

    Returns:
        The plan over the layers of ``converted``.
    """
    if converted is source:
        return plan
    return plan.with_pins(plan.pinned.union(set(converted.names).difference(source.names)))
