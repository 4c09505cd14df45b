"""The messages between a TensorRT runner and its worker, and which TensorRT module is used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_trt.base.errors import BadInputError, RunnerUnavailableError
from bisect_trt.metrics.arrays import Arrays

RTX = "tensorrt_rtx"
MODULES = ("tensorrt", RTX)

Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]
"""(min, opt, max) by input: shapes, or the values of an input that is a shape."""


@dataclass(frozen=True)
class WeakTyping:
    """Types by builder flags and layer constraints (TensorRT 8.6 to 10.x).

    ``base`` is fp16 or bf16, ``pinned`` are the layers in FP32. ``moved`` only move values:
    TensorRT may have no layer for them.
    """

    base: str
    pinned: frozenset[str]
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built and run; the defaults are TensorRT's own.

    ``optimisation_level`` is the builder's, 0 to 5. ``tactics`` allows kernels of libraries such as
    cuBLAS and cuDNN. ``cuda_graphs`` lets TensorRT for RTX record graphs. ``eager_kernels`` makes
    it compile kernels for a shape before the first run, not beside the runs.
    """

    optimisation_level: int | None = None
    tactics: bool = True
    cuda_graphs: bool = True
    eager_kernels: bool = False


AS_USUAL = EngineOptions()


@dataclass(frozen=True)
class EngineRequest:
    """One engine to build.

    ``model`` is the ONNX file: its bytes or path. ``profile`` holds input shapes, ``values`` those
    of small integer inputs, which may be shapes. ``weak`` is None for strong typing, ``producers``
    maps output tensors to layers. ``key`` identifies the engine in its worker.
    """

    model: bytes | str
    profile: Profile
    tf32: bool
    weak: WeakTyping | None = None
    measure_latency: bool = True
    producers: Mapping[str, str] = field(default_factory=dict)
    values: Profile = field(default_factory=dict)
    options: EngineOptions = AS_USUAL
    key: Hashable = None


@dataclass(frozen=True)
class Built:
    """A serialised engine, and what building it showed.

    ``types`` are the output types of each ONNX node after parsing. ``inputs`` maps the names of
    inputs that the parser renamed to the model's.
    """

    engine: bytes
    seconds: Mapping[str, float]
    types: Mapping[str, Sequence[str]]
    messages: Sequence[tuple[str, str]]
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineLayer:
    """One layer of a built engine: the ONNX nodes fused into it and the types of its tensors.

    ``tensors`` are the names of its inputs and outputs with their types.
    """

    name: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class EngineAnswer:
    """What one engine did.

    ``answers`` holds each sample's answers with their counts, the most frequent first. ``seconds``
    is the time by step, ``latency_ms`` the median of one inference.
    """

    answers: Sequence[Sequence[tuple[Arrays, int]]]
    seconds: Mapping[str, float]
    engine_bytes: int
    latency_ms: float
    types: Mapping[str, Sequence[str]]
    layers: Sequence[EngineLayer]
    messages: Sequence[tuple[str, str]]


def installed_module(choice: str | None = None) -> str | None:
    """Returns the TensorRT module to use, without importing it; None if none is installed.

    Raises:
        BadInputError: ``choice`` is no such module.
    """
    if choice is not None and choice not in MODULES:
        raise BadInputError(f"--trt-module {choice}: unknown; choose one of {', '.join(MODULES)}")
    for name in (choice,) if choice else MODULES:
        spec = importlib.util.find_spec(name)
        # A folder of type stubs is found as a namespace package, which has no file.
        if spec is not None and spec.origin is not None:
            return name
    return None


def import_tensorrt(choice: str | None = None) -> Any:
    """Imports TensorRT.

    Raises:
        RunnerUnavailableError: it is not installed, or broken.
    """
    name = installed_module(choice)
    if name is None:
        missing = choice or "tensorrt"
        package = "tensorrt-rtx-cu13" if choice == RTX else "tensorrt-cu13"
        raise RunnerUnavailableError(
            f"{missing} is not installed: pip install {package} cuda-python, or use --runner "
            "emulated"
        )
    try:
        module: Any = importlib.import_module(name)
    except Exception as error:  # a missing library shows as ImportError, OSError or RuntimeError
        raise RunnerUnavailableError(
            f"{name} is installed and cannot be imported ({error}); reinstall it"
        ) from error
    # Without this call TensorRT finds no plugins, such as ROIAlign's.
    if hasattr(module, "init_libnvinfer_plugins"):
        module.init_libnvinfer_plugins(None, "")
    return module


def cache_file(folder: Path | None, trt: Any, request: EngineRequest, kind: str) -> Path | None:
    """The cache file of a configuration, since timings depend on flags; None for other options."""
    if folder is None or request.options != AS_USUAL:
        return None
    typing = request.weak.base if request.weak else "strong"
    flags = f"{'tf32' if request.tf32 else 'strict'}-{typing}"
    return folder / f"{trt.__name__}-{trt.__version__}-{flags}.{kind}"
