"""Findings on a model before it runs: what is refused, judged coarsely, or lost by rounding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import VANISHING, Finding
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.arrays import flat, slices
from bisect_trt.metrics.rounding import LARGEST, SMALLEST_SUBNORMAL, STEPS, rounded
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.inputs import dynamic_axes, input_specs
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import (
    MATRIX_INPUTS,
    QUANTISES,
    RANDOM,
    STORAGE_TYPE,
    is_standard,
)
from bisect_trt.model.tensor_types import UNKNOWN, every_node, subgraphs
from bisect_trt.model.tensor_values import let_go

_MAJOR_SHARE = 0.1
"""Share of the float nodes from which on a finding is a major one."""

_LINEAR = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")


def cautions(graph: Graph) -> list[Finding]:
    """A finding for each property of the model that a run judges coarsely or not at all."""
    return [
        *_never_reduced(graph),
        *_of_types(graph),
        *_random(graph),
        *_of_quantisation(graph),
        *_whole_bodies(graph),
        *_defaults(graph),
    ]


def _never_reduced(graph: Graph) -> Iterator[Finding]:
    """Findings on custom operators and on nodes that the source reduces already."""
    nodes, scope = graph.proto.graph.node, graph.types
    custom = Counter(f"{n.domain}.{n.op_type}" for n in nodes if not is_standard(n))
    low = STORAGE_TYPE.values()
    reduced = sum(
        is_standard(n) and any(scope.type_of(o) in low for o in n.output if o) for n in nodes
    )
    count = sum(custom.values())
    layers = sum(graph.role(i, Precision.FP16).kind is Kind.LAYER for i in range(len(nodes)))
    every = layers + count + reduced
    if custom:
        named = some_of([f"{name} ({n})" for name, n in custom.most_common()])
        message = (
            f"{count} of {every} nodes are of operators that are never reduced: {named}; "
            "they run in FP32 under every plan here, and an engine may run them otherwise"
        )
        yield Finding("custom-operators", "", message, count >= _MAJOR_SHARE * every)
    if reduced:
        message = (
            f"{reduced} of {every} nodes already run in FP16 or BF16 in the source: the reference "
            "computes them without most of their roundings, so that nothing tells what these do, "
            "and no pin undoes them; give the FP32 model that it was made from"
        )
        yield Finding("already-reduced", "", message, reduced >= _MAJOR_SHARE * every)


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


def _of_quantisation(graph: Graph) -> Iterator[Finding]:
    """Findings on quantisation that TensorRT refuses."""
    unsigned, shifted, convolutions = list[str](), list[str](), list[str]()
    dequantised = set[str]()
    for node, name in graph.named_nodes():
        if node.op_type in ("Conv", "ConvTranspose") and dequantised.issuperset(node.input[:2]):
            convolutions.append(name)
        if node.op_type not in _LINEAR:
            continue
        low = node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]
        kind = graph.types.type_of(low)
        if kind == TensorProto.UINT8 or node.op_type == "DynamicQuantizeLinear":
            unsigned.append(name)
        if node.op_type == "DequantizeLinear" and kind in (TensorProto.INT8, TensorProto.UINT8):
            dequantised.add(node.output[0])
        zero = graph.constants.get(node.input[2]) if len(node.input) > 2 else None
        if zero is not None and np.any(zero.astype(np.float32) != 0.0):
            shifted.append(name)
    yield from refused("uint8", unsigned, "UINT8, which TensorRT refuses: quantise to INT8")
    yield from refused("zero-point", shifted, "zero points other than 0, which TensorRT refuses")
    # Found by building with TensorRT for RTX 1.6.1.120.
    what = "INT8 convolutions, which TensorRT for RTX does not build (FP8 on newer GPUs does)"
    yield from refused("int8-convolution", convolutions, what)


def refused(kind: str, names: Sequence[str], what: str) -> Iterator[Finding]:
    """One finding on the nodes ``names``, placed at the first; none if there are no nodes."""
    if names:
        yield Finding(kind, names[0], f"{some_of(names, 1)}: {what}")


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


_LOST_ERROR = 1e-2
"""Relative RMS error from which on a constant counts as lost: 32 times FP16's usual one."""

