"""Replaces LayerNorms written out in primitive operators by LayerNormalization."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.opsets import HAS_LAYER_NORMALIZATION, raised
from bisect_trt.model.walk import (
    captured_names,
    every_node,
    opset_of,
    remove_initialisers,
    replace_nodes,
    unused,
)

Constant = NDArray[np.float32]


@dataclass(frozen=True)
class _Chain:
    """One written-out LayerNorm: node indices, input, output, and constants."""

    nodes: tuple[int, ...]
    source: str
    result: str
    axes: tuple[int, ...]
    rank: int
    epsilon: float
    scale: Constant
    shift: Constant | None


class _NoMatchError(Exception):
    """The nodes are not exactly a LayerNorm."""


def _require(condition: bool) -> None:
    if not condition:
        raise _NoMatchError


class _Finder:
    """Finds exact matches from the square root outwards."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.proto.graph.node
        self._constants = graph.constants
        self._ranks = graph.types.ranks
        self._outputs = set(graph.outputs)
        self._maker = {o: i for i, n in enumerate(self._nodes) for o in n.output}
        self._readers: dict[str, list[int]] = {}
        for index, node in enumerate(self._nodes):
            for name in (*node.input, *captured_names(node)):
                self._readers.setdefault(name, []).append(index)

    def chains(self) -> list[_Chain]:
        """All matches, which share no nodes."""
        found: list[_Chain] = []
        taken = set[int]()
        for index, node in enumerate(self._nodes):
            if node.op_type != "Sqrt":
                continue
            try:
                chain = self._match(index)
            except _NoMatchError:
                continue
            if taken.isdisjoint(chain.nodes):  # two chains may share the mean of one input
                found.append(chain)
                taken.update(chain.nodes)
        return found

    def _match(self, root: int) -> _Chain:
        deviation = self._nodes[root].output[0]
        add = self._made_by(self._nodes[root].input[0], "Add")
        variance, epsilon = self._with_constant(add)
        _require(epsilon.size == 1)
        mean_of_squares = self._made_by(variance, "ReduceMean")
        square = self._made_by(self._nodes[mean_of_squares].input[0], "Pow", "Mul")
        centre = self._squared(square)
        subtraction = self._made_by(centre, "Sub")
        source, mean = self._nodes[subtraction].input
        first_mean = self._made_by(mean, "ReduceMean")
        _require(self._nodes[first_mean].input[0] == source)
        division = self._only_reader(deviation, "Div")
        _require(list(self._nodes[division].input) == [centre, deviation])
        _require(source in self._ranks)
        rank = self._ranks[source]
        axes = self._axes(first_mean, rank)
        _require(axes == self._axes(mean_of_squares, rank))
        inner = [first_mean, subtraction, square, mean_of_squares, add, root]
        # No other node may read what the operator no longer gives.
        for index in inner:
            (name,) = self._nodes[index].output
            _require(name not in self._outputs)
            readers = self._readers.get(name, [])
            _require(
                {square, division}.issuperset(readers) if name == centre else len(readers) == 1
            )
        multiply = self._only_reader(self._nodes[division].output[0], "Mul")
        scale = _over(self._with_constant(multiply)[1], rank, axes)
        tail, shift = [division, multiply], None
        try:  # the shift is optional
            plus = self._only_reader(self._nodes[multiply].output[0], "Add")
            shift = _over(self._with_constant(plus)[1], rank, axes)
            _require(shift.shape == scale.shape)
            tail.append(plus)
        except _NoMatchError:
            shift = None
        return _Chain(
            nodes=(*sorted(inner), *tail),
            source=source,
            result=self._nodes[tail[-1]].output[0],
            axes=axes,
            rank=rank,
            epsilon=float(epsilon.ravel()[0]),
            scale=scale,
            shift=shift,
        )

    def _made_by(self, tensor: str, *ops: str) -> int:
        index = self._maker.get(tensor, -1)
        _require(index >= 0)
        _require(self._nodes[index].op_type in ops and not self._nodes[index].domain)
        return index

    def _only_reader(self, tensor: str, op: str) -> int:
        readers = self._readers.get(tensor, [])
        _require(tensor not in self._outputs and len(readers) == 1)
        _require(self._nodes[readers[0]].op_type == op)
        return readers[0]

    def _with_constant(self, index: int) -> tuple[str, Constant]:
        """The computed operand and the constant one of a node with two."""
        first, second = self._nodes[index].input
        _require((first in self._constants) != (second in self._constants))
        constant, other = (first, second) if first in self._constants else (second, first)
        array = self._constants[constant]
        _require(array.dtype == np.float32)
        return other, array

    def _squared(self, index: int) -> str:
        """The tensor that the node squares."""
        first, second = self._nodes[index].input
        if self._nodes[index].op_type == "Mul":
            _require(first == second)
        else:
            power = self._constants.get(second)
            _require(power is not None and power.size == 1 and float(power.ravel()[0]) == 2.0)
        return str(first)

    def _axes(self, index: int, rank: int) -> tuple[int, ...]:
        """The axes that a ReduceMean reduces to 1: all trailing ones, or the channels of NCHW."""
        node = self._nodes[index]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        axes = attributes.get("axes")
        if axes is None and len(node.input) > 1:
            axes = self._constants.get(node.input[1])
        if axes is None or attributes.get("keepdims", 1) != 1:
            raise _NoMatchError
        found = tuple(sorted(int(a) % rank for a in axes))
        trailing = found == tuple(range(rank - len(found), rank)) and len(found) < rank
        # Channels of NCHW are transposed to the end; the operator normalises trailing axes only.
        _require(trailing or (found == (1,) and rank == 4))
        return found


