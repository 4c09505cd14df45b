"""Rule *layernorm*: a LayerNorm written out in primitive operators becomes one operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.walk import attribute
from bisect_trt.repair.edits import (
    Edit,
    NoMatchError,
    Proposal,
    Ranges,
    Rule,
    Wiring,
    note_origins,
    require,
    searched,
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


def propose_layernorm(graph: Graph, ranges: Ranges) -> Proposal:
    """Writes each exact LayerNorm as one operator, whose inside engines keep in FP32.

    Identity: (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * scale + shift =
    LayerNormalization(x). Sources: NAFNet, UniMatch (AutoCast's documentation, TensorRT's warning
    on LayerNorm in FP16).
    """
    return searched(graph, ranges, Rule.LAYERNORM, _fused)


def _fused(wiring: Wiring, ranges: Ranges, index: int) -> Edit:
    require(wiring.nodes[index].op_type == "Sqrt")
    return _written(wiring, _Finder(wiring).match(index))


class _Finder:
    """Finds exact matches from the square root outwards."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._nodes = wiring.nodes
        self._constants = wiring.constants
        self._ranks = wiring.graph.types.ranks
        self._outputs = wiring.outputs | wiring.captured
        self._readers = wiring.readers

    def match(self, root: int) -> _Chain:
        deviation = self._nodes[root].output[0]
        add = self._wiring.made_by(self._nodes[root].input[0], "Add")
        variance, epsilon = self._with_constant(add)
        require(epsilon.size == 1)
        mean_of_squares = self._wiring.made_by(variance, "ReduceMean")
        square = self._wiring.made_by(self._nodes[mean_of_squares].input[0], "Pow", "Mul")
        centre = self._squared(square)
        subtraction = self._wiring.made_by(centre, "Sub")
        source, mean = self._nodes[subtraction].input
        first_mean = self._wiring.made_by(mean, "ReduceMean")
        require(self._nodes[first_mean].input[0] == source)
        division = self._wiring.only_reader(deviation, "Div")
        require(list(self._nodes[division].input) == [centre, deviation])
        require(source in self._ranks)
        rank = self._ranks[source]
        axes = self._axes(first_mean, rank)
        require(axes == self._axes(mean_of_squares, rank) and epsilon.ndim <= rank)
        inner = [first_mean, subtraction, square, mean_of_squares, add, root]
        # No other node may read what the operator no longer gives.
        for index in inner:
            (name,) = self._nodes[index].output
            require(name not in self._outputs)
            readers = self._readers.get(name, [])
            require({square, division}.issuperset(readers) if name == centre else len(readers) == 1)
        multiply = self._wiring.only_reader(self._nodes[division].output[0], "Mul")
        scale = _over(self._with_constant(multiply)[1], rank, axes)
        tail, shift = [division, multiply], None
        try:  # the shift is optional
            plus = self._wiring.only_reader(self._nodes[multiply].output[0], "Add")
            shift = _over(self._with_constant(plus)[1], rank, axes)
            require(shift.shape == scale.shape)
            tail.append(plus)
        except NoMatchError:
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

    def _with_constant(self, index: int) -> tuple[str, Constant]:
        """The computed operand and the constant one of a node with two."""
        other, constant = self._wiring.with_constant(index)
        return other, self._constants[constant]

    def _squared(self, index: int) -> str:
        """The tensor that the node squares."""
        first, second = self._nodes[index].input
        if self._nodes[index].op_type == "Mul":
            require(first == second)
        else:
            power = self._constants.get(second)
            require(power is not None and power.size == 1 and float(power.ravel()[0]) == 2.0)
        return str(first)

    def _axes(self, index: int, rank: int) -> tuple[int, ...]:
        """The axes that a ReduceMean reduces to 1: all trailing ones, or the channels of NCHW."""
        node = self._nodes[index]
        axes = attribute(node, "axes")
        if axes is None and len(node.input) > 1:
            axes = self._constants.get(node.input[1])
        if axes is None or attribute(node, "keepdims", 1) != 1:
            raise NoMatchError
        found = tuple(sorted(int(a) % rank for a in axes))
        trailing = found == tuple(range(rank - len(found), rank)) and 0 < len(found) < rank
        # Channels of NCHW are transposed to the end; the operator normalises trailing axes only.
        require(trailing or (found == (1,) and rank == 4))
        return found


def _over(array: Constant, rank: int, axes: tuple[int, ...]) -> Constant:
    """``array`` reshaped to ``axes``; no match if it varies along another axis or broadcasts."""
    require(array.ndim <= rank)
    shape = (1,) * (rank - array.ndim) + array.shape
    require(all((size != 1) == (axis in axes) for axis, size in enumerate(shape)))
    return np.ascontiguousarray(array.reshape([shape[a] for a in axes]))


def _written(wiring: Wiring, chain: _Chain) -> Edit:
    """The new operator, between two transpositions if its axes are not the last."""
    names = [wiring.names[i] for i in chain.nodes]
    scope = names[0].rpartition("/")[0]
    name = wiring.fresh(f"{scope}/LayerNormalization" if scope else "LayerNormalization")
    scale, shift = wiring.fresh(f"{name}_scale"), wiring.fresh(f"{name}_shift")
    constants = {scale: chain.scale}
    if chain.shift is not None:
        constants[shift] = chain.shift
    trailing = chain.axes[-1] == chain.rank - 1
    source, result = chain.source, chain.result
    if not trailing:
        source, result = wiring.fresh(f"{name}_in"), wiring.fresh(f"{name}_out")
    new = helper.make_node(
        "LayerNormalization",
        [source, *constants],
        [result],
        name,
        axis=-len(chain.axes),
        epsilon=chain.epsilon,
    )
    note_origins(new, names)
    written: tuple[onnx.NodeProto, ...] = (new,)
    if not trailing:
        order = [a for a in range(chain.rank) if a not in chain.axes] + list(chain.axes)
        back = np.argsort(order).tolist()
        there = helper.make_node(
            "Transpose", [chain.source], [source], f"{name}_to_last", perm=order
        )
        again = helper.make_node("Transpose", [result], [chain.result], f"{name}_back", perm=back)
        written = (there, new, again)
    last = max(chain.nodes)
    return Edit(
        rule=Rule.LAYERNORM,
        nodes=tuple(names),
        tensors=(),
        sentence="a LayerNorm in primitive operators as one operator",
        replaced={index: written if index == last else () for index in chain.nodes},
        constants=constants,
    )
