"""Extracts nodes of a model as a model of their own, whose inputs are what other nodes gave them.

Initialisers, Constant nodes, and tensors that follow from shapes and constants become constants,
because an engine may refuse such tensors (axes, sizes, pads) as inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.precision_rules import RANDOM, TYPE_AGNOSTIC, is_standard
from bisect_trt.model.tensor_types import UNKNOWN
from bisect_trt.model.walk import fed_inputs, tensors_read, without_graph


@dataclass(frozen=True)
class Border:
    """The tensors that a subgraph takes and gives.

    ``inputs`` come from the model's inputs or from other nodes, ``constants`` follow from shapes
    and constants outside. ``outputs`` are read outside, outputs of the model, or not read at all.
    """

    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    outputs: tuple[str, ...]


class Extractor:
    """Cuts subgraphs out of one model; ``nodes`` are the ids of all nodes but Constants."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        source = graph.proto.graph
        self._ids = dict(zip(graph.names, source.node, strict=True))
        self._reads = {i: tensors_read(node) for i, node in self._ids.items()}
        self._initialisers = {t.name: t for t in source.initializer}
        constant = {i for i, n in self._ids.items() if n.op_type == "Constant" and is_standard(n)}
        self._constants = {self._ids[i].output[0]: self._ids[i] for i in constant}
        self._maker = {name: i for i, n in self._ids.items() for name in n.output if name}
        self._declared = {v.name: v for v in fed_inputs(source)}
        self.nodes = tuple(i for i in self._ids if i not in constant)
        self._static = self._from_shapes_and_constants()

    def operator(self, node: str) -> str:
        """The operator type of a node."""
        return str(self._ids[node].op_type)

    def makers(self, tensors: Iterable[str]) -> frozenset[str]:
        """The nodes that ``tensors`` depend on."""
        found: set[str] = set()
        waiting = [self._maker[t] for t in tensors if t in self._maker]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [self._maker[t] for t in self._reads[node] if t in self._maker]
        return frozenset(found).intersection(self.nodes)

    def border(self, subgraph: frozenset[str]) -> Border:
        """The tensors that ``subgraph`` takes and gives; if it keeps all nodes, the model's."""
        if subgraph.issuperset(self.nodes):
            return Border(tuple(self._declared), (), self.graph.outputs)
        inputs: dict[str, None] = {}
        constants: dict[str, None] = {}
        read_outside = set(self.graph.outputs)
        read: set[str] = set()
        made = {t for i in subgraph for t in self._ids[i].output if t}
        from_others = self._maker.keys() - made - self._constants.keys()
        for node in self.nodes:
            reads = self._reads[node]
            read.update(reads)
            if node not in subgraph:
                read_outside.update(reads)
                continue
            for name in reads:
                if name in self._declared or name in from_others:
                    (constants if name in self._static else inputs).setdefault(name)
        kept = (i for i in self.nodes if i in subgraph)
        made_in_order = (t for i in kept for t in self._ids[i].output if t)
        # Tensors that nothing reads are given too, so that no node of the subgraph is dropped.
        outputs = [t for t in made_in_order if t in read_outside or t not in read]
        return Border(tuple(inputs), tuple(constants), tuple(outputs))

    def extract(
        self, subgraph: frozenset[str], values: Mapping[str, NDArray[Any]]
    ) -> onnx.ModelProto:
        """``subgraph`` as a model; a subgraph of all nodes is the source under unique names."""
        if subgraph.issuperset(self.nodes):
            return with_unique_names(self.graph.proto)
        # Recorded values give the types and sizes of the inputs that the model does not declare.
        border = self.border(subgraph)
        inputs = [self._declared.get(n) or _value(n, values[n]) for n in border.inputs]
        frozen = [numpy_helper.from_array(np.asarray(values[n]), n) for n in border.constants]
        return self._written(subgraph, inputs, frozen, border.outputs)

    def recorder(self, tensors: Collection[str]) -> onnx.ModelProto:
        """A model that computes only ``tensors``, as its outputs."""
        subgraph = self.makers(tensors)
        taken = self.border(subgraph).inputs
        return self._written(subgraph, [self._declared[n] for n in taken], [], tensors)

    def _written(
        self,
        subgraph: frozenset[str],
        inputs: Iterable[onnx.ValueInfoProto],
        frozen: Iterable[TensorProto],
        outputs: Iterable[str],
    ) -> onnx.ModelProto:
        source = self.graph.proto
        # From version 4 of the format on, initialisers need not be inputs too.
        target = without_graph(source, min_ir_version=4)
        target.producer_name = source.producer_name
        target.producer_version = source.producer_version
        graph = target.graph
        kept = [node for node in self.nodes if node in subgraph]
        read = {name: None for node in kept for name in self._reads[node]}
        read |= dict.fromkeys(outputs)
        graph.input.extend(inputs)
        graph.initializer.extend(frozen)
        graph.initializer.extend(self._initialisers[n] for n in read if n in self._initialisers)
        graph.node.extend(self._constants[n] for n in read if n in self._constants)
        for node in kept:
            graph.node.append(self._ids[node])
            graph.node[-1].name = node  # the unique id
        for name in outputs:
            elem_type = self.graph.types.type_of(name)
            typed = helper.make_tensor_value_info(name, elem_type, None)
            untyped = onnx.ValueInfoProto(name=name)  # ONNX Runtime infers the type of a sequence
            graph.output.append(untyped if elem_type == UNKNOWN else typed)
        return target

    def _from_shapes_and_constants(self) -> frozenset[str]:
        found = {*self._initialisers, *self._constants}
        for node in self.nodes:
            proto = self._ids[node]
            # A Dropout in training mode is random too.
            is_random = proto.op_type in RANDOM or proto.op_type == "Dropout"
            # A shape is the same in every run on one input, whatever the precision.
            fixed = found.issuperset(self._reads[node]) and not is_random
            if is_standard(proto) and (fixed or proto.op_type in TYPE_AGNOSTIC):
                found.update(name for name in proto.output if name)
        return frozenset(found)


def declare_shapes(model: onnx.ModelProto, outputs: Mapping[str, NDArray[Any]]) -> None:
    """Gives the outputs of ``model`` the types and shapes of ``outputs``, in place."""
    for value in model.graph.output:
        value.CopyFrom(_value(value.name, outputs[value.name]))


def _value(name: str, array: NDArray[Any]) -> onnx.ValueInfoProto:
    elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, elem_type, list(array.shape))
