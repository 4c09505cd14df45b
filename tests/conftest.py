"""Shared helpers: running models on ONNX Runtime, and the public OCR models where they can be
had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from tests.engines import judged

__all__ = ["judged"]

ort.set_default_logger_severity(4)


def run_model(
    model: onnx.ModelProto,
    feed: Mapping[str, Any],
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
) -> list[Any]:
    """The outputs of ``model`` on ONNX Runtime's CPU provider."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, dict(feed)))


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, NaN included; sequences element by element."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    x, y = np.asarray(a), np.asarray(b)
    return (
        x.shape == y.shape
        and x.dtype == y.dtype
        and (x.tobytes() == y.tobytes() or bool(np.array_equal(x, y)))
    )


@pytest.fixture
def waves() -> NDArray[np.float32]:
    """A smooth (2, 8) input."""
    return np.sin(np.linspace(0.0, 6.0, 16)).reshape(2, 8).astype(np.float32)


def forbid_inferences(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on an inference on the emulators or the reference fails the test."""

    def forbidden(*_: object) -> None:
        raise AssertionError("an inference was made")

    for inference in (
        "emulator.node_by_node.NodeByNode._execute",
        "emulator.segment_session.SegmentSession.run",
        "emulator.whole_model.run_all",
        "ort_reference.run_all",
    ):
        monkeypatch.setattr(f"bisect_trt.runners.{inference}", forbidden)
