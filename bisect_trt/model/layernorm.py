"""LayerNormalization from the chains that exporters write."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.model.graph import HAS_LAYER_NORMALIZATION, raised
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.tensor_types import captured_names, every_node, opset_of
from bisect_trt.model.tensor_values import Constants


@dataclass(frozen=True)
class Chain:
    """The nodes of one written-out LayerNorm by index, what it reads and gives, and its constants
    over the normalised axes.
    """

    nodes: tuple[int, ...]
    source: str
    result: str
    axes: tuple[int, ...]
    rank: int
    epsilon: float
    scale: NDArray[np.float32]
    shift: NDArray[np.float32] | None


def find_chains(model: onnx.ModelProto) -> list[Chain]:
    """Every LayerNorm of ``model`` whose nodes, axes, constants and readers are those of the
    definition, none sharing a node with another.
    """
    return _Finder(model).chains()


class _Finder:
    """Matches from the square root outwards; any doubt leaves the nodes alone."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._nodes = model.graph.node
        self._constants = Constants(model.graph)
        self._producer = {o: i for i, n in enumerate(self._nodes) for o in n.output}
        self._readers: dict[str, list[int]] = {}
        for index, node in enumerate(self._nodes):
            for name in (*node.input, *captured_names(node)):
                self._readers.setdefault(name, []).append(index)
        self._outputs = {o.name for o in model.graph.output}
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        values = (*inferred.value_info, *inferred.input, *inferred.output)
        self._rank = {
            v.name: len(v.type.tensor_type.shape.dim)
            for v in values
            if v.type.tensor_type.HasField("shape")
        }

    def chains(self) -> list[Chain]:
        """Every match, none sharing a node with another."""
        found, taken = [], set[int]()
        for index, node in enumerate(self._nodes):
            chain = self._match(index) if node.op_type == "Sqrt" else None
            if chain is not None and taken.isdisjoint(chain.nodes):
                found.append(chain)
                taken.update(chain.nodes)
        return found

    def _match(self, root: int) -> Chain | None:
        add = self._made_by(self._nodes[root].input[0], "Add")
        split = self._with_constant(add)
        if add is None or split is None or split[1].size != 1:
            return None
        variance, epsilon = split
        mean_of_squares = self._made_by(variance, "ReduceMean")
        square = (
            self._made_by(self._nodes[mean_of_squares].input[0], "Pow", "Mul")
            if mean_of_squares is not None
            else None
        )
        centre = self._squared(square)
        subtraction = self._made_by(centre, "Sub") if centre is not None else None
        if mean_of_squares is None or square is None or centre is None or subtraction is None:
            return None
        source, mean = self._nodes[subtraction].input
        first_mean = self._made_by(mean, "ReduceMean")
        division = self._only_reader(self._nodes[root].output[0], "Div")
        if first_mean is None or division is None or self._nodes[first_mean].input[0] != source:
            return None
        if list(self._nodes[division].input) != [centre, self._nodes[root].output[0]]:
            return None
        rank = self._rank.get(source)
        axes = self._axes(first_mean, rank)
        if rank is None or axes is None or axes != self._axes(mean_of_squares, rank):
            return None
        inner = [first_mean, subtraction, square, mean_of_squares, add, root]
        if not self._private(inner, {centre: {square, division}}):
            return None
        tail, result, scale, shift = self._tail(division, rank, axes)
        if scale is None:
            return None
        return Chain(
            (*sorted(inner), *tail),
            source,
            result,
            axes,
            rank,
            float(epsilon.ravel()[0]),
            scale,
            shift,
        )

    def _tail(
        self, division: int, rank: int, axes: tuple[int, ...]
    ) -> tuple[tuple[int, ...], str, NDArray[np.float32] | None, NDArray[np.float32] | None]:
        """Scale and shift where they are constants over the normalised axes; the operator needs a
        scale.
        """
        result = self._nodes[division].output[0]
        multiply = self._only_reader(result, "Mul")
        scaled = self._with_constant(multiply)
        if multiply is None or scaled is None or (scale := _over(scaled[1], rank, axes)) is None:
            return (division,), result, None, None
        result = self._nodes[multiply].output[0]
        plus = self._only_reader(result, "Add")
        shifted = self._with_constant(plus)
        if (
            plus is None
            or shifted is None
            or (shift := _over(shifted[1], rank, axes)) is None
            or shift.shape != scale.shape
        ):
            return (division, multiply), result, scale, None
        return (division, multiply, plus), self._nodes[plus].output[0], scale, shift

    def _made_by(self, tensor: str, *ops: str) -> int | None:
        index = self._producer.get(tensor)
        return (
            index
            if index is not None
            and self._nodes[index].op_type in ops
            and not self._nodes[index].domain
            else None
        )

    def _only_reader(self, tensor: str, op: str) -> int | None:
        readers = self._readers.get(tensor, [])
        if tensor in self._outputs or len(readers) != 1 or self._nodes[readers[0]].op_type != op:
            return None
        return readers[0]

    def _with_constant(self, index: int | None) -> tuple[str, NDArray[np.float32]] | None:
        """The computed operand and the constant one of a node with two."""
        if index is None or len(self._nodes[index].input) != 2:
            return None
        first, second = self._nodes[index].input
        if (first in self._constants) == (second in self._constants):
            return None
        constant, other = (first, second) if first in self._constants else (second, first)
        array = self._constants[constant]
        return (other, array) if array.dtype == np.float32 else None

    def _squared(self, index: int | None) -> str | None:
        """What the node squares."""
        if index is None:
            return None
        first, second = self._nodes[index].input
        if self._nodes[index].op_type == "Mul":
            return first if first == second else None
        power = self._constants.get(second)
        return (
            first
            if power is not None and power.size == 1 and float(power.ravel()[0]) == 2.0
            else None
        )

    def _axes(self, index: int, rank: int | None) -> tuple[int, ...] | None:
        """The axes that a ReduceMean keeps as 1, counted from the front: all trailing ones, or the
        channels of NCHW.
        """
        node = self._nodes[index]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        axes = attributes.get("axes")
        if axes is None and len(node.input) > 1:
            axes = self._constants.get(node.input[1])
        if axes is None or rank is None or attributes.get("keepdims", 1) != 1:
            return None
        counted = tuple(sorted(int(a) % rank for a in axes))
        trailing = counted == tuple(range(rank - len(counted), rank)) and len(counted) < rank
        return counted if trailing or (counted == (1,) and rank == 4) else None

    def _private(self, nodes: list[int], shared: dict[str, set[int]]) -> bool:
        """True if nothing but the chain reads what ``nodes`` give; the last one's reader was
        checked.
        """
        for index in nodes:
            (name,) = self._nodes[index].output
            readers = Counter(self._readers.get(name, []))
            allowed = shared.get(name)
            if name in self._outputs or (
                set(readers) - allowed if allowed is not None else len(readers) != 1
            ):
                return False
        return True


def _over(
    array: NDArray[np.float32], rank: int, axes: tuple[int, ...]
) -> NDArray[np.float32] | None:
    """``array`` over ``axes`` alone; None if it varies along another axis, or is broadcast along
    one of them.
    """
    if array.ndim > rank:
        return None
    shape = (1,) * (rank - array.ndim) + array.shape
    if any(size != 1 for axis, size in enumerate(shape) if axis not in axes):
        return None
    if any(shape[a] == 1 for a in axes):
        return None
    return np.ascontiguousarray(array.reshape([shape[a] for a in axes]))


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
