"""One run of an engine is no observation: every sample is run several times, in two contexts and
in another order, and as often as it takes where the answers are not all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError, RunnerUnavailableError
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.statistics import copies_needed

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
class EngineRequest:
    """One engine to build: ``model`` is the ONNX file, its bytes or its path, which ``key`` tells
    from others by its content.

    ``profile`` gives every input's shapes, ``values`` those of the small integer inputs, which may
    turn out to be shapes. ``weak`` is None for strong typing. ``debug`` names tensors whose values
    are wanted without marking them as outputs; ``producers`` maps the layers' output tensors to the
    layers.
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


def cache_file(
    folder: Path | None, module: str, version: str, request: EngineRequest, kind: str
) -> Path | None:
    """A file for each configuration: timing caches depend on the flags. None for an engine that is
    built otherwise than usual.
    """
    if folder is None or request.options != AS_USUAL:
        return None
    typing = request.weak.base if request.weak else "strong"
    flags = f"{'tf32' if request.tf32 else 'strict'}-{typing}"
    return folder / f"{module}-{version}-{flags}.{kind}"


MODULES = ("tensorrt", "tensorrt_rtx")


def installed_module(choice: str | None = None) -> str | None:
    """The name of the module that would be used, None if none is installed. Nothing is imported.

    Raises:
        BadInputError: ``choice`` is no such module.
    """
    if choice is not None and choice not in MODULES:
        raise BadInputError(f"--trt-module {choice}: unknown; choose one of {', '.join(MODULES)}")
    wanted = (choice,) if choice else MODULES
    specs = {name: importlib.util.find_spec(name) for name in wanted}
    # A folder of type stubs shows as a namespace package: no file stands behind it.
    return next(
        (name for name, spec in specs.items() if spec is not None and spec.origin is not None), None
    )


def import_tensorrt(choice: str | None = None) -> Any:
    """The TensorRT module.

    Raises:
        RunnerUnavailableError: says what to install or what is broken.
    """
    name = installed_module(choice)
    if name is None:
        missing = choice or "tensorrt"
        package = "tensorrt-rtx-cu13" if choice == "tensorrt_rtx" else "tensorrt-cu13"
        raise RunnerUnavailableError(
            f"{missing} is not installed: pip install {package} cuda-python, or use --runner "
            "emulated"
        )
    try:
        module: ModuleType = importlib.import_module(name)
    except Exception as error:  # a missing library shows as ImportError, OSError or RuntimeError
        raise RunnerUnavailableError(
            f"{name} is installed and cannot be imported ({error}); reinstall it"
        ) from error
    if hasattr(
        module, "init_libnvinfer_plugins"
    ):  # without it no plugin is found, ROIAlign's for example
        module.init_libnvinfer_plugins(None, "")
    return module


Counted = tuple[tuple[Arrays, int], ...]
Run = Callable[[Arrays], Arrays]

REPEATS = 3
"""How often each sample is run at least: forwards, backwards in the other context, forwards."""

ENOUGH = copies_needed(0.95)
"""Runs of which all must meet the requirement to bound the share that does by 95 %: 59."""

_MOST_S = 30.0
_MOST_ANSWERS = 16


class Answers:
    """The answers that one sample was given, each once with how often it came."""

    def __init__(self) -> None:
        self._found: list[tuple[Arrays, int]] = []

    def add(self, outputs: Arrays) -> None:
        """One more run's outputs."""
        for place, (known, count) in enumerate(self._found):
            if same_bits(known, outputs):
                self._found[place] = (known, count + 1)
                return
        self._found.append((outputs, 1))

    @property
    def counted(self) -> Counted:
        """The most frequent first; the earliest of several that are."""
        return tuple(sorted(self._found, key=lambda answer: -answer[1]))

    @property
    def differ(self) -> bool:
        """Whether there are two."""
        return len(self._found) > 1


def same_bits(one: Arrays, other: Arrays) -> bool:
    """Whether two runs gave the same outputs to the last bit; NaNs of one pattern are the same."""
    return one.keys() == other.keys() and all(
        array.shape == other[name].shape
        and array.dtype == other[name].dtype
        and bool(np.array_equal(_bytes_of(array), _bytes_of(other[name])))
        for name, array in one.items()
    )


def run_repeatedly(
    samples: Sequence[Arrays], contexts: Sequence[Run], repeats: int
) -> list[Counted]:
    """Each sample ``repeats`` times, every other time in the next context and in reverse order.

    Where an answer differs from another to the same sample, all are run on until there are enough
    runs to bound the share of bad ones, for half a minute at most.
    """
    answers = [Answers() for _ in samples]
    deadline = time.perf_counter() + _MOST_S
    passes = 0
    while passes < repeats or (
        repeats > 1
        and any(a.differ for a in answers)
        and passes < max(2 * repeats, -(-ENOUGH // len(samples)))
        and max(len(a.counted) for a in answers) < _MOST_ANSWERS
        and time.perf_counter() < deadline
    ):
        order = range(len(samples)) if passes % 2 == 0 else reversed(range(len(samples)))
        run = contexts[passes % len(contexts)]
        for number in order:
            answers[number].add(run(samples[number]))
        passes += 1
    return [a.counted for a in answers]


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
