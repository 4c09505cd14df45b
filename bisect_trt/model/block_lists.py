"""Writes a plan as the lists of other converters: AutoCast's, and ONNX Runtime's.

Each list is a JSON object of keyword arguments for the converter's function.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.layers import Kind
from bisect_trt.model.patterns import find_patterns
from bisect_trt.model.precision_rules import CONTROL_FLOW, FLOAT
from bisect_trt.model.walk import every_node

WRITTEN_OUT = (
    "the model's functions are written out here, so a list would name nodes that the file does not "
    "have; use the typed ONNX (--format onnx)"
)
"""The reason why pins of a model with functions cannot be listed."""

_TYPED = "use the typed ONNX (--format onnx)"
_SMALLEST = 5.96e-8
"""FP16's smallest positive number, the least ``min_positive_val`` that ONNX Runtime takes."""


_LEFT_MIXED = frozenset({"Loop", "Scan"})
"""Operators of which AutoCast 0.47.0 makes a model that does not load, unless it keeps them."""


def autocast_arguments(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> str:
    """``plan`` as JSON: arguments of AutoCast's ``convert_to_mixed_precision``.

    AutoCast's own rules, by ranges of values, are turned off.

    Raises:
        BadInputError: names the layer that the list cannot carry.
    """
    graph = as_graph(model)
    if not plan.base.is_storage:
        raise BadInputError(f"--format autocast: {_reduces_nothing(plan)}")
    kept = _kept(graph, plan, "autocast")
    for layer in graph.layers_at(plan.base):
        if layer.op in _LEFT_MIXED and layer.name not in plan.pinned:
            raise BadInputError(
                f"layer {layer.name!r} cannot be reduced by AutoCast, which leaves the body of "
                f"{layer.op} in FP32 but not what it reads; {_TYPED}"
            )
    names = [node.name for node in kept]
    return _as_json(
        {
            "low_precision_type": plan.base.value,
            # AutoCast matches the beginning of a name, so the end is written too.
            "nodes_to_exclude": [
                rf"^{re.escape(name)}\Z" for name in (*names, *_merged(graph, frozenset(names)))
            ],
            "data_max": None,
            "init_max": None,
            "keep_io_types": True,
        }
    )


def onnxruntime_arguments(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> str:
    """``plan`` as JSON: arguments of ``convert_float_to_float16``.

    ONNX Runtime's transformers and onnxconverter-common both have this function.

    Raises:
        BadInputError: names the layer that the list cannot carry, or the plan is not for FP16.
    """
    graph = as_graph(model)
    if not plan.base.is_storage:
        raise BadInputError(f"--format onnxruntime: {_reduces_nothing(plan)}")
    if plan.base.value != "fp16":
        raise BadInputError(f"--format onnxruntime: it converts to FP16 only; {_TYPED}")
    kept = _kept(graph, plan, "onnxruntime")
    for node in kept:
        if node.op_type in CONTROL_FLOW:
            raise BadInputError(
                f"layer {node.name!r} cannot be kept in FP32 by a list for onnxruntime: the bodies "
                f"of {node.op_type} would read FP16 from around it; {_TYPED}"
            )
    _refuse_constants(graph, kept)
    return _as_json(
        {
            # Without it whole operators stay in FP32, such as Resize.
            "op_block_list": [],
            "node_block_list": [node.name for node in kept],
            "keep_io_types": True,
            "min_positive_val": _SMALLEST,
            "max_finite_val": 65504.0,
        }
    )


def _merged(graph: Graph, kept: frozenset[str]) -> list[str]:
    """The names that AutoCast gives to LayerNorms that it merges, where a part of one is kept."""
    # As _create_layernorm_node in AutoCast's graphsanitizer.py, after the first mean's name.
    means = {node.name for node in graph.proto.graph.node if node.op_type == "ReduceMean"}
    parts = [
        [name for name in pattern.layers if name in means]
        for pattern in find_patterns(graph)
        if pattern.decomposed and not kept.isdisjoint(pattern.layers)
    ]
    return [f"LayerNorm_{names[0]}" for names in parts if names]


def _reduces_nothing(plan: PrecisionPlan) -> str:
    return f"the plan is for {plan.base.value.upper()} and reduces nothing; build from the model"


def _kept(graph: Graph, plan: PrecisionPlan, form: str) -> list[onnx.NodeProto]:
    """The nodes whose floats stay FP32, in the file's order: pinned, or never reduced."""
    graph.check_plan(plan)
    uses = Counter(node.name for node in every_node(graph.proto.graph.node))
    kept = []
    for index, (node, layer) in enumerate(graph.named_nodes()):
        gives_floats = any(graph.types.type_of(output) == FLOAT for output in node.output if output)
        stays = gives_floats and graph.role(index, plan.base).kind is Kind.KEPT
        if layer not in plan.pinned and not stays:
            continue
        reason = ""
        if not node.name:
            reason = f"the {node.op_type} has no name in the file"
        elif uses[node.name] > 1:
            reason = f"{uses[node.name]} nodes are called {node.name!r}"
        if reason:
            raise BadInputError(
                f"layer {layer!r} cannot be in a list for {form}: {reason}; {_TYPED}"
            )
        kept.append(node)
    return kept


def _refuse_constants(graph: Graph, kept: Sequence[onnx.NodeProto]) -> None:
    """Refuses ``kept`` layers with a Constant node that FP16 rounds.

    Initialisers of listed nodes stay FP32. Constant nodes do not, even if they are listed.
    """
    made = {n.output[0] for n in graph.proto.graph.node if n.op_type == "Constant"}
    for node in kept:
        for tensor in made.intersection(node.input).intersection(graph.float_constants):
            values = graph.float_constants[tensor]
            rounded = values.astype(np.float16).astype(np.float32)
            if not np.array_equal(rounded, values, equal_nan=True):
                raise BadInputError(
                    f"layer {node.name!r} cannot be kept in FP32 by a list for onnxruntime: the "
                    f"converter rounds {tensor!r}, a Constant node; make it an initialiser, or "
                    f"{_TYPED}"
                )


def _as_json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, indent=2)


BLOCK_LISTS: Mapping[str, Callable[[onnx.ModelProto | Graph, PrecisionPlan], str]] = {
    "autocast": autocast_arguments,
    "onnxruntime": onnxruntime_arguments,
}
"""The writer of each list, by ``--format``."""
