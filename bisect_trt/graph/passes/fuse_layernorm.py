"""``--rewrite layernorm``: LayerNorm written out in primitive operators becomes LayerNormalization,
or stays as it is.

Engines keep the inside of the operator in FP32, so nothing of it has to be pinned. A chain is
rewritten only if every node, axis, constant and reader is that of the definition; an addition
behind it that is no constant shift (a residual) is not touched. Over the channels of NCHW, where
the operator cannot work, a transposition stands on either side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bisect_trt.core.errors import BadInputError
from bisect_trt.graph.model.layernorm_chains import Chain, find_chains
from bisect_trt.graph.model.layers import with_unique_names
from bisect_trt.graph.model.opset import HAS_LAYER_NORMALIZATION, raised
from bisect_trt.graph.tensors.tensor_types import every_node, opset_of


@dataclass(frozen=True)
class Fused:
    """The new model, and the id of each LayerNormalization with the nodes it stands for."""

    model: onnx.ModelProto
    replaced: dict[str, tuple[str, ...]]


def fuse_layernorm(model: onnx.ModelProto) -> Fused:
    """``model`` with every exactly matching LayerNorm as one operator, at opset 17 or its own later
    one. The model given is not changed.

    Raises:
        BadInputError: nothing matches, or the opset cannot be raised.
    """
    new = (
        raised(model, HAS_LAYER_NORMALIZATION)
        if opset_of(model) < HAS_LAYER_NORMALIZATION
        else with_unique_names(model)
    )
    chains = find_chains(new)
    if not chains:
        raise BadInputError(
            "--rewrite layernorm: no LayerNorm in primitive operators matches exactly; nothing is "
            "rewritten"
        )
    replaced = {}
    taken = {node.name for node in new.graph.node}
    nodes: list[onnx.NodeProto | None] = list(new.graph.node)
    put: dict[int, list[onnx.NodeProto]] = {}
    for number, chain in enumerate(chains):
        gone = [nodes[i] for i in chain.nodes]
        first = next(n for n in gone if n is not None)
        name = (
            f"{first.name.rpartition('/')[0]}/LayerNormalization"
            if "/" in first.name
            else f"LayerNormalization_{number}"
        )
        while name in taken:
            name += "_"
        taken.add(name)
        replaced[name] = tuple(n.name for n in gone if n is not None)
        put[max(chain.nodes)] = _written(new, chain, name)
        for index in chain.nodes:
            nodes[index] = None
    kept: list[onnx.NodeProto] = []
    for index, node in enumerate(nodes):
        kept += [node] if node is not None else put.get(index, [])
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in kept]
    del new.graph.node[:]
    new.graph.node.extend(copies)
    del new.graph.value_info[:]
    _drop_unread(new, model)
    return Fused(new, replaced)


def _drop_unread(new: onnx.ModelProto, before: onnx.ModelProto) -> None:
    """Leave out the weights that ``before`` reads and nobody does any more: the operator has copies
    of its own.
    """
    gone = _read(before) - _read(new) - {v.name for v in (*new.graph.input, *new.graph.output)}
    for place in reversed(range(len(new.graph.initializer))):
        if new.graph.initializer[place].name in gone:
            del new.graph.initializer[place]


def _read(model: onnx.ModelProto) -> set[str]:
    return {name for node in every_node(model.graph.node) for name in node.input}


def _written(model: onnx.ModelProto, chain: Chain, name: str) -> list[onnx.NodeProto]:
    operands = [chain.source, f"{name}_scale"]
    model.graph.initializer.append(numpy_helper.from_array(chain.scale, f"{name}_scale"))
    if chain.shift is not None:
        model.graph.initializer.append(numpy_helper.from_array(chain.shift, f"{name}_shift"))
        operands.append(f"{name}_shift")
    trailing = chain.axes[-1] == chain.rank - 1
    if trailing:
        return [
            helper.make_node(
                "LayerNormalization",
                operands,
                [chain.result],
                name,
                axis=-len(chain.axes),
                epsilon=chain.epsilon,
            )
        ]
    order = [a for a in range(chain.rank) if a not in chain.axes] + list(chain.axes)
    operands[0] = f"{name}_in"
    return [
        helper.make_node(
            "Transpose", [chain.source], [f"{name}_in"], f"{name}_to_last", perm=order
        ),
        helper.make_node(
            "LayerNormalization",
            operands,
            [f"{name}_out"],
            name,
            axis=-len(chain.axes),
            epsilon=chain.epsilon,
        ),
        helper.make_node(
            "Transpose",
            [f"{name}_out"],
            [chain.result],
            f"{name}_back",
            perm=np.argsort(order).tolist(),
        ),
    ]
