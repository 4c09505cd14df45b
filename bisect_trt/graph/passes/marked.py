"""Making intermediate tensors outputs, which is how any runner is asked what happens inside.

On an engine every mark breaks fusions and thereby changes the numbers: marks explain, they never
decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import onnx
from onnx import helper

from bisect_trt.core.errors import BadInputError
from bisect_trt.graph.model.graph import Graph, as_graph
from bisect_trt.graph.model.patterns import find_patterns
from bisect_trt.graph.tensors.tensor_types import infer_types


def select_tensors(model: onnx.ModelProto | Graph, selectors: Iterable[str]) -> list[str]:
    """The float tensors that ``selectors`` name, in network order.

    A selector is a layer id, a tensor name, a glob over either, an operator type (``MatMul``) or a
    pattern (``LayerNorm``, decomposed ones included).

    Raises:
        BadInputError: a selector matches nothing.
    """
    graph = as_graph(model)
    layers = graph.layers
    groups: dict[str, set[str]] = {}
    for pattern in find_patterns(graph):
        groups.setdefault(pattern.kind.lower(), set()).update(pattern.layers)
    chosen: set[str] = set()
    for selector in selectors:
        members = groups.get(selector.lower(), set())
        hits = {
            tensor
            for layer in layers
            for tensor in layer.outputs
            if selector in (layer.op, layer.name, tensor)  # names have brackets, as globs do
            or layer.name in members
            or fnmatchcase(layer.name, selector)
            or fnmatchcase(tensor, selector)
        }
        if not hits:
            raise BadInputError(
                f"--mark {selector!r}: matches no layer or tensor; `bisect-trt inspect` lists them"
            )
        chosen |= hits
    return [tensor for layer in layers for tensor in layer.outputs if tensor in chosen]


def with_ranks(
    model: onnx.ModelProto, tensors: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Those of ``tensors`` that a checker takes as outputs, and those of which no rank is known.

    Raises:
        BadInputError: none is left.
    """
    declared = all(o.type.tensor_type.HasField("shape") for o in model.graph.output)
    ranks = infer_types(model).ranks
    unknown = [name for name in tensors if name not in ranks] if declared else []
    if unknown and len(unknown) == len(tensors):
        raise BadInputError(
            f"tensor {unknown[0]!r}: nothing says how many dimensions it has, so that no checker "
            "would take it as an output; declare its shape in the model, or mark another"
        )
    return [name for name in tensors if name not in set(unknown)], unknown


def mark_outputs(model: onnx.ModelProto, tensors: Iterable[str]) -> onnx.ModelProto:
    """A copy of ``model`` in which ``tensors`` are graph outputs too, after the model's own. Only
    their ranks are declared.

    Raises:
        BadInputError: a tensor is not in the model.
    """
    scope = infer_types(model)
    marked = onnx.ModelProto()
    marked.CopyFrom(model)
    graph = marked.graph
    known = {o for node in graph.node for o in node.output}
    known.update(v.name for v in (*graph.input, *graph.initializer))
    present = {o.name for o in graph.output}
    for name in tensors:
        if name in present:
            continue
        if name not in known:
            raise BadInputError(
                f"tensor {name!r} is not in the model; `bisect-trt inspect` lists the layers"
            )
        shape = [f"{name}_{axis}" for axis in range(scope.ranks.get(name, 0))]
        graph.output.append(
            helper.make_tensor_value_info(
                name, scope.type_of(name), shape if name in scope.ranks else None
            )
        )
        present.add(name)
    del graph.value_info[:]
    return marked
