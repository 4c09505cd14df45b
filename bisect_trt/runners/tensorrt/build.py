"""Parses a model and builds its engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bisect_trt.base.atomic_files import write_whole
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.model.trt_names import NetworkLayer
from bisect_trt.runners.process import LOG_LINES
from bisect_trt.runners.tensorrt.buffers import Cuda
from bisect_trt.runners.tensorrt.records import Built, EngineRequest, WeakTyping

if TYPE_CHECKING:
    import tensorrt

# With less free memory, libraries under TensorRT fail with unrelated errors, such as
# CUDNN_STATUS_INTERNAL_ERROR.
LIBRARIES_BYTES = 256 << 20
"""GPU memory that cuDNN and cuBLAS need for themselves."""

_KEPT_SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING")
_NO_MEMORY = (
    "out of memory",
    "outofmemory",
    "memoryallocation",
    "could not be allocated",
    "allocator error",
    "allocation failed",
    "memory is insufficient",
)
"""Parts of TensorRT's errors, in lower case, that mean too little GPU memory."""
_NODE_MARK = "[ONNX Layer: "


def make_logger(trt: Any) -> Any:
    """Makes a logger that keeps warnings and errors as (severity, text) in ``messages``."""

    # The base class is known only once TensorRT is imported.
    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[tuple[str, str]] = []

        def log(self, severity: Any, message: str) -> None:
            kept = (severity.name, message)
            # Builders repeat themselves.
            if severity.name in _KEPT_SEVERITIES and kept not in self.messages:
                self.messages.append(kept)

    return Collector()


def refusal(
    message: str, verdict: Verdict, logger: Any, cuda: Cuda | None = None
) -> RunnerFailedError:
    """Makes the error to raise, with the last messages of ``logger``."""
    errors = [text.lower() for severity, text in logger.messages if "ERROR" in severity]
    scarce = any(part in text for text in errors for part in _NO_MEMORY) or _is_full(cuda)
    if scarce:
        message = f"{message}: the GPU's memory does not suffice"
    # An engine that cannot be loaded or run may have cost the process its device.
    lost = verdict is not Verdict.BUILD_FAILED
    return RunnerFailedError(message, verdict, _last_lines(logger), lost=lost, machine=scarce)


def _is_full(cuda: Cuda | None) -> bool:
    try:
        return cuda is not None and cuda.free_bytes() < LIBRARIES_BYTES
    except RunnerFailedError:  # the device is lost
        return False


def _last_lines(logger: Any) -> list[str]:
    return [f"[{severity}] {text}" for severity, text in logger.messages][-LOG_LINES:]


def build_engine(trt: Any, request: EngineRequest, cache: Path | None = None) -> Built:
    """Builds a request; failures are BUILD_FAILED. ``cache`` is the timing cache's file."""
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    began = time.perf_counter()
    network = parse(trt, builder, logger, request)
    parse_seconds = time.perf_counter() - began
    inputs = _renamed_inputs(network, request)
    config = builder.create_builder_config()
    _configure(trt, config, request)
    profile = _profile(builder, network, request, inputs)
    if profile is not None:
        config.add_optimization_profile(profile)
    if request.weak is not None:
        apply_weak_types(network, config, request.weak)
    types = node_types(trt, network, request.producers)
    timing = _read_timing_cache(config, cache)
    began = time.perf_counter()
    serialised = builder.build_serialized_network(network, config)
    seconds = {"parse": parse_seconds, "build": time.perf_counter() - began}
    if serialised is None:
        reason = _last_lines(logger)[-1] if logger.messages else "no reason given"
        raise refusal(f"TensorRT cannot build the engine: {reason}", Verdict.BUILD_FAILED, logger)
    if timing is not None and cache is not None:
        write_whole(cache, bytes(config.get_timing_cache().serialize()))
    return Built(bytes(serialised), seconds, types, list(logger.messages), inputs)


def parse(trt: Any, builder: Any, logger: Any, request: EngineRequest) -> Any:
    """Parses the request's model into a network; failures are BUILD_FAILED and name the node."""
    network = builder.create_network(_network_flags(trt, request))
    parser = trt.OnnxParser(network, logger)
    parsed = (
        parser.parse(request.model)
        if isinstance(request.model, bytes)
        else parser.parse_from_file(request.model)
    )
    if parsed:
        return network
    node, reason = "", ": no reason given"
    if parser.num_errors:
        error = parser.get_error(0)
        node = error.node_name() if hasattr(error, "node_name") else ""
        reason = f" at node {error.node()} ({node or 'unnamed'}): {error.desc()}"
    raise RunnerFailedError(
        f"TensorRT cannot parse the model{reason}",
        Verdict.BUILD_FAILED,
        _last_lines(logger),
        node=node,
    )


