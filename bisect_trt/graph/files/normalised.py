"""A model as every pass expects it: functions written out, one spelling of the standard domain,
nodes in topological order. ONNX Runtime accepts more than ONNX demands, and so does this tool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from bisect_trt.graph.files.inlined import inlined
from bisect_trt.graph.tensors.tensor_types import captured_names, every_node, subgraphs

_SPELLED_OUT = "ai.onnx"


def normalised(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """``model``, or a copy of it where something is to be put right.

    Args:
        model: its weights need not be loaded.
        where: what an error names.

    Raises:
        BadInputError: its functions cannot be written out.
    """
    plain = inlined(model, where)
    spelled = any(n.domain == _SPELLED_OUT for n in every_node(plain.graph.node)) or any(
        o.domain == _SPELLED_OUT for o in plain.opset_import
    )
    unsorted = any(not _in_order(graph) for graph in _graphs(plain.graph))
    if not spelled and not unsorted:
        return plain
    if plain is model:
        plain = onnx.ModelProto()
        plain.CopyFrom(model)
    for node in every_node(plain.graph.node):
        if node.domain == _SPELLED_OUT:
            node.domain = ""
    _spell_imports(plain)
    for graph in _graphs(plain.graph):
        if not _in_order(graph):
            _sort(graph)
    return plain


def _spell_imports(model: onnx.ModelProto) -> None:
    named = any(o.domain == "" for o in model.opset_import)
    kept = [o for o in model.opset_import if o.domain != _SPELLED_OUT or not named]
    imports = [onnx.OperatorSetIdProto(domain=o.domain, version=o.version) for o in kept]
    for entry in imports:
        if entry.domain == _SPELLED_OUT:
            entry.domain = ""
    del model.opset_import[:]
    model.opset_import.extend(imports)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for _, body in subgraphs(node):
            yield from _graphs(body)


def _reads(node: onnx.NodeProto) -> set[str]:
    return {name for name in node.input if name}.union(captured_names(node))


def _in_order(graph: onnx.GraphProto) -> bool:
    """Whether every node stands behind those whose outputs it reads."""
    made_here = {name for node in graph.node for name in node.output if name}
    ready: set[str] = set()
    for node in graph.node:
        if not ready.issuperset(_reads(node) & made_here):
            return False
        ready.update(node.output)
    return True


def _sort(graph: onnx.GraphProto) -> None:
    """Put the nodes into topological order, each reader as soon as what it reads is there; a graph
    with a cycle is left alone, for ONNX Runtime to refuse.
    """
    order = list(_ordered(list(graph.node)))
    if len(order) == len(graph.node):
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order]
        del graph.node[:]
        graph.node.extend(copies)


def _ordered(nodes: list[onnx.NodeProto]) -> Iterable[onnx.NodeProto]:
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needs = [{maker[name] for name in _reads(node) if name in maker} for node in nodes]
    readers: dict[int, list[int]] = {}
    for index, needed in enumerate(needs):
        for source in needed:
            readers.setdefault(source, []).append(index)
    waiting = sorted((i for i, needed in enumerate(needs) if not needed), reverse=True)
    while waiting:
        index = waiting.pop()
        yield nodes[index]
        for reader in reversed(readers.get(index, [])):
            needs[reader].discard(index)
            if not needs[reader]:
                waiting.append(reader)