_ADDS = frozenset({"Add", "Max", "Clip"})
"""Operators in which a small constant is an epsilon."""

_ROLES = {
    ("BatchNormalization", 1): "scale",
    ("BatchNormalization", 3): "mean",
    ("BatchNormalization", 4): "variance",
}
"""Names for an operator's constants, by input slot."""


@dataclass(frozen=True)
class LostConstant:
    """The constant ``name`` of ``layer``, which rounding destroys in part.

    ``largest`` is its largest magnitude, ``role`` its meaning for the layer. ``bits_lost`` is the
    lost share of its significant bits, 1 if it becomes zero.
    """

    layer: str
    op: str
    name: str
    largest: float
    scalar: bool
    bits_lost: float
    role: str = ""

    def words(self, precision: Precision) -> str:
        """A sentence such as "epsilon 1e-12 of /Clip becomes 0 in FP16"."""
        low = precision.value.upper()
        many = not self.scalar and self.op in MATRIX_INPUTS
        if self.scalar:
            called = "epsilon" if self.op in _ADDS else f"constant {self.name!r}"
            what = f"{called} {self.largest:.3g} of {self.layer}"
        else:
            kind = "weights" if many else self.role
            what = f"{kind} of {self.layer} (largest {self.largest:.3g})"
        become, lose, whose = ("become", "lose", "their") if many else ("becomes", "loses", "its")
        if self.bits_lost >= 1.0:
            return f"{what} {become} 0 in {low}"
        return f"{what} {lose} {self.bits_lost:.0%} of {whose} bits in {low}"


def lost_constants(graph: Graph, precision: Precision) -> dict[str, LostConstant]:
    """The lost constants: for each layer, the one that loses the largest share of its bits."""
    if not precision.is_storage:
        return {}
    readers: dict[str, list[tuple[str, str, int]]] = {}
    for layer in graph.layers_at(precision):
        for slot, name in enumerate(graph.proto.graph.node[layer.index].input):
            readers.setdefault(name, []).append((layer.name, layer.op, slot))
    found: dict[str, LostConstant] = {}
    for name in (n for n in graph.float_constants if n in readers):
        array = graph.float_constants[name]
        of_all = _lost(array, precision) if array.size else None
        for reader, op, slot in readers[name]:
            lost = of_all
            if lost is None and _ROLES.get((op, slot)) == "variance":
                lost = _lost_variance(array, _epsilon(graph, reader), precision)
            if lost is None or (reader in found and lost[1] <= found[reader].bits_lost):
                continue
            role = _ROLES.get((op, slot), f"constant {name!r}")
            found[reader] = LostConstant(reader, op, name, lost[0], array.size == 1, lost[1], role)
    return found


def _epsilon(graph: Graph, layer: str) -> float:
    node = graph.proto.graph.node[graph.names.index(layer)]
    return next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)


def _lost_variance(
    array: NDArray[np.float32], epsilon: float, precision: Precision
) -> tuple[float, float] | None:
    """As :func:`_lost`, for the channels whose standard deviation changes."""
    values = flat(array).astype(np.float64)
    small = (values > 0.0) & (values <= SMALLEST_SUBNORMAL[precision] / _LOST_ERROR)
    # Epsilon hides a small variance: only a change of the standard deviation counts.
    values = values[small]
    kept = rounded(values.astype(np.float32), precision).astype(np.float64)
    off = np.abs(np.sqrt((values + epsilon) / (kept + epsilon)) - 1.0) > _LOST_ERROR
    return _lost(values[off].astype(np.float32), precision) if off.any() else None