def node_types(trt: Any, network: Any, producers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The output types of each ONNX node in the parsed network, by the node's name."""
    by_node: dict[str, tuple[str, ...]] = {}
    names = frozenset(producers.values())
    for layer in _layers(network):
        outputs = [t for t in _outputs(layer) if t is not None]
        types = tuple(tensor.dtype.name for tensor in outputs)
        entries = tuple(_metadata(layer))
        # The layers of a Loop have no metadata: there an output tensor's name tells the node. Nor
        # has the Cast behind a ReduceL2, which the parser computes in FP32 and gives back reduced.
        for tensor in outputs:
            if tensor.name in producers:
                node, own = producers[tensor.name], (tensor.dtype.name,)
                by_node[node] = by_node.get(node, own) if entries else own
        if layer.type is trt.LayerType.CONSTANT:
            continue
        # A node may become several layers: the last one gives its result.
        for entry in entries:
            # Nodes inside and behind an If are written "third | if (If)", which may also be a name.
            node = entry if entry in names else entry.partition(" | ")[0]
            by_node |= dict.fromkeys((entry, node), types)
    return by_node


def network_layers(network: Any) -> tuple[NetworkLayer, ...]:
    """The layers of a parsed network, in TensorRT's order."""
    return tuple(_as_record(layer) for layer in _layers(network))


def _as_record(layer: Any) -> NetworkLayer:
    tensors = [tensor for tensor in _outputs(layer) if tensor is not None]
    return NetworkLayer(
        name=layer.name,
        kind=layer.type.name,
        metadata=getattr(layer, "metadata", "") or "",
        outputs=tuple(tensor.name for tensor in tensors),
        types=tuple(tensor.dtype.name for tensor in tensors),
        is_shape=bool(tensors) and bool(tensors[0].is_shape_tensor),
    )


def apply_weak_types(
    network: tensorrt.INetworkDefinition, config: tensorrt.IBuilderConfig, typing: WeakTyping
) -> None:
    """Allows ``typing.base`` and constrains pinned layers to FP32; failures are BUILD_FAILED."""
    if typing.base not in ("fp16", "bf16"):
        return
    import tensorrt as trt  # not TensorRT for RTX, which has no weak typing

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
    for layer in _layers(network):
        pinned = _onnx_names(layer) & typing.pinned
        if pinned:
            missing -= pinned
            _constrain_to_fp32(layer)
    if missing:
        raise RunnerFailedError(
            f"pinned layer {min(missing)!r} is not in the network ({len(missing)} such)",
            Verdict.BUILD_FAILED,
        )


def _onnx_names(layer: tensorrt.ILayer) -> set[str]:
    """The ONNX nodes that a network layer was made from, and each If around them."""
    names = {layer.name}
    for entry in _metadata(layer):
        # Inside an If: "exp | then (then_branch) | if (If)".
        node, *around = entry.split(" | ")
        names |= {entry, node}
        names |= {name.removesuffix(" (If)") for name in around if name.endswith(" (If)")}
    return names


def _constrain_to_fp32(layer: tensorrt.ILayer) -> None:
    import tensorrt as trt

    outputs = _outputs(layer)
    # Constants and shape tensors compute nothing in reduced precision.
    if layer.type in (trt.LayerType.CONSTANT, trt.LayerType.SHAPE) or any(
        t.is_shape_tensor for t in outputs
    ):
        return
    floats = [i for i, t in enumerate(outputs) if t.dtype.name in ("FLOAT", "HALF", "BF16")]
    if floats:
        layer.precision = trt.DataType.FLOAT
    for index in floats:
        layer.set_output_type(index, trt.DataType.FLOAT)


def _layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(index) for index in range(network.num_layers))


def _outputs(layer: Any) -> list[Any]:
    return [layer.get_output(index) for index in range(layer.num_outputs)]


def _metadata(layer: Any) -> Iterator[str]:
    """Yields the names of ONNX nodes in a network layer's metadata."""
    for part in (getattr(layer, "metadata", "") or "").split(_NODE_MARK)[1:]:
        entry = part.rpartition("]")[0]
        if entry:
            yield entry


def _network_flags(trt: Any, request: EngineRequest) -> int:
    flags = trt.NetworkDefinitionCreationFlag
    bits = 0
    if request.weak is None:
        if not hasattr(flags, "STRONGLY_TYPED"):
            raise RunnerFailedError(
                f"TensorRT {trt.__version__} has no strong typing; use --typing weak",
                Verdict.BUILD_FAILED,
            )
        bits |= 1 << int(flags.STRONGLY_TYPED)
    if hasattr(flags, "EXPLICIT_BATCH"):  # needed in 8.6, ignored in 10, gone in 11
        bits |= 1 << int(flags.EXPLICIT_BATCH)
    return bits


def _configure(trt: Any, config: Any, request: EngineRequest) -> None:
    # Without it the inspector gives neither types nor ONNX nodes.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request.tf32:  # TensorRT's default
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    if request.options.optimisation_level is not None:
        config.builder_optimization_level = request.options.optimisation_level
    if not request.options.tactics:
        config.set_tactic_sources(0)


def _profile(builder: Any, network: Any, request: EngineRequest, renamed: Mapping[str, str]) -> Any:
    """The optimisation profile; None for a network of fixed shapes."""
    profile, needed = builder.create_optimization_profile(), False
    for tensor in _inputs(network):
        name = renamed.get(tensor.name, tensor.name)
        if tensor.is_shape_tensor and name in request.values:
            needed = True
            profile.set_shape_input(tensor.name, *request.values[name])
        elif -1 in tuple(tensor.shape):
            needed = True
            profile.set_shape(tensor.name, *request.profile[name])
    return profile if needed else None


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(index) for index in range(network.num_inputs)]


def _renamed_inputs(network: Any, request: EngineRequest) -> dict[str, str]:
    """The model's names of the inputs that the parser renamed, by the network's names."""
    # It writes ``__x`` where x is an output too, and the body's name where x is a Loop's condition.
    # The order stays.
    parsed = [tensor.name for tensor in _inputs(network)]
    renamed = [name for name in parsed if name not in request.profile]
    original = [name for name in request.profile if name not in parsed]
    return dict(zip(renamed, original, strict=True)) if len(renamed) == len(original) else {}


def _read_timing_cache(config: Any, cache: Path | None) -> Any:
    if cache is None or not hasattr(config, "create_timing_cache"):
        return None
    timing = config.create_timing_cache(cache.read_bytes() if cache.exists() else b"")
    # False: a cache of another GPU or version is refused, and not written over.
    return timing if timing is not None and config.set_timing_cache(timing, False) else None
