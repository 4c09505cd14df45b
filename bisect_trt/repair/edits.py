"""What a repair rule reads (:class:`Wiring`, ranges) and what it proposes (:class:`Edit`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.precision_rules import FLOAT, is_standard
from bisect_trt.model.walk import (
    captured_names,
    every_node,
    remove_initialisers,
    replace_nodes,
    tensor_names,
    unused,
)

LARGEST_FP16 = 65504.0
"""The largest finite number of FP16."""

SMALLEST_NORMAL_FP16 = 2.0**-14
"""Below it FP16 has fewer bits than eleven."""

SMALLEST_FP16 = 2.0**-24
"""The smallest positive number of FP16; half of it and less becomes 0."""

HEADROOM = 4.0
"""A value is to stay this many times below FP16's largest, whatever inputs twice as large show."""

ORIGINS = "bisect_trt.origins"
"""The metadata key of the nodes that a repaired node stands for, as a list in JSON."""


class Rule(StrEnum):
    """The rules, in the order in which they are applied."""

    FOLD_BN = "fold-bn"
    CONST_THROUGH = "const-through"
    MASK = "mask"
    LOG_SUM_EXP = "log-sum-exp"
    EPSILON = "epsilon"
    SHIFT_TO_NORM = "shift-to-norm"
    SCALE = "scale"
    LAYERNORM = "layernorm"
    INTEGERS = "integers"


@dataclass(frozen=True, kw_only=True)
class Range:
    """What FP32 showed of a tensor: absolute values, without zeros.

    ``median`` is the smallest of the medians that single inputs have. ``reach`` is what there must
    be room for: inputs twice as large. ``positive`` says whether a value was above 0.
    """

    largest: float
    median: float
    smallest: float
    reach: float
    positive: bool

    def joined(self, other: Range) -> Range:
        """The range on the inputs of both."""
        return Range(
            largest=max(self.largest, other.largest),
            median=min(self.median, other.median),
            smallest=min(self.smallest, other.smallest),
            reach=max(self.reach, other.reach),
            positive=self.positive or other.positive,
        )


Ranges = Mapping[str, Range]
"""The range of each FP32 tensor, over all inputs of the search."""


@dataclass(frozen=True)
class Changed:
    """A constant before and after, in words: its largest value, or what it was replaced by."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A change of the graph, or of its precision, that is the same in real arithmetic.

    ``nodes`` are the ids of the nodes that change, ``tensors`` those whose range is at stake,
    ``sentence`` says what is done. ``replaced`` holds new nodes by the index of an old one, none
    where it goes; ``constants`` are new initialisers. ``kept`` layers stay in FP32.
    """

    rule: Rule
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    sentence: str
    changed: tuple[Changed, ...] = ()
    replaced: Mapping[int, tuple[onnx.NodeProto, ...]] = field(repr=False)
    constants: Mapping[str, NDArray[Any]] = field(default_factory=dict, repr=False)
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why a rule that has something to repair at ``nodes`` leaves them alone."""

    rule: Rule
    nodes: tuple[str, ...]
    reason: str


Proposal = tuple[tuple[Edit, ...], tuple[Refusal, ...]]


class NoMatchError(Exception):
    """The nodes do not have the rule's pattern, or break a condition; the text says which."""


def require(condition: bool, reason: str = "") -> None:
    """Ends a match unless ``condition`` holds; a rule with a reason reports the refusal.

    Raises:
        NoMatchError: it does not hold.
    """
    if not condition:
        raise NoMatchError(reason)


