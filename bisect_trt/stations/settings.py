"""What a run is asked to do, and the checks that need no model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.precision import Precision
from bisect_trt.graph.load import LoadedModel
from bisect_trt.numerics.requirements import TaskMetric
from bisect_trt.stations.samples import read_npz

RUNNERS = ("auto", "emulated", "tensorrt", "onnxruntime-cuda")
TYPINGS = ("strong", "weak")
REWRITES = ("layernorm",)
CERTIFIERS = ("emulated", "engine")
PROBE_TIMEOUT_S = 900.0
Inputs = Sequence[str | Path | Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on. ``out`` None means ``reports/<model>-<precision>`` in the
    current folder.

    ``rewrite`` names a rewrite of the model to be made first. ``workers`` run probes at a time,
    each in a process of its own where there are several, on the Ray cluster at ``ray`` if that is
    given. ``trt_module``, ``typing``, ``profiles``, ``probe_timeout_s``, ``max_builds`` and
    ``certify`` concern engines only. Raises :class:`BadInputError` for a word that is none of its
    option's.
    """

    model: str | Path | onnx.ModelProto
    inputs: Inputs
    precision: Precision = Precision.FP16
    runner: str = "auto"
    require: Sequence[str] = ()
    golden: str | Path | Mapping[str, NDArray[Any]] | None = None
    metrics: Sequence[str] = ()
    out: Path | None = None
    workers: int = 1
    ray: str | None = None
    trt_module: str | None = None
    typing: str = "strong"
    profiles: Sequence[str] = ()
    probe_timeout_s: float = PROBE_TIMEOUT_S
    max_builds: int | None = None
    certify: str = "emulated"
    rewrite: str | None = None

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--runner", self.runner, RUNNERS),
            ("--typing", self.typing, TYPINGS),
            ("--certify", self.certify, CERTIFIERS),
            ("--rewrite", self.rewrite, (None, *REWRITES)),
        ):
            if value not in known:
                raise BadInputError(
                    f"{option} {value}: unknown; choose one of {', '.join(k for k in known if k)}"
                )
        if self.precision is Precision.FP32:
            raise BadInputError(
                "--precision fp32: that is the reference; choose fp16, bf16 or tf32"
            )


def source_of(metric: TaskMetric) -> str:
    """What the journal knows a task metric by: its source, or its name where Python cannot show
    one.
    """
    try:
        return inspect.getsource(metric)
    except (OSError, TypeError):
        return repr(metric)


def load_golden(
    golden: str | Path | Mapping[str, NDArray[Any]] | None, outputs: Sequence[str]
) -> dict[str, Any] | None:
    """The golden outputs by name, checked against the model's. Raises :class:`BadInputError`."""
    if golden is None:
        return None
    where = "--golden" if isinstance(golden, Mapping) else f"--golden {golden}"
    if not isinstance(golden, Mapping) and not Path(golden).exists():
        raise BadInputError(f"{where}: no such file")
    arrays = dict(golden) if isinstance(golden, Mapping) else read_npz(Path(golden))
    unknown = [n for n in arrays if n not in outputs]
    if unknown or not arrays:
        named = repr(unknown[0]) if unknown else "nothing"
        raise BadInputError(
            f"{where}: holds {named}, which is no output of the model; it has {', '.join(outputs)}"
        )
    return {name: np.asarray(a) for name, a in arrays.items()}


def default_folder(model: LoadedModel, precision: Precision, suffix: str) -> Path:
    """``reports/<model>-<precision><suffix>`` in the current folder."""
    stem = model.path.stem if model.path is not None else model.name.replace("/", "_")
    return Path("reports") / f"{stem}-{precision.value}{suffix}"
