"""Rule *integers*: float arithmetic that computes integers is kept in FP32.

FP16 holds every whole number up to 2,048 only. Lengths, positions and indices that are computed in
float are wrong beyond, as are numbers that a Floor or a Cast cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import onnx

from bisect_trt.base.display import counted
from bisect_trt.base.plan import Precision
from bisect_trt.model.graph import Graph
from bisect_trt.model.precision_rules import (
    CONTROL_FLOW,
    FIXED_SLOTS,
    FLOAT,
    FLOATS,
    MATRIX_INPUTS,
    MOVES,
    QUANTISES,
    TYPE_AGNOSTIC,
    is_standard,
)
from bisect_trt.model.tensor_types import UNKNOWN
from bisect_trt.repair.edits import Edit, Proposal, Ranges, Rule, Wiring

LARGEST_EXACT = 2048.0
"""FP16 holds every whole number up to here."""

_MAX_VALUES = 4096
"""Larger constants are weights, which are not read."""

_MAKE_DATA = CONTROL_FLOW | QUANTISES | MATRIX_INPUTS.keys()
_ROUNDS = frozenset({"Floor", "Ceil", "Round"})
_COMPARES = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_WHOLE = MOVES | {
    *("Add", "Sub", "Mul", "Neg", "Abs", "Sign", "Max", "Min", "Sum", "Clip", "Relu", "Where"),
    *("Pad", "ReduceSum", "ReduceMax", "ReduceMin", "CumSum", "Range"),
}
"""Operators that make whole numbers of whole numbers."""


class _Origin(IntEnum):
    """What a float tensor is computed from; of several inputs, the largest counts."""

    CONSTANTS = 0
    INTEGERS = 1
    INPUTS = 2
    DATA = 3


def propose_integers(graph: Graph, ranges: Ranges) -> Proposal:
    """Keeps in FP32 each chain of layers that computes integers, where FP16 may change one.

    A layer is kept if every use of its outputs ends, through kept layers, in a Cast to integers, a
    Range, a size, or a comparison with something computed from integers. What a matrix operator or
    a body computes is data: such a layer is not kept, before the data is rounded to integers.
    At stake: a number above 2,048 on inputs twice as large, or one that may not be whole.
    Sources: vernacula #175, openvino #33214, tpu-mlir #231.
    """
    wiring = Wiring(graph)
    origins = _Origins(wiring)
    edits = (
        _edit(wiring, chain)
        for chain in _chains(wiring, _kept(wiring, origins))
        if _is_at_stake(wiring, origins, chain, ranges)
    )
    return tuple(edits), ()


class _Origins:
    """Follows each float tensor from its origin, and whether its values are whole numbers."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._origin: dict[str, _Origin] = {}
        self._whole: set[str] = set()
        fed = {i.name for i in wiring.graph.proto.graph.input} - wiring.constants.keys()
        self._origin.update(dict.fromkeys(fed, _Origin.INPUTS))
        for node in wiring.nodes:
            origin, whole = self._made_by(node)
            for name in filter(None, node.output):
                self._origin[name] = origin
                if whole:
                    self._whole.add(name)

    def of(self, tensor: str) -> _Origin:
        """What ``tensor`` is computed from."""
        return self._origin.get(tensor, _Origin.CONSTANTS)

    def is_whole(self, tensor: str) -> bool:
        """Whether the graph shows that every value is a whole number."""
        if tensor in self._whole:
            return True
        constants = self._wiring.constants
        if tensor not in constants or constants.count(tensor) > _MAX_VALUES:
            return False
        values = np.asarray(constants[tensor])
        return bool(np.isfinite(values).all() and (values == np.rint(values)).all())

    def _made_by(self, node: onnx.NodeProto) -> tuple[_Origin, bool]:
        """The origin of a node's float outputs, and whether they are whole."""
        floats = _floats(self._wiring, node.input)
        if not is_standard(node) or node.op_type in _MAKE_DATA:
            return _Origin.DATA, False
        rounds = node.op_type in _ROUNDS or (node.op_type in ("Cast", "Range") and not floats)
        origin = max(map(self.of, floats), default=_Origin.CONSTANTS)
        if rounds and not all(name in self._wiring.constants for name in filter(None, node.input)):
            origin = _Origin.INTEGERS
        whole = node.op_type in _WHOLE and bool(floats) and all(map(self.is_whole, floats))
        return origin, rounds or whole


