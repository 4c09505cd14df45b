"""Weak typing, for TensorRT 8.6 to 10.x: builder flags, and ``precision`` with ``set_output_type``
for each pinned layer.

Under OBEY the build fails where a type is impossible. Shape, integer and boolean layers are left
alone. Not run on hardware by this project: it is checked against the type stubs of TensorRT 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.verdict import Verdict
from bisect_trt.runners.tensorrt.records import WeakTyping

if TYPE_CHECKING:
    import tensorrt

_MARK = "[ONNX Layer: "


def apply_weak_types(
    network: tensorrt.INetworkDefinition, config: tensorrt.IBuilderConfig, typing: WeakTyping
) -> None:
    """Allow ``typing.base`` and hold the pinned layers in FP32.

    Args:
        network: a parsed network, changed in place.
        config: the builder's, changed in place.
        typing: the base precision and the pins.

    Raises:
        RunnerFailedError: BUILD_FAILED; this TensorRT has no weak typing, or a pinned layer is not
            found.
    """
    if typing.base not in ("fp16", "bf16"):
        return
    import tensorrt as trt

    try:
        if typing.base == "fp16":
            config.set_flag(trt.BuilderFlag.FP16)
        else:
            config.set_flag(trt.BuilderFlag.BF16)
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    except AttributeError as error:
        message = (
            f"TensorRT {trt.__version__} has no weak typing at {typing.base} ({error}); "
            "use --typing strong"
        )
        raise RunnerFailedError(message, Verdict.BUILD_FAILED) from error
    missing = set(typing.pinned - typing.moved)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        found = onnx_names(layer) & typing.pinned
        if found:
            missing -= found
            _hold_in_fp32(layer)
    if missing:
        named = sorted(missing)
        raise RunnerFailedError(
            f"pinned layer {named[0]!r} is not in the network ({len(named)} such)",
            Verdict.BUILD_FAILED,
        )


def onnx_names(layer: tensorrt.ILayer) -> set[str]:
    """The ONNX nodes a network layer was made from: its own name, and those in its metadata, where
    what lies in an If says so: "exp | then (then_branch) | if (If)".
    """
    names = {layer.name}
    for part in (getattr(layer, "metadata", "") or "").split(_MARK)[1:]:
        said = part.rpartition("]")[0]
        pieces = said.split(" | ")
        names |= {said, pieces[0]}
        names |= {piece.removesuffix(" (If)") for piece in pieces[1:] if piece.endswith(" (If)")}
    return names


def _hold_in_fp32(layer: tensorrt.ILayer) -> None:
    import tensorrt as trt

    outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
    if layer.type in (trt.LayerType.CONSTANT, trt.LayerType.SHAPE) or any(
        t.is_shape_tensor for t in outputs
    ):
        return
    floats = [i for i, t in enumerate(outputs) if t.dtype.name in ("FLOAT", "HALF", "BF16")]
    if not floats:
        return
    layer.precision = trt.DataType.FLOAT
    for index in floats:
        layer.set_output_type(index, trt.DataType.FLOAT)