def _over(array: Constant, rank: int, axes: tuple[int, ...]) -> Constant:
    """``array`` reshaped to ``axes``; no match if it varies along another axis or broadcasts."""
    _require(array.ndim <= rank)
    shape = (1,) * (rank - array.ndim) + array.shape
    _require(all((size != 1) == (axis in axes) for axis, size in enumerate(shape)))
    return np.ascontiguousarray(array.reshape([shape[a] for a in axes]))


@dataclass(frozen=True)
class Fused:
    """The new model, and by id of each LayerNormalization the nodes that it replaces."""

    model: onnx.ModelProto
    replaced: dict[str, tuple[str, ...]]


def fuse_layernorm(model: onnx.ModelProto) -> Fused:
    """A copy, at opset 17 or later, in which every exact match is one LayerNormalization."""
    old = opset_of(model) < HAS_LAYER_NORMALIZATION
    new = raised(model, HAS_LAYER_NORMALIZATION) if old else with_unique_names(model)
    chains = _Finder(Graph(new)).chains()
    if not chains:
        raise BadInputError(
            "--rewrite layernorm: no LayerNorm in primitive operators matches exactly; nothing is "
            "rewritten"
        )
    replaced = {}
    taken = {node.name for node in new.graph.node}
    written: dict[int, list[onnx.NodeProto]] = {}
    gone = {index for chain in chains for index in chain.nodes}
    for number, chain in enumerate(chains):
        names = [new.graph.node[i].name for i in chain.nodes]
        scope = names[0].rpartition("/")[0]
        stem = f"{scope}/LayerNormalization" if "/" in names[0] else f"LayerNormalization_{number}"
        name = unused(stem, taken)
        replaced[name] = tuple(names)
        written[max(chain.nodes)] = _written(new, chain, name)
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(new.graph.node):
        nodes += written.get(index, []) if index in gone else [node]
    replace_nodes(new.graph, nodes)
    del new.graph.value_info[:]
    # The new operator has its own copies of scale and shift.
    unread = _read(model) - _read(new) - {v.name for v in (*new.graph.input, *new.graph.output)}
    remove_initialisers(new.graph, unread)
    return Fused(new, replaced)


def _read(model: onnx.ModelProto) -> set[str]:
    return {name for node in every_node(model.graph.node) for name in node.input}


def _written(model: onnx.ModelProto, chain: _Chain, name: str) -> list[onnx.NodeProto]:
    """The new operator, between two transpositions if its axes are not the last."""
    operands = []
    for array, what in ((chain.scale, "scale"), (chain.shift, "shift")):
        if array is not None:
            operands.append(f"{name}_{what}")
            model.graph.initializer.append(numpy_helper.from_array(array, operands[-1]))
    trailing = chain.axes[-1] == chain.rank - 1
    source, result = (chain.source, chain.result) if trailing else (f"{name}_in", f"{name}_out")
    operator = helper.make_node(
        "LayerNormalization",
        [source, *operands],
        [result],
        name,
        axis=-len(chain.axes),
        epsilon=chain.epsilon,
    )
    if trailing:
        return [operator]
    order = [a for a in range(chain.rank) if a not in chain.axes] + list(chain.axes)
    back = np.argsort(order).tolist()
    return [
        helper.make_node("Transpose", [chain.source], [source], f"{name}_to_last", perm=order),
        operator,
        helper.make_node("Transpose", [result], [chain.result], f"{name}_back", perm=back),
    ]
