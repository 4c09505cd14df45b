"""Model-local functions written out, so that their layers can be lowered, pinned and named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import onnx
from onnx import inliner

from bisect_trt.core.errors import BadInputError, one_line
from bisect_trt.graph.tensors.tensor_types import every_node, subgraphs

_NUMBERED = re.compile(r"^(.*)__(\d+)$", re.DOTALL)


Function = tuple[str, str, str]


def inlined(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """``model`` without model-local functions: itself where it has none.

    A node of a function bears the name of the call and its own, ``block.3/matmul``, calls within
    calls likewise.

    Args:
        model: its weights need not be loaded.
        where: what an error names.

    Raises:
        BadInputError: the functions cannot be written out.
    """
    if not model.functions:
        return model
    model = _named_inside(model)
    try:
        plain = inliner.inline_local_functions(model)
    except Exception as error:  # the C++ library raises what it likes for functions it refuses
        raise BadInputError(
            f"{where}: its model-local functions cannot be written out ({one_line(error, 160)}), "
            "and layers inside them could not be lowered; export the model without functions"
        ) from error
    own = {node.name for node in every_node(model.graph.node)}
    # Functions of another opset than the model's are left, and their calls have no numbers.
    left = _bodies(plain)
    bodies = {key: body for key, body in _bodies(model).items() if key not in left}
    calls = list(_calls(model.graph.node, bodies, "", 0))
    for node in every_node(plain.graph.node):
        found = _NUMBERED.match(node.name)
        if found is None or node.name in own or not 0 < int(found.group(2)) <= len(calls):
            continue
        node.name = f"{calls[int(found.group(2)) - 1]}/{found.group(1)}"
    return plain


def _named_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a name for every node of its functions: the inliner numbers names alone."""
    inside = [node for f in model.functions for node in every_node(f.node)]
    if all(node.name for node in inside):
        return model
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for function in named.functions:
        for node in every_node(function.node):
            if not node.name and node.output:
                node.name = f"{node.op_type}_{node.output[0]}"
    return named


def _bodies(model: onnx.ModelProto) -> dict[Function, onnx.FunctionProto]:
    return {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}


def _calls(
    nodes: Iterable[onnx.NodeProto],
    bodies: dict[Function, onnx.FunctionProto],
    scope: str,
    depth: int,
) -> Iterator[str]:
    """The calls' names in the order in which the inliner numbers them: as they come, what a call
    calls behind it.
    """
    if depth > len(bodies):
        return  # a function that calls itself: the inliner has refused it
    for node in nodes:
        body = bodies.get((node.domain, node.op_type, getattr(node, "overload", "")))
        if body is None:
            for _, graph in subgraphs(node):
                yield from _calls(graph.node, bodies, scope, depth)
            continue
        name = node.name or f"{node.op_type}_{next(iter(node.output), '')}"
        full = f"{scope}/{name}" if scope else name
        yield full
        yield from _calls(body.node, bodies, full, depth + 1)
