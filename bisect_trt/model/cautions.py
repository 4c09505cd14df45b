"""Findings on a model before it runs: what is refused, and what a run judges coarsely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import onnx
from onnx import TensorProto, helper

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import dynamic_axes, input_specs
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import QUANTISES, RANDOM, is_standard
from bisect_trt.model.tensor_types import UNKNOWN
from bisect_trt.model.walk import every_node, subgraphs


def cautions(graph: Graph) -> list[Finding]:
    """A finding for each property of the model that a run judges coarsely or not at all."""
    return [
        *_custom_operators(graph),
        *_of_types(graph),
        *_random(graph),
        *_whole_bodies(graph),
        *_defaults(graph),
    ]


def _custom_operators(graph: Graph) -> Iterator[Finding]:
    """A finding on custom operators."""
    nodes = graph.proto.graph.node
    custom = Counter(f"{n.domain}.{n.op_type}" for n in nodes if not is_standard(n))
    count = sum(custom.values())
    layers = sum(graph.role(i, Precision.FP16).kind is Kind.LAYER for i in range(len(nodes)))
    every = layers + count
    if custom:
        named = some_of([f"{name} ({n})" for name, n in custom.most_common()])
        message = (
            f"{count} of {every} nodes are of operators that are never reduced: {named}; "
            "they run in FP32 under every plan here, and an engine may run them otherwise"
        )
        yield Finding("custom-operators", "", message, count >= 0.1 * every)


def _of_types(graph: Graph) -> Iterator[Finding]:
    """Findings on nodes that compute in double precision or quantise."""
    double = doubles(graph)
    if double:
        message = (
            f"{counted(double, 'node')} compute{'s' if double == 1 else ''} in double precision, "
            "which TensorRT does in FP32: the reference and every emulated plan keep to double, so "
            "what that costs is seen on an engine alone; cast to float in the model"
        )
        yield Finding("double-precision", "", message, True)
    quantised = sum(n.op_type in QUANTISES for n in graph.proto.graph.node)
    if quantised:
        s = "s" if quantised == 1 else ""
        message = (
            f"{counted(quantised, 'node')} quantise{s} or dequantise{s}: the errors of "
            "quantisation are in the reference too, only what is reduced beside it is judged, and "
            "a last bit that differs becomes a whole step"
        )
        yield Finding("quantised", "", message, True)


def doubles(graph: Graph) -> int:
    """The number of double-precision nodes that an output depends on through float tensors."""
    scope, live, count = graph.types, set(graph.outputs), 0
    floats = (TensorProto.FLOAT, TensorProto.DOUBLE)
    # Backwards from the outputs through floats only, because integers carry shapes.
    for node in reversed(graph.proto.graph.node):
        if live.isdisjoint(node.output):
            continue
        if any(scope.type_of(o) in floats for o in node.output if o):
            live.update(i for i in node.input if i and scope.type_of(i) in floats)
        is_double = any(scope.type_of(o) == TensorProto.DOUBLE for o in node.output if o)
        count += is_double and node.op_type not in ("Cast", "Constant")
    return count


def _defaults(graph: Graph) -> Iterator[Finding]:
    """A finding on inputs with a default."""
    weights = {tensor.name for tensor in graph.proto.graph.initializer}
    names = [i.name for i in graph.proto.graph.input if i.name in weights]
    if names and graph.proto.ir_version >= 4:  # before, every weight had to be an input
        are, them = ("is a constant", "it") if len(names) == 1 else ("are constants", "them")
        message = (
            f"{counted(len(names), 'input')} with a default {are} here, as in an engine: "
            f"{some_of(names)}; the typed model does not take {them}, remove the default to feed "
            f"{them}"
        )
        yield Finding("default-input", names[0], message)


def _random(graph: Graph) -> Iterator[Finding]:
    """A finding on nodes that generate random numbers."""
    random = [
        name
        for node, name in graph.named_nodes()
        if any(n.op_type in RANDOM or _is_training(graph, n) for n in every_node([node]))
    ]
    if random:
        message = (
            f"random numbers are drawn by {some_of(random)}: no two runs are the same, so "
            "no plan can be judged; make them inputs, or export the model for inference"
        )
        yield Finding("random", random[0], message, True)


def _is_training(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether ``node`` is a Dropout in training mode with a ratio above 0."""
    if node.op_type != "Dropout" or len(node.input) < 3:
        return False
    share, mode = (graph.constants.get(name) for name in node.input[1:3])
    return mode is not None and bool(np.any(mode)) and (share is None or bool(np.any(share)))


