"""From an ONNX model to a serialised engine. Building needs no GPU with TensorRT for RTX; the tests
rely on that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bisect_trt.core.disk.files import write_whole
from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.verdict import Verdict
from bisect_trt.runners.tensorrt.records import Built, EngineRequest
from bisect_trt.runners.tensorrt.refusals import last_lines, refusal
from bisect_trt.runners.tensorrt.weak import apply_weak_types

_BESIDE = " | "
"""In a layer's metadata between its node and the If that is around it, or was before it."""

_KEPT = ("INTERNAL_ERROR", "ERROR", "WARNING")


def make_logger(trt: Any) -> Any:
    """A logger that keeps warnings and errors as (severity, text) in ``messages``."""

    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[tuple[str, str]] = []

        def log(self, severity: Any, message: str) -> None:
            if severity.name in _KEPT and (severity.name, message) not in self.messages:
                self.messages.append((severity.name, message))

    return Collector()


def build_engine(trt: Any, request: EngineRequest, cache: Path | None = None) -> Built:
    """Parse, check and build.

    Args:
        trt: the TensorRT module.
        request: what to build.
        cache: a timing cache, read if it is there and written after the build.

    Raises:
        RunnerFailedError: BUILD_FAILED, with the parser's or builder's last words.
    """
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    began = time.perf_counter()
    network = parse(trt, builder, logger, request)
    parse_seconds = time.perf_counter() - began
    config = builder.create_builder_config()
    _configure(trt, builder, network, config, request)
    if request.weak is not None:
        apply_weak_types(network, config, request.weak)
    if hasattr(network, "mark_debug"):  # from 9 on
        for tensor in _tensors(network, frozenset(request.debug)):
            network.mark_debug(tensor)
    types = node_types(trt, network, request.producers)
    timing = _read_timing_cache(config, cache)
    began = time.perf_counter()
    serialised = builder.build_serialized_network(network, config)
    build_seconds = time.perf_counter() - began
    if serialised is None:
        reason = last_lines(logger)[-1] if logger.messages else "no reason given"
        raise refusal(f"TensorRT cannot build the engine: {reason}", Verdict.BUILD_FAILED, logger)
    if timing is not None and cache is not None:
        write_whole(cache, bytes(config.get_timing_cache().serialize()))
    seconds = {"parse": parse_seconds, "build": build_seconds}
    inputs = _other_names(network, request)
    return Built(bytes(serialised), seconds, types, list(logger.messages), inputs)


def parse(trt: Any, builder: Any, logger: Any, request: EngineRequest) -> Any:
    """The request's model as a network.

    Args:
        trt: the module, of whatever version.
        builder: of that module.
        logger: hears what the parser says.
        request: the model, as bytes or a path, and its options.

    Raises:
        RunnerFailedError: BUILD_FAILED, naming the node.
    """
    network = builder.create_network(_network_flags(trt, request))
    parser = trt.OnnxParser(network, logger)
    parsed = (
        parser.parse(request.model)
        if isinstance(request.model, bytes)
        else parser.parse_from_file(request.model)
    )
    if not parsed:
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        first = errors[0] if errors else None
        named = _node_name(first) if first is not None else ""
        where = f" at node {first.node()} ({named or 'unnamed'})" if first is not None else ""
        what = first.desc() if first is not None else "no reason given"
        raise RunnerFailedError(
            f"TensorRT cannot parse the model{where}: {what}",
            Verdict.BUILD_FAILED,
            last_lines(logger),
            node=named,
        )
    return network


def node_types(trt: Any, network: Any, producers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The types of what each ONNX node gives, by the node's name, as the parsed network has them.

    A node can become several layers; the last one with its name in the metadata gives the node's
    result. Loops leave no metadata: there ``producers`` tells the node by the name of its output
    tensor.

    Args:
        trt: the TensorRT module.
        network: a parsed INetworkDefinition.
        producers: node names by the tensors they give.
    """
    mark, found = "[ONNX Layer: ", dict[str, tuple[str, ...]]()
    named = frozenset(producers.values())
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for tensor in filter(None, (layer.get_output(i) for i in range(layer.num_outputs))):
            if tensor.name in producers:
                found.setdefault(producers[tensor.name], (tensor.dtype.name,))
        for part in (getattr(layer, "metadata", "") or "").split(mark)[1:]:
            said = part.rpartition("]")[0]
            if said and layer.type is not trt.LayerType.CONSTANT:
                types = tuple(
                    layer.get_output(i).dtype.name
                    for i in range(layer.num_outputs)
                    if layer.get_output(i) is not None
                )
                # Of what an If chooses from, and of all behind it: "third | if (If)"; a node may
                # have such a name of its own.
                one = said if said in named else said.partition(_BESIDE)[0]
                found |= dict.fromkeys((said, one), types)
    return found


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


def _configure(trt: Any, builder: Any, network: Any, config: Any, request: EngineRequest) -> None:
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request.tf32:
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    options = request.options
    if options.optimisation_level is not None:
        config.builder_optimization_level = options.optimisation_level
    if not options.tactics:
        config.set_tactic_sources(0)
    profile = _profile(builder, network, request)
    if profile is not None:
        config.add_optimization_profile(profile)


def _profile(builder: Any, network: Any, request: EngineRequest) -> Any:
    """The optimisation profile, None for a network of fixed shapes."""
    profile, needed = builder.create_optimization_profile(), False
    names = _other_names(network, request)
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        name = names.get(tensor.name, tensor.name)
        if tensor.is_shape_tensor and name in request.values:
            needed = True
            profile.set_shape_input(tensor.name, *request.values[name])
        elif -1 in tuple(tensor.shape):
            needed = True
            profile.set_shape(tensor.name, *request.profile[name])
    return profile if needed else None


def _other_names(network: Any, request: EngineRequest) -> dict[str, str]:
    """The model's names of inputs that the parser calls otherwise: ``__x`` where x is an output
    too, and as a Loop's body does where x is its condition. They stay in the model's order.
    """
    called = [network.get_input(i).name for i in range(network.num_inputs)]
    its = [name for name in called if name not in request.profile]
    ours = [name for name in request.profile if name not in called]
    return dict(zip(its, ours, strict=True)) if len(its) == len(ours) else {}


def _tensors(network: Any, wanted: frozenset[str]) -> list[Any]:
    found = []
    for index in range(network.num_layers if wanted else 0):
        layer = network.get_layer(index)
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        found += [t for t in outputs if t is not None and t.name in wanted]
    return found


def _node_name(error: Any) -> str:
    name: str = error.node_name() if hasattr(error, "node_name") else ""
    return name


def _read_timing_cache(config: Any, cache: Path | None) -> Any:
    if cache is None or not hasattr(config, "create_timing_cache"):
        return None
    timing = config.create_timing_cache(cache.read_bytes() if cache.exists() else b"")
    return timing if timing is not None and config.set_timing_cache(timing, False) else None
