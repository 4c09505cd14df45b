"""A plan in the forms that older TensorRT takes: arguments of trtexec, scripts for polygraphy."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

import onnx

from bisect_trt.base.display import counted, printable
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.layers import Layer
from bisect_trt.model.tensor_types import every_node

WITHOUT_LAYER = frozenset({"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that only hand values on: TensorRT's parser mostly makes no layer of them."""

_SEVERAL_LAYERS = frozenset(
    (
        *("Celu", "Clip", "ConvTranspose", "GRU", "Gemm", "HardSwish", "LSTM", "LogSoftmax"),
        *("LpNormalization", "LpPool", "Mish", "Mod", "RNN", "RMSNormalization", "ReduceL1"),
        *("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "RotaryEmbedding"),
        *("Split", "Swish"),
    )
)
"""Operators of which TensorRT's parser makes several layers: the first alone has the node's name,
the others know it in their metadata (seen with TensorRT for RTX 1.6.1.120)."""

_ONE_FOR_TWO = frozenset({"Max", "Mean", "Min", "Sum"})
"""Of these for each input beyond two."""

_OTHER_NAMES = frozenset({"Attention", "If", "Loop", "Scan", "Shrink"})
"""Of these no layer has the node's name."""

_UNREACHED = frozenset({"Loop", "Scan"})
"""Of these not every layer says in its metadata what it was made of."""


def has_several_layers(layer: Layer) -> bool:
    """Whether TensorRT's parser makes several layers of ``layer``, of which one has its name."""
    many = layer.op in _ONE_FOR_TWO and len(layer.inputs) > 2
    return layer.op in _SEVERAL_LAYERS or many


OF_FUNCTIONS = (
    "the model's functions are written out here, and TensorRT gives what is in them other names; "
    "use the typed ONNX (--format onnx)"
)
"""Why no pin of such a model is written by name."""

_BUILDER_FLAG = {Precision.FP16: "--fp16", Precision.BF16: "--bf16"}


def trtexec_arguments(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> str:
    """The precision arguments of trtexec 8.6 to 10.x for ``plan``, as one line for a shell.

    trtexec splits ``--layerPrecisions`` on commas and strips single quotes, so names holding those,
    or ``*``, or what a terminal would obey, cannot be written.

    Raises:
        BadInputError: names the layer that no right line can be written for.
    """
    graph = as_graph(model)
    graph.check_plan(plan)
    if not plan.base.is_storage:
        return "--noTF32" if plan.base is Precision.FP32 else ""
    called = names_in_tensorrt(graph, plan.pinned)
    _refuse(graph, plan, _OTHER_NAMES, "--layerPrecisions")
    pinned = [(called[layer.name], layer) for layer in graph.layers if layer.name in plan.pinned]
    several = [layer for _, layer in pinned if has_several_layers(layer)]
    if several:
        raise BadInputError(
            f"layer {several[0].name!r} cannot be kept in FP32 whole by --layerPrecisions: "
            f"TensorRT makes several layers of {several[0].op}, and the line would name the first "
            f"alone ({counted(len(several), 'such layer')}); use the typed ONNX (--format onnx) "
            "or the script (--format polygraphy)"
        )
    for name, _ in pinned:
        bad = [c for c in name if c in ",'\"*\\ " or printable(c) != c]
        if bad:
            raise BadInputError(
                f"layer {name!r} cannot be written in --layerPrecisions ({bad[0]!r} in its "
                "name); use the typed ONNX or the polygraphy script"
            )
    # The pins were found with FP32 meaning FP32; trtexec lets FP32 layers run in TF32 unless told
    # otherwise.
    flags = _BUILDER_FLAG[plan.base] + (" --noTF32" if plan.pin_precision is Precision.FP32 else "")
    if not pinned:
        return flags
    precisions = ",".join(f"{name}:fp32" for name, _ in pinned)
    types = ",".join(f"{name}:{'+'.join(['fp32'] * len(layer.outputs))}" for name, layer in pinned)
    constraints = f"'--layerPrecisions={precisions}' '--layerOutputTypes={types}'"
    return f"{flags} --precisionConstraints=obey {constraints}"


def _refuse(graph: Graph, plan: PrecisionPlan, ops: frozenset[str], where: str) -> None:
    """Refuse pins of operators of which TensorRT's parser makes layers of other names."""
    for layer in graph.layers:
        if layer.name in plan.pinned and layer.op in ops:
            raise BadInputError(
                f"layer {layer.name!r} cannot be named in {where}: TensorRT calls what it makes of "
                f"{layer.op} otherwise; use the typed ONNX (--format onnx)"
            )


def names_in_tensorrt(graph: Graph, pinned: Iterable[str]) -> dict[str, str]:
    """What TensorRT's parser calls each of ``pinned``, which are layer ids of ``graph``.

    A node's own name, or ``node_of_`` and its first output where it has none (onnx-tensorrt,
    ``getNodeName`` in importerUtils.cpp).

    Raises:
        BadInputError: a pin has its name not to itself; the parser numbers those of several nodes
            in an order of its own.
    """
    uses = Counter(_parsers_name(node) for node in every_node(graph.proto.graph.node))
    called = dict(zip(graph.names, map(_parsers_name, graph.proto.graph.node), strict=True))
    found = {layer: called[layer] for layer in pinned}
    shared = sorted(layer for layer, name in found.items() if uses[name] > 1)
    if shared:
        raise BadInputError(
            f"layer {shared[0]!r} has no unique name in the model itself: {uses[found[shared[0]]]} "
            f"nodes are called {found[shared[0]]!r}; {counted(len(shared), 'pin')} cannot be "
            "written by name, use the typed ONNX (--format onnx)"
        )
    return found


def _parsers_name(node: onnx.NodeProto) -> str:
    return node.name or (f"node_of_{node.output[0]}" if node.output else "")


_SCRIPT = '''"""Weak typing for polygraphy and TensorRT 8.6 to 10.x, written by bisect-trt.

polygraphy run model.onnx --trt --{base} --precision-constraints obey \\
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
    """A file for polygraphy's ``--trt-network-postprocess-script`` that pins ``plan``'s layers."""
    graph = as_graph(model)
    graph.check_plan(plan)
    called = names_in_tensorrt(graph, plan.pinned)
    _refuse(graph, plan, _UNREACHED, "the script")
    moved = {x.name for x in graph.layers if x.op in WITHOUT_LAYER}
    return _SCRIPT.format(
        base=plan.base.value,
        pinned=_as_set(called.values()),
        moved=_as_set(called[name] for name in called if name in moved),
    )


def _as_set(names: Iterable[str]) -> str:
    lines = "".join(f"    {name!r},\n" for name in sorted(names))
    return "{\n" + lines + "}" if lines else "set()"


def pins_of_trtexec(text: str) -> frozenset[str]:
    """The pins that trtexec reads from ``text``: split on commas, then at the last colon."""
    _, marked, rest = text.partition("'--layerPrecisions=")
    entries = rest.partition("'")[0].split(",") if marked else []
    return frozenset(entry.rpartition(":")[0] for entry in entries)


def pins_of_script(text: str) -> frozenset[str]:
    """The set that the script defines; only that part is evaluated, as a literal."""
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Assign):
            continue
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Name) and target.id == "PINNED" and isinstance(value, ast.Set):
            return frozenset(ast.literal_eval(value))
    return frozenset()