class Wiring:
    """Who makes and reads each tensor of a graph, with its constants and free names.

    ``shared`` holds the names of new tensors that several edits read.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: Sequence[onnx.NodeProto] = list(graph.proto.graph.node)
        self.names = graph.names
        self.constants = graph.constants
        self.outputs = frozenset(graph.outputs)
        self.maker = {o: i for i, n in enumerate(self.nodes) for o in n.output if o}
        self.readers: dict[str, list[int]] = {}
        self.captured = set[str]()
        for index, node in enumerate(self.nodes):
            inside = captured_names(node)
            self.captured.update(inside)
            for name in (*filter(None, node.input), *inside):
                self.readers.setdefault(name, []).append(index)
        self.shared: dict[str, str] = {}
        self._taken = tensor_names(graph.proto.graph) | set(graph.names)

    def fresh(self, stem: str) -> str:
        """A name for a tensor or a node that nothing has yet."""
        return unused(stem, self._taken)

    def made_by(self, tensor: str, *operators: str) -> int:
        """The index of the standard node that makes ``tensor``, if it is one of ``operators``."""
        index = self.maker.get(tensor, -1)
        require(index >= 0)
        node = self.nodes[index]
        require(node.op_type in operators and node.domain in ("", "ai.onnx"))
        return index

    def is_inner(self, tensor: str, readers: int = 1) -> bool:
        """Whether only that many slots of nodes read ``tensor``, and no output or body does."""
        found = self.readers.get(tensor, [])
        free = tensor not in self.outputs and tensor not in self.captured
        return free and len(found) == readers

    def only_reader(self, tensor: str, *operators: str) -> int:
        """The index of the one node that reads ``tensor``, if it is one of ``operators``."""
        require(self.is_inner(tensor))
        (index,) = self.readers[tensor]
        node = self.nodes[index]
        require(node.op_type in operators and node.domain in ("", "ai.onnx"))
        return index

    def with_constant(self, index: int) -> tuple[str, str]:
        """The computed and the constant FP32 operand of a node with two."""
        require(len(self.nodes[index].input) == 2)
        first, second = self.nodes[index].input
        require((first in self.constants) != (second in self.constants))
        other, constant = (second, first) if first in self.constants else (first, second)
        require(self.constants[constant].dtype == np.float32)
        return other, constant

    def scalar(self, name: str) -> float:
        """The value of a constant with one element."""
        require(name in self.constants and self.constants.count(name) == 1)
        return float(self.constants[name].ravel()[0])


def copied(node: onnx.NodeProto, origins: Iterable[str] = ()) -> onnx.NodeProto:
    """A copy of ``node`` to be changed, which says which other nodes it stands for."""
    new = onnx.NodeProto()
    new.CopyFrom(node)
    note_origins(new, origins)
    return new


def note_origins(node: onnx.NodeProto, origins: Iterable[str]) -> None:
    """Adds node ids to those that ``node`` stands for."""
    found = dict.fromkeys((*origins_of(node), *origins))
    found.pop(node.name, None)
    if found:
        kept = [p for p in node.metadata_props if p.key != ORIGINS]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.metadata_props.add(key=ORIGINS, value=json.dumps(list(found)))


def origins_of(node: onnx.NodeProto) -> tuple[str, ...]:
    """The ids of the nodes that a repaired node stands for; empty for others."""
    for entry in node.metadata_props:
        if entry.key == ORIGINS:
            return tuple(json.loads(entry.value))
    return ()


def beginning(graph: Graph) -> Graph:
    """The graph that rules edit: nodes are named by their ids, so that repairs keep the names."""
    if all(node.name == name for node, name in graph.named_nodes()):
        return graph  # a copy would hold the weights again
    return replace(graph, proto=with_unique_names(graph.proto))


def applied(graph: Graph, edits: Sequence[Edit]) -> Graph:
    """The graph after ``edits``, which change no node twice; constants nobody reads go."""
    if not any(edit.replaced for edit in edits):
        return graph
    replaced: dict[int, tuple[onnx.NodeProto, ...]] = {}
    for edit in edits:
        assert replaced.keys().isdisjoint(edit.replaced), "two edits change one node"
        replaced.update(edit.replaced)
    model = onnx.ModelProto()
    model.CopyFrom(graph.proto)
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(model.graph.node):
        nodes += replaced.get(index, (node,))
    read_before = _read(model)
    replace_nodes(model.graph, _ordered(nodes))
    added = {name: array for edit in edits for name, array in edit.constants.items()}
    for name, array in added.items():  # two edits may share one
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    unread = read_before - _read(model)
    declared = {v.name for v in (*model.graph.input, *model.graph.output)}
    remove_initialisers(model.graph, unread - declared)
    kept = [n for n in model.graph.node if n.op_type != "Constant" or n.output[0] not in unread]
    replace_nodes(model.graph, kept)
    del model.graph.value_info[:]
    model.ir_version = max(model.ir_version, 4)  # before, initialisers had to be inputs too
    return replace(graph, proto=model)


def _read(model: onnx.ModelProto) -> set[str]:
    read = {name for node in every_node(model.graph.node) for name in node.input}
    bodies = (captured_names(node) for node in model.graph.node)
    return read.union(*bodies, (o.name for o in model.graph.output))


def _ordered(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """``nodes`` so that each follows those that it reads, otherwise in the given order."""
    maker = {o: i for i, n in enumerate(nodes) for o in n.output if o}
    done, order = set[int](), list[onnx.NodeProto]()
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            index = stack[-1]
            node = nodes[index]
            names = (*node.input, *captured_names(node))
            needs = [maker[n] for n in names if n in maker and maker[n] not in done]
            if index in done or not needs:
                stack.pop()
                if index not in done:
                    done.add(index)
                    order.append(node)
            else:
                stack += needs
    return order


def size_words(array: NDArray[Any]) -> str:
    """The value of a single number, or how many there are and the largest."""
    values = np.abs(np.asarray(array, np.float64))
    if values.size == 1:
        return f"{float(np.asarray(array).ravel()[0]):.4g}"
    finite = values[np.isfinite(values)]
    return f"{values.size} values up to {finite.max() if finite.size else np.inf:.4g}"


def not_overlapping(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """The edits that change no node which an earlier one changes."""
    taken, kept = set[int](), list[Edit]()
    for edit in edits:
        if taken.isdisjoint(edit.replaced):
            taken.update(edit.replaced)
            kept.append(edit)
    return tuple(kept)


Finder = Callable[[Wiring, Ranges, int], Edit]
"""Matches a rule's pattern at a node; raises :class:`NoMatchError` where it is not there."""


def searched(graph: Graph, ranges: Ranges, rule: Rule, find: Finder) -> Proposal:
    """The edits that ``find`` proposes anywhere in ``graph``, and the refusals with a reason."""
    wiring = Wiring(graph)
    edits, refusals = list[Edit](), list[Refusal]()
    for index, node in enumerate(wiring.nodes):
        # Constants that rules write are FP32.
        if not is_standard(node) or graph.types.type_of(node.output[0]) != FLOAT:
            continue
        try:
            edits.append(find(wiring, ranges, index))
        except NoMatchError as error:
            if str(error):
                refusals.append(Refusal(rule, (wiring.names[index],), str(error)))
    return not_overlapping(edits), tuple(refusals)


def at_stake(ranges: Ranges, names: Iterable[str]) -> bool:
    """Whether one of the tensors ``names`` comes near FP16's largest number."""
    return any(ranges[n].reach > LARGEST_FP16 for n in names if n in ranges)
