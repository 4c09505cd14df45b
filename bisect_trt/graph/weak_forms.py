"""A plan in the forms that other tools take: typed ONNX for TensorRT 11, arguments and scripts for
older versions.
"""

from __future__ import annotations

import ast

import onnx

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.names import printable
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.graph import Graph, as_graph

_BUILDER_FLAG = {Precision.FP16: "--fp16", Precision.BF16: "--bf16"}


def trtexec_arguments(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> str:
    """The precision arguments of trtexec 8.6 to 10.x for ``plan``, as one line for a shell.

    trtexec splits ``--layerPrecisions`` on commas and strips single quotes, so names holding those,
    or ``*``, or what a terminal would obey, cannot be written: raises :class:`BadInputError` naming
    the layer rather than give a wrong line. TensorRT 11 has no such arguments; give it the typed
    ONNX.
    """
    graph = as_graph(model)
    graph.check_plan(plan)
    if not plan.base.is_storage:
        return "--noTF32" if plan.base is Precision.FP32 else ""
    _check_named(graph, plan)
    pinned = [layer for layer in graph.layers if layer.name in plan.pinned]
    for layer in pinned:
        bad = [c for c in layer.name if c in ",'\"*\\ " or printable(c) != c]
        if bad:
            raise BadInputError(
                f"layer {layer.name!r} cannot be written in --layerPrecisions ({bad[0]!r} in its "
                "name); use the typed ONNX or the polygraphy script"
            )
    # The pins were found with FP32 meaning FP32; trtexec lets FP32 layers run in TF32 unless told
    # otherwise.
    flags = _BUILDER_FLAG[plan.base] + (" --noTF32" if plan.pin_precision is Precision.FP32 else "")
    if not pinned:
        return flags
    precisions = ",".join(f"{layer.name}:fp32" for layer in pinned)
    types = ",".join(f"{layer.name}:{'+'.join(['fp32'] * len(layer.outputs))}" for layer in pinned)
    constraints = f"'--layerPrecisions={precisions}' '--layerOutputTypes={types}'"
    return f"{flags} --precisionConstraints=obey {constraints}"


def _check_named(graph: Graph, plan: PrecisionPlan) -> None:
    """Names that this tool made up are not in the user's file, where weak typing would look for
    them.
    """
    given = {node.name for node in graph.proto.graph.node}
    unnamed = sorted(plan.pinned - given)
    if unnamed:
        raise BadInputError(
            f"layer {unnamed[0]!r} has no unique name in the model itself, so {len(unnamed)} pins "
            "cannot be written by name; use the typed ONNX (--format onnx)"
        )


_SCRIPT = '''"""Weak typing for polygraphy and TensorRT 8.6 to 10.x, written by bisect-trt.

polygraphy run model.onnx --trt --{base} --precision-constraints obey \\
    --trt-network-postprocess-script THIS_FILE
TensorRT 11 has no layer.precision: give it the typed ONNX instead.
"""

import tensorrt as trt

PINNED = {pinned}
MARK = "[ONNX Layer: "


def onnx_names(layer):
    """The ONNX nodes a TensorRT layer was made from: its own name, and those in its metadata."""
    names = {{layer.name}}
    for part in (getattr(layer, "metadata", "") or "").split(MARK)[1:]:
        names.add(part.split("]")[0])
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
    missing = PINNED - seen
    if missing:
        raise RuntimeError("pinned layers not found in the network: " + ", ".join(sorted(missing)))
'''


def polygraphy_script(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> str:
    """A Python file for polygraphy's ``--trt-network-postprocess-script`` that pins ``plan``'s
    layers.
    """
    graph = as_graph(model)
    graph.check_plan(plan)
    _check_named(graph, plan)
    lines = "".join(f"    {name!r},\n" for name in sorted(plan.pinned))
    return _SCRIPT.format(
        base=plan.base.value, pinned="{\n" + lines + "}" if plan.pinned else "set()"
    )


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
