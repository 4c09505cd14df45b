"""What a set of pins costs in time, estimated: by how much it slows the layers, and the casts at its borders.

A layer takes the longer of its arithmetic and its memory traffic (the roofline model: Williams, Waterman and Patterson 2009), and a
cast its traffic. The rates are those of NVIDIA's H100 SXM data sheet without sparsity. Engines fuse, so the estimate ranks sets; what
the engine takes is measured where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

from bisect_trt.graph.constants import float_constants
from bisect_trt.graph.layers import Layer

HALF_FLOPS, TF32_FLOPS, BYTES_PER_S = 990e12, 495e12, 3.35e12
_MATRIX_OPS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})


@dataclass(frozen=True)
class Tensor:
    """``producer`` is the layer that makes it, None for what is FP32 anyway; ``fp32_reader``: an output or a node that is no layer."""

    producer: str | None
    readers: frozenset[str]
    fp32_reader: bool
    elements: int


@dataclass(frozen=True)
class LatencyModel:
    """``slower``: the seconds that pinning a layer adds to it; ``neighbours``: the layers that it exchanges tensors with;
    ``products``: how many products all matrix operators form on one sample.
    """

    slower: Mapping[str, float]
    tensors: tuple[Tensor, ...]
    neighbours: Mapping[str, frozenset[str]]
    products: float = 0.0

    def seconds(self, pinned: frozenset[str]) -> float:
        """The estimated time that ``pinned`` adds to a network that runs reduced."""
        casts = sum(t.elements for t in self.tensors if _is_cast(t, pinned))
        return sum(self.slower.get(name, 0.0) for name in pinned) + casts * 6.0 / BYTES_PER_S


def _is_cast(tensor: Tensor, pinned: frozenset[str]) -> bool:
    """Whether the tensor is read at another precision than it is made at."""
    if tensor.producer is None or tensor.producer in pinned:
        return not tensor.readers <= pinned
    return tensor.fp32_reader or not tensor.readers.isdisjoint(pinned)


def latency_model(
    model: onnx.ModelProto, layers: Iterable[Layer], elements: Mapping[str, int], input_elements: Mapping[str, int]
) -> LatencyModel:
    """The model's estimate from the sizes of the tensors: ``elements`` by layer, ``input_elements`` by float input."""
    layers = list(layers)
    made = {tensor: layer.name for layer in layers for tensor in layer.outputs}
    sizes = {**input_elements, **{t: elements.get(name, 0) for t, name in made.items()}}
    weights = {name: array.shape for name, array in float_constants(model.graph).items()}
    readers: dict[str, set[str]] = {}
    for layer in layers:
        for tensor in layer.inputs:
            readers.setdefault(tensor, set()).add(layer.name)
    kept = {o.name for o in model.graph.output}
    known = {layer.index for layer in layers}
    for index, node in enumerate(model.graph.node):
        kept.update(node.input if index not in known and node.op_type not in ("Shape", "Size") else ())
    tensors = tuple(
        Tensor(made.get(t), frozenset(readers.get(t, ())), t in kept, size) for t, size in sizes.items() if t in made or t in readers
    )
    slower, total = {}, 0.0
    for layer in layers:
        made_here = elements.get(layer.name, 0)
        products = _products(model.graph.node[layer.index], layer, made_here, sizes, weights) if layer.op in _MATRIX_OPS else 0.0
        slower[layer.name] = _slower(layer, made_here, products, sizes, weights)
        total += products
    neighbours = {layer.name: _neighbours(layer, made, readers) for layer in layers}
    return LatencyModel(slower, tensors, neighbours, total)


def _neighbours(layer: Layer, made: Mapping[str, str], readers: Mapping[str, set[str]]) -> frozenset[str]:
    before = {made[t] for t in layer.inputs if t in made}
    return frozenset(before.union(*(readers.get(t, set()) for t in layer.outputs)) - {layer.name})


def _slower(layer: Layer, made: int, products: float, sizes: Mapping[str, int], weights: Mapping[str, tuple[int, ...]]) -> float:
    """The seconds that FP32 adds: twice the traffic, and half the rate in matrix products."""
    stored = sum(math.prod(weights[t]) for t in layer.inputs if t in weights)
    moved = made + stored + sum(sizes.get(t, 0) for t in layer.inputs)
    operations = 2.0 * products
    reduced = max(operations / HALF_FLOPS, 2.0 * moved / BYTES_PER_S)
    return max(operations / TF32_FLOPS, 4.0 * moved / BYTES_PER_S) - reduced


def _products(node: onnx.NodeProto, layer: Layer, made: int, sizes: Mapping[str, int], weights: Mapping[str, tuple[int, ...]]) -> float:
    """How many products the layer forms: from its weight's shape, or, for two activations, from the sizes of all three.

    The latter takes the product for a single one; a batch of b is overrated by the root of b.
    """
    first, second = layer.inputs[:2]
    if second in weights:
        shape = weights[second]
        if layer.op == "ConvTranspose":  # each input element meets every place and channel of its weight
            return sizes.get(first, 0) * math.prod(shape[1:])
        if layer.op == "Gemm":
            transposed = any(a.name == "transB" and a.i for a in node.attribute)
            return made * shape[1 if transposed else 0]
        return made * (math.prod(shape[1:]) if layer.op == "Conv" else shape[-2 if len(shape) > 1 else 0])
    if first in weights:
        return made * weights[first][-1]
    return math.sqrt(sizes.get(first, 0) * sizes.get(second, 0) / made) * made if made else 0.0