def _lost(array: NDArray[np.float32], precision: Precision) -> tuple[float, float] | None:
    """The largest magnitude and the share of bits lost; None if the constant counts as kept."""
    largest = max(map(abs, _ends(array)))
    squares = _sum_of_squares(block.astype(np.float64) for block in _finite_blocks(array))
    # A constant with a larger RMS is not lost: the smallest step is at most this share of it.
    small = SMALLEST_SUBNORMAL[precision] / _LOST_ERROR
    if not 0.0 < math.sqrt(squares / array.size) <= small:
        return None
    off = _sum_of_squares(
        rounded(block, precision).astype(np.float64) - block for block in _finite_blocks(array)
    )
    error = math.sqrt(off / squares)
    if error < _LOST_ERROR:
        return None
    # The RMS error of values that are spread evenly over one step of the format.
    usual = STEPS[precision] / math.sqrt(3.0)
    # On a logarithmic scale: the usual error loses no bits, an error of 100 % loses all.
    return largest, min(1.0, math.log(error / usual) / math.log(1.0 / usual))


def _finite_blocks(array: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """The finite values of a constant, block by block, because it may have gigabytes."""
    values = flat(array)
    for part in slices(values.size):
        block = values[part]
        yield block[np.isfinite(block)]
    let_go(array)


def _sum_of_squares(blocks: Iterable[NDArray[np.float64]]) -> float:
    return sum(float(np.dot(block, block)) for block in blocks)


def _ends(array: NDArray[np.float32]) -> tuple[float, float]:
    """The minimum and the maximum of the finite values and 0."""
    low = high = 0.0
    for block in _finite_blocks(array):
        low = min(low, float(block.min(initial=0.0)))
        high = max(high, float(block.max(initial=0.0)))
    return low, high


def largest_constant(graph: Graph, layer: str) -> str:
    """The layer's largest constant in words, such as "variance 9.8e+07 of bn"; '' without any."""
    node = graph.proto.graph.node[graph.names.index(layer)]
    best, words = 0.0, ""
    for slot, name in enumerate(node.input):
        if name not in graph.float_constants:
            continue
        low, high = _ends(graph.float_constants[name])
        size, value = (-low, low) if -low > high else (high, high)
        if size > best:
            role = _ROLES.get((node.op_type, slot), f"constant {name!r}")
            best, words = size, f"{role} {value:.3g} of {layer}"
    return words


def weight_findings(model: onnx.ModelProto | Graph, precision: Precision) -> list[Finding]:
    """A finding for each layer's constant that overflows or partly vanishes in FP16 or BF16."""
    if not precision.is_storage:
        return []
    graph = as_graph(model)
    readers: dict[str, list[str]] = {}
    for layer in graph.layers:
        for name in layer.inputs:
            readers.setdefault(name, []).append(layer.name)
    findings = []
    for name in (n for n in graph.float_constants if n in readers):
        array = graph.float_constants[name]
        for kind, problem in _problems(array, precision) if array.size else ():
            for reader in readers[name]:
                findings.append(
                    Finding(kind, reader, f"constant {name!r} of layer {reader!r} {problem}")
                )
    return findings


def _problems(array: NDArray[np.float32], precision: Precision) -> Iterator[tuple[str, str]]:
    """The kind and the description of each thing that ``array`` loses in ``precision``."""
    # Infinite values (a mask, the bound of a maximum) are the same in any precision.
    largest = max(_ends(array), key=abs)
    vanishing = 0
    for block in map(np.abs, _finite_blocks(array)):
        lost = (block > 0) & (block < SMALLEST_SUBNORMAL[precision] / 2)
        vanishing += int(np.count_nonzero(lost))
    if abs(largest) > LARGEST[precision]:
        # A value of this size is a mask, such as FP32's most negative number.
        what = "a mask or weight" if abs(largest) >= 1e30 else "a weight"
        yield (
            "weight-overflow",
            f"holds {largest:.3g}: {what} beyond {precision}'s {LARGEST[precision]:.6g} becomes "
            "infinite",
        )
    if vanishing:
        yield (
            VANISHING,
            f"holds {vanishing} of {array.size} values below half of {precision}'s smallest "
            f"number, {SMALLEST_SUBNORMAL[precision]:.3g}, which become zero",
        )
