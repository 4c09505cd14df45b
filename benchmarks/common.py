"""Timing and the public models the benchmarks run on."""

from __future__ import annotations

import importlib
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from bisect_trt.version import __version__

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".cache" / "demo"
RESULTS = ROOT / "benchmarks" / "results"
SHARED = ROOT.parent / "shared" / "data"
DETECTOR = MODELS / "ch_PP-OCRv4_det_infer.onnx"
RECOGNISER = MODELS / "ch_PP-OCRv4_rec_infer.onnx"
CLASSIFIER = MODELS / "ch_ppocr_mobile_v2.0_cls_infer.onnx"


def detector_input() -> Path:
    """The shared 192x320 page where it is there, else the demo's."""
    shared = SHARED / "ocr_det.npz"
    return shared if shared.exists() else MODELS / "page.npz"


def load(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file."""
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def medians(*functions: Callable[[], object], rounds: int = 25) -> list[float]:
    """The median seconds of each function, in alternating blocks of five, so that a drifting
    machine hurts all alike.

    Not call by call: a session's worker threads spin for a while after a run, and would slow down
    whoever comes next.
    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds // 5):
        for function, taken in zip(functions, times, strict=True):
            function()
            for _ in range(5):
                began = time.perf_counter()
                function()
                taken.append(time.perf_counter() - began)
    return [statistics.median(t) for t in times]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Markdown."""

    def text(v: Any) -> str:
        return f"{v:.3g}" if isinstance(v, float) else str(v)

    return ["| " + " | ".join(map(text, row)) + " |" for row in (head, ["---"] * len(head), *rows)]


def machine() -> str:
    """One line for the head of a result."""
    return (
        f"{date.today().isoformat()}, bisect-trt {__version__}, onnxruntime {ort.__version__}, "
        f"onnx {onnx.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}, "
        f"{_gpu()}"
    )


def _gpu() -> str:
    """The GPU's name as its driver gives it."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "no GPU"
    return said.stdout.strip().partition("\n")[0]


def reports(names: tuple[str, ...]) -> list[str]:
    """The tables of the modules ``names``, which share what they ran."""
    return ["\n".join(importlib.import_module(f"benchmarks.{name}").report()) for name in names]