def _floats(wiring: Wiring, names: Sequence[str]) -> list[str]:
    """The tensors among ``names`` that hold floats, or something that is not known."""
    types = wiring.graph.types
    return [n for n in names if n and types.type_of(n) in (*FLOATS, UNKNOWN)]


def _kept(wiring: Wiring, origins: _Origins) -> list[int]:
    """The layers all of whose uses end in integers, in the order of the graph."""
    kept = set[int]()
    for layer in reversed(wiring.graph.layers_at(Precision.FP16)):
        uses = [
            reader in kept or _makes_integers(wiring, origins, reader, tensor)
            for tensor in layer.outputs
            for reader in wiring.readers.get(tensor, [])
            if wiring.nodes[reader].op_type not in TYPE_AGNOSTIC
        ]
        inner = wiring.outputs.isdisjoint(layer.outputs)
        data = any(origins.of(tensor) is _Origin.DATA for tensor in layer.outputs)
        if inner and not data and uses and all(uses):
            kept.add(layer.index)
    return sorted(kept)


def _makes_integers(wiring: Wiring, origins: _Origins, reader: int, tensor: str) -> bool:
    """Whether a node makes integers, truth values or sizes of the float ``tensor``."""
    node = wiring.nodes[reader]
    if not is_standard(node):
        return False
    if node.op_type == "Cast":
        return wiring.graph.types.type_of(node.output[0]) not in (*FLOATS, UNKNOWN)
    if node.op_type in _COMPARES:
        return any(origins.of(name) is _Origin.INTEGERS for name in node.input)
    slots = {slot for slot, name in enumerate(node.input) if name == tensor}
    is_size = node.op_type in FIXED_SLOTS and slots <= set(FIXED_SLOTS[node.op_type])
    return is_size or node.op_type == "Range"


def _chains(wiring: Wiring, kept: Sequence[int]) -> list[list[int]]:
    """The ``kept`` layers that give each other tensors, together."""
    chain_of: dict[int, list[int]] = {}
    for index in kept:
        makers = {wiring.maker.get(name, -1) for name in wiring.nodes[index].input}
        joined = [index]
        for chain in {id(c): c for m in makers if (c := chain_of.get(m)) is not None}.values():
            joined += chain
        chain_of.update(dict.fromkeys(joined, joined))
    found = {id(chain): sorted(chain) for chain in chain_of.values()}
    return sorted(found.values())


def _is_at_stake(wiring: Wiring, origins: _Origins, chain: Sequence[int], ranges: Ranges) -> bool:
    """Whether FP16 may round a number of the chain on inputs twice as large."""
    nodes = [wiring.nodes[index] for index in chain]
    tensors = _floats(wiring, [name for n in nodes for name in (*n.input, *n.output)])
    if not all(map(origins.is_whole, tensors)):
        return True
    return any(ranges[tensor].reach > LARGEST_EXACT for tensor in tensors if tensor in ranges)


def _edit(wiring: Wiring, chain: Sequence[int]) -> Edit:
    """The edit that keeps a chain: it changes no node."""
    nodes = [wiring.nodes[index] for index in chain]
    names = tuple(wiring.names[index] for index in chain)
    return Edit(
        rule=Rule.INTEGERS,
        nodes=names,
        tensors=tuple(
            o for n in nodes for o in n.output if o and wiring.graph.types.type_of(o) == FLOAT
        ),
        sentence=f"{counted(len(names), 'layer')} kept in FP32",
        kept=names,
        replaced={},
    )
