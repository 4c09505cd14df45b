"""Shared helpers: running models on ONNX Runtime, and the public OCR models where they can be
had.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

import bisect_trt
from bisect_trt.report import terminal
from bisect_trt.runners.ort_session import opened
from fixtures.fixture import Fixture
from tests.copies import FEW
from tests.engines import judged, on_engine, reproducible

__all__ = ["judged", "on_engine", "reproducible"]

ort.set_default_logger_severity(4)

# No test may depend on how busy the machine is. CI repeats the same examples, so that a change is
# not blamed for what only that day's seed found; elsewhere every run looks for new ones.
settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("busy")

# Nor may what a command prints: here it writes no line of progress, however long it takes.
terminal.LOG_INTERVAL_S = 1e6

HANG_S = 600.0
"""What has not ended by then hangs, on the busiest machine."""


def slow_where(is_slow: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """``values`` for parametrize, the slow ones marked: `make test-all` runs those."""
    return [pytest.param(v, marks=pytest.mark.slow) if is_slow(v) else v for v in values]


def all_but(count: int, values: Iterable[Any]) -> list[Any]:
    """``values`` for parametrize, all but ``count`` of them, spread evenly, marked as slow."""
    found = list(values)
    quick = {i * len(found) // count for i in range(count)}
    marked = (pytest.param(v, marks=pytest.mark.slow) for v in found)
    return [
        v if i in quick else slow for i, (v, slow) in enumerate(zip(found, marked, strict=True))
    ]


def session_of(
    model: onnx.ModelProto,
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
) -> ort.InferenceSession:
    """A session of ``model`` on ONNX Runtime's CPU provider. One thread: the models are small, and
    the tests share the machine.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_model(
    model: onnx.ModelProto,
    feed: Mapping[str, Any],
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
) -> list[Any]:
    """The outputs of ``model`` on ONNX Runtime's CPU provider."""
    return list(session_of(model, level).run(None, dict(feed)))


def without_progress(text: str) -> str:
    """``text`` without the lines that a log gets every few seconds: on a busy machine any command
    may take so long.
    """
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"\[\d+ s, .* at most\] ", line))


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


Finished = Callable[..., bisect_trt.Result]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Runs of fixtures as they are with ``robust``, each made once; to be read only."""
    folder = tmp_path_factory.mktemp("finished")

    @cache
    def run(make: Callable[[], Fixture], robust: float = 0.0) -> bisect_trt.Result:
        fixture = make()
        return bisect_trt.bisect(
            fixture.model,
            fixture.inputs,
            precision=fixture.precision,
            require=fixture.require,
            robust=robust,
            repair="none",
            weights="nearest",
            out=folder / f"{make.__name__}-{robust}",
            limits=FEW,
        )

    return run


Sessions = Sequence[ReferenceType[ort.InferenceSession]]


@pytest.fixture
def sessions_opened(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    """The sessions that are opened in this test."""
    made: list[ReferenceType[ort.InferenceSession]] = []

    def seen(*given: Any, **named: Any) -> ort.InferenceSession:
        session = opened(*given, **named)
        made.append(ref(session))
        return session

    monkeypatch.setattr("bisect_trt.runners.ort_session.opened", seen)
    return made


def alive(sessions: Sessions) -> int:
    """How many of ``sessions`` are open."""
    return sum(session() is not None for session in sessions)


def forbid_inferences(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on an inference on the emulators or the reference fails the test."""

    def forbidden(*_: object) -> None:
        raise AssertionError("an inference was made")

    for inference in (
        "node_by_node.NodeByNode._execute",
        "emulator.SwitchedSession.run",
        "second_emulator.run_all",
        "reference.Reference.outputs",
    ):
        monkeypatch.setattr(f"bisect_trt.runners.{inference}", forbidden)
