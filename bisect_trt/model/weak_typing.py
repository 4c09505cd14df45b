"""Writes a plan for TensorRT 8.6 to 10: arguments for trtexec, or a script for polygraphy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import onnx

from bisect_trt.base.display import counted, printable
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.layers import Layer
from bisect_trt.model.trt_names import parsers_name
from bisect_trt.model.walk import every_node

WITHOUT_LAYER = frozenset({"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators for which TensorRT's parser usually makes no layer."""

_SEVERAL_LAYERS = frozenset(
    (
        *("Celu", "Clip", "ConvTranspose", "GRU", "Gemm", "HardSwish", "LSTM", "LogSoftmax"),
        *("LpNormalization", "LpPool", "Mish", "Mod", "RNN", "RMSNormalization", "ReduceL1"),
        *("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "RotaryEmbedding"),
        *("Split", "Swish"),
    )
)
"""Operators for which TensorRT's parser makes several layers (TensorRT for RTX 1.6.1.120).

Only the first has the node's name; the others have it in their metadata.
"""

_OTHER_NAMES = frozenset({"Attention", "If", "Loop", "Scan", "Shrink"})
"""Operators for which no layer has the node's name."""

_UNREACHED = frozenset({"Loop", "Scan"})
"""Operators with layers that do not have the node's name even in their metadata."""


def _has_several_layers(layer: Layer) -> bool:
    """Whether TensorRT's parser makes several layers for ``layer``."""
    # These operators take two inputs in TensorRT: the parser chains them.
    chained = layer.op in ("Max", "Mean", "Min", "Sum") and len(layer.inputs) > 2
    return layer.op in _SEVERAL_LAYERS or chained


OF_FUNCTIONS = (
    "the model's functions are written out here, and TensorRT gives what is in them other names; "
    "use the typed ONNX (--format onnx)"
)
"""The reason why pins of a model with functions cannot be written by name."""

_BUILDER_FLAG = {Precision.FP16: "--fp16", Precision.BF16: "--bf16"}


def trtexec_arguments(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> str:
    """The precision arguments of trtexec 8.6 to 10 for ``plan``, as one line for a shell.

    Raises:
        BadInputError: names the layer that the line cannot express.
    """
    graph = as_graph(model)
    graph.check_plan(plan)
    if not plan.base.is_storage:
        return "--noTF32" if plan.base is Precision.FP32 else ""
    called = _names_in_tensorrt(graph, plan.pinned)
    _refuse(graph, plan, _OTHER_NAMES, "--layerPrecisions")
    pinned = [(called[layer.name], layer) for layer in graph.layers if layer.name in plan.pinned]
    several = [layer for _, layer in pinned if _has_several_layers(layer)]
    if several:
        raise BadInputError(
            f"layer {several[0].name!r} cannot be kept in FP32 whole by --layerPrecisions: "
            f"TensorRT makes several layers of {several[0].op}, and the line would name the first "
            f"alone ({counted(len(several), 'such layer')}); use the typed ONNX (--format onnx) "
            "or the script (--format polygraphy)"
        )
    # trtexec splits this option on commas, strips quotes and takes * for a wildcard.
    for name, _ in pinned:
        bad = [c for c in name if c in ",'\"*\\ " or printable(c) != c]
        if bad:
            raise BadInputError(
                f"layer {name!r} cannot be written in --layerPrecisions ({bad[0]!r} in its "
                "name); use the typed ONNX or the polygraphy script"
            )
    # By default trtexec runs FP32 layers in TF32, with which the pinned layers were not found.
    flags = _BUILDER_FLAG[plan.base] + (" --noTF32" if plan.pin_precision is Precision.FP32 else "")
    if not pinned:
        return flags
    precisions = ",".join(f"{name}:fp32" for name, _ in pinned)
    types = ",".join(f"{name}:{'+'.join(['fp32'] * len(layer.outputs))}" for name, layer in pinned)
    constraints = f"'--layerPrecisions={precisions}' '--layerOutputTypes={types}'"
    return f"{flags} --precisionConstraints=obey {constraints}"


def _refuse(graph: Graph, plan: PrecisionPlan, ops: frozenset[str], where: str) -> None:
    """Refuses pinned layers whose operator is in ``ops``, because TensorRT renames their layers."""
    for layer in graph.layers:
        if layer.name in plan.pinned and layer.op in ops:
            raise BadInputError(
                f"layer {layer.name!r} cannot be named in {where}: TensorRT calls what it makes of "
                f"{layer.op} otherwise; use the typed ONNX (--format onnx)"
            )


def _names_in_tensorrt(graph: Graph, pinned: Iterable[str]) -> dict[str, str]:
    """The names that TensorRT's parser gives to ``pinned``, which are layer ids of ``graph``.

    Raises:
        BadInputError: several nodes share the name of a pinned layer.
    """
    # The parser numbers nodes that share a name in an order of its own.
    # Names inside bodies count, because TensorRT puts all layers into one network.
    uses = Counter(parsers_name(node) for node in every_node(graph.proto.graph.node))
    called = dict(zip(graph.names, map(parsers_name, graph.proto.graph.node), strict=True))
    found = {layer: called[layer] for layer in pinned}
    shared = sorted(layer for layer, name in found.items() if uses[name] > 1)
    if shared:
        raise BadInputError(
            f"layer {shared[0]!r} has no unique name in the model itself: {uses[found[shared[0]]]} "
            f"nodes are called {found[shared[0]]!r}; {counted(len(shared), 'pin')} cannot be "
            "written by name, use the typed ONNX (--format onnx)"
        )
    return found


_SCRIPT = '''"""Weak typing for polygraphy and TensorRT 8.6 to 10.x, written by bisect-trt.

polygraphy run model.onnx --trt{flag} --precision-constraints obey \\
    --trt-network-postprocess-script THIS_FILE
TensorRT 11 has no layer.precision: give it the typed ONNX instead.
"""

import tensorrt as trt

PINNED = {pinned}
MOVED = {moved}  # these only hand values on: there may be no layer of them
MARK = "[ONNX Layer: "


def onnx_names(layer):
    """The ONNX nodes a TensorRT layer was made from: its own name, and those in its metadata."""
    names = {{layer.name}}
    for part in (getattr(layer, "metadata", "") or "").split(MARK)[1:]:
        said = part.rpartition("]")[0]  # names have brackets of their own
        pieces = said.split(" | ")  # in an If: "exp | then (then_branch) | if (If)"
        names |= {{said, pieces[0]}}
        names |= {{p[: -len(" (If)")] for p in pieces[1:] if p.endswith(" (If)")}}
    return names


def postprocess(network):
    seen = set()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        found = onnx_names(layer) & PINNED
        if not found:
            continue
        seen |= found
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        floats = [i for i, t in enumerate(outputs) if t.dtype in (trt.float32, trt.float16)]
        if not floats or layer.get_output(0).is_shape_tensor:
            continue
        layer.precision = trt.float32
        for i in floats:
            layer.set_output_type(i, trt.float32)
    missing = PINNED - MOVED - seen
    if missing:
        raise RuntimeError("pinned layers not found in the network: " + ", ".join(sorted(missing)))
'''


def polygraphy_script(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> str:
    """A script that pins the layers of ``plan``, for polygraphy's postprocess option."""
    graph = as_graph(model)
    graph.check_plan(plan)
    if not plan.base.is_storage:  # then no layer has another precision than its neighbours
        plan = plan.with_pins(())
    called = _names_in_tensorrt(graph, plan.pinned)
    _refuse(graph, plan, _UNREACHED, "the script")
    moved = {x.name for x in graph.layers if x.op in WITHOUT_LAYER}
    return _SCRIPT.format(
        flag="" if plan.base is Precision.FP32 else f" --{plan.base.value}",
        pinned=_as_set(called.values()),
        moved=_as_set(called[name] for name in called if name in moved),
    )


def _as_set(names: Iterable[str]) -> str:
    lines = "".join(f"    {name!r},\n" for name in sorted(names))
    return "{\n" + lines + "}" if lines else "set()"
