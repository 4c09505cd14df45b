"""Names for dimensions that have none worth keeping.

TensorRT takes dimensions that share a symbolic name as equal. Exporters that call every unknown
dimension ``?`` thereby make models that cannot be built, so such placeholders get a name of their
own, tensor and axis.
"""

from __future__ import annotations

import onnx

_PLACEHOLDERS = frozenset({"?", "", "-1", "None", "none", "unk", "unknown", "*", "dynamic"})


def is_placeholder(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """True for an unset, negative or ``?``-like dimension."""
    which = dim.WhichOneof("value")
    if which == "dim_value":
        return bool(dim.dim_value < 0)
    return which is None or dim.dim_param.strip() in _PLACEHOLDERS


def shared_placeholders(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """The names like ``?`` that several dimensions of ``graph``'s inputs bear, each with those
    inputs. An empty name and those of outputs are no symbol to TensorRT (measured on TensorRT for
    RTX 1.6.1.120, by building).
    """
    users: dict[str, list[str]] = {}
    for value in graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.strip() and is_placeholder(dim):
                users.setdefault(dim.dim_param, []).append(value.name)
    return {name: list(dict.fromkeys(of)) for name, of in users.items() if len(of) > 1}


def name_placeholder_dims(graph: onnx.GraphProto) -> None:
    """Give every placeholder dimension of ``graph``'s inputs and outputs the name ``tensor_axis``,
    in place.
    """
    taken = {
        d.dim_param for v in (*graph.input, *graph.output) for d in v.type.tensor_type.shape.dim
    }
    for value in (*graph.input, *graph.output):
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if is_placeholder(dim):
                name = f"{value.name}_{axis}"
                while name in taken:
                    name += "_"
                taken.add(name)
                dim.dim_param = name