def _whole_bodies(graph: Graph) -> Iterator[Finding]:
    """Findings on control flow that holds at least half of the nodes in one body."""
    nodes = graph.proto.graph.node
    inside = [
        max((sum(1 for _ in every_node(body.node)) for _, body in subgraphs(node)), default=0)
        for node in nodes
    ]
    every = len(nodes) + sum(inside)
    for index, (node, name) in enumerate(graph.named_nodes()):
        is_layer = graph.role(index, Precision.FP16).kind is Kind.LAYER
        if is_layer and inside[index] >= every / 2:
            article = "an" if node.op_type[0] in "AEIOU" else "a"
            message = (
                f"layer {name!r} holds {inside[index]} of {every} nodes that run: {article} "
                f"{node.op_type} is reduced or pinned as a whole; where its condition or count is "
                "always the same, make that a constant and fold it, and its layers are told apart"
            )
            yield Finding("control-flow", name, message, True)


def open_sizes(graph: Graph) -> list[Finding]:
    """A finding on the dynamic axes of the inputs."""
    try:
        specs = input_specs(graph.proto)
    except BadInputError:  # another finding says that a run refuses this model
        return []
    axes = [f"{name} of input {spec.name!r}" for spec, _, name in dynamic_axes(specs)]
    if not axes:
        return []
    message = (
        f"dynamic axes: {', '.join(axes)}: a plan is tested at the sizes of the given inputs, so "
        "give some of each size that it will meet"
    )
    return [Finding("open-size", axes[0], message)]


def refuse_unsupported(graph: Graph, name: str) -> None:
    """Refuses a model whose outputs cannot be compared."""
    for reason in _reasons_to_refuse(graph):
        raise BadInputError(f"{name}: {reason}")


def refusals(graph: Graph, name: str) -> list[Finding]:
    """The reasons of :func:`refuse_unsupported` as findings."""
    return [
        Finding("refused", "", f"a run refuses this model: {name}: {reason}", True)
        for reason in _reasons_to_refuse(graph)
    ]


def _reasons_to_refuse(graph: Graph) -> Iterator[str]:
    """The first reason of each kind."""
    for reasons in (_incomparable(graph), _sparse(graph), _learning(graph)):
        yield from islice(reasons, 1)


def _sparse(graph: Graph) -> Iterator[str]:
    for sparse in graph.proto.graph.sparse_initializer:
        yield (
            f"sparse initialiser {sparse.values.name!r} cannot be emulated; store it as a dense "
            "tensor"
        )


def _learning(graph: Graph) -> Iterator[str]:
    """Normalisations in training mode, which TensorRT does not take either."""
    for node, layer in graph.named_nodes():
        for inner in every_node([node]):
            training = any(a.name == "training_mode" and a.i for a in inner.attribute)
            if inner.op_type == "BatchNormalization" and training:
                yield (
                    f"layer {layer!r} holds a BatchNormalization in training mode, whose "
                    "statistics change at every run; export the model for inference (model.eval())"
                )


def _incomparable(graph: Graph) -> Iterator[str]:
    """Outputs that have no numbers to compare."""
    for output in graph.proto.graph.output:
        if not output.type.HasField("tensor_type"):
            yield f"output {output.name!r} is no tensor; sequences cannot be compared"
            continue
        elem_type = graph.types.type_of(output.name)
        if elem_type == TensorProto.STRING:
            yield (
                f"output {output.name!r} is text, which engines do not have and no metric "
                "compares: cut the model before it"
            )
        elif elem_type != UNKNOWN:
            # ONNX Runtime cannot return bfloat16, and returns 8-bit floats and smaller as codes.
            dtype = helper.tensor_dtype_to_np_dtype(elem_type)
            if dtype.isbuiltin != 1 or dtype.kind not in "fiub":
                called = helper.tensor_dtype_to_string(elem_type).rpartition(".")[2].lower()
                yield (
                    f"output {output.name!r} is {called}, of which ONNX Runtime gives no numbers: "
                    "make an FP32 output of it (a Cast behind it, or what is before its Cast)"
                )
