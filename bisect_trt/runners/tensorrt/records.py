"""What travels between the runner and its child process: plain data, no TensorRT types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]
"""(min, opt, max) by input: shapes, or the values themselves of an input that is a shape."""


@dataclass(frozen=True)
class WeakTyping:
    """Types by builder flags and layer attributes (TensorRT 8.6 to 10.x): ``base`` is fp16 or bf16,
    ``pinned`` run in FP32. Of ``moved``, which only hand values on, TensorRT may make no layer.
    """

    base: str
    pinned: frozenset[str]
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built and run, where it is not TensorRT's own choice.

    ``optimisation_level`` is the builder's (0 to 5), None for its default. Without ``tactics`` no
    library's kernels are tried (cuBLAS, cuDNN). TensorRT for RTX may record ``cuda_graphs``.
    """

    optimisation_level: int | None = None
    tactics: bool = True
    cuda_graphs: bool = True


AS_USUAL = EngineOptions()


@dataclass(frozen=True)
class Built:
    """A serialised engine and what building it showed. ``types`` maps an ONNX node to its output
    types after parsing, ``inputs`` the engine's name of an input to the model's where the parser
    gave it another.
    """

    engine: bytes
    seconds: Mapping[str, float]
    types: Mapping[str, Sequence[str]]
    messages: Sequence[tuple[str, str]]
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prebuilt:
    """An engine that another process built: the file it lies in, what building it showed, and the
    file of its kernels where that process could compile them ("" where it could not).
    """

    path: str
    built: Built
    kernels: str = ""

    def remove(self) -> None:
        """Remove the files."""
        for path in filter(None, (self.path, self.kernels)):
            Path(path).unlink(missing_ok=True)


@dataclass(frozen=True)
class EngineRequest:
    """One engine to build: ``model`` is the ONNX file, its bytes or its path, which ``key`` tells
    from others by its content.

    ``profile`` gives every input's shapes, ``values`` those of the small integer inputs, which may
    turn out to be shapes. ``weak`` is None for strong typing. ``debug`` names tensors whose values
    are wanted without marking them as outputs; ``producers`` maps the layers' output tensors to the
    layers. ``prebuilt`` is the engine, where it was built ahead; nobody needs the model then.
    """

    model: bytes | str
    profile: Profile
    tf32: bool
    weak: WeakTyping | None = None
    debug: Sequence[str] = ()
    measure_latency: bool = True
    producers: Mapping[str, str] = field(default_factory=dict)
    values: Profile = field(default_factory=dict)
    options: EngineOptions = AS_USUAL
    key: str = ""
    prebuilt: Prebuilt | None = None


@dataclass(frozen=True)
class EngineLayer:
    """One layer of a built engine: the ONNX nodes fused into it and the types of its inputs and
    outputs.
    """

    name: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class EngineAnswer:
    """What one engine did. ``answers`` are each sample's, with how often they came, the most
    frequent first; ``seconds`` is split by step, ``latency_ms`` is the median of one sample's
    inference.
    """

    answers: Sequence[Sequence[tuple[Mapping[str, NDArray[Any]], int]]]
    seconds: Mapping[str, float]
    engine_bytes: int
    latency_ms: float
    types: Mapping[str, Sequence[str]]
    layers: Sequence[EngineLayer]
    messages: Sequence[tuple[str, str]]
    debug: Sequence[Mapping[str, NDArray[Any]]] = field(default_factory=list)
