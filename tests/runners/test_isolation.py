"""A child that really crashes, hangs and is killed; each is a verdict and the next call works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.runners.process import IsolatedWorker


@pytest.fixture
def worker() -> Iterator[IsolatedWorker]:
    with IsolatedWorker("tests.runners.breaking:Breaking", {}) as one:
        yield one


def test_lives_across_calls(worker: IsolatedWorker) -> None:
    assert [worker.call("count", 1), worker.call("count", 2)] == [1, 3]
    first = worker.pid
    assert worker.call("noisy") == "fine"
    assert first is not None and worker.pid == first


@pytest.mark.parametrize(
    ("method", "verdict", "words", "log"),
    [
        ("segfault", Verdict.CRASHED, "SIGSEGV", "about to touch address 0"),
        ("killed", Verdict.CRASHED, "out of memory", ""),
        ("hang", Verdict.TIMED_OUT, "no answer in 0.7 s", "and Python too"),
        ("refuse", Verdict.BUILD_FAILED, "layer 'x'", "no implementation"),
        ("lose_device", Verdict.CRASHED, "cudaErrorIllegalAddress", ""),
        ("exhaust", Verdict.CRASHED, "MemoryError", ""),
        ("blunder", Verdict.CRASHED, "KeyError", ""),
    ],
)
def test_every_end_is_a_verdict(
    worker: IsolatedWorker, method: str, verdict: Verdict, words: str, log: str
) -> None:
    worker.call("count", 1)
    worker.call("noisy")
    first = worker.pid
    with pytest.raises(RunnerFailedError, match=words) as caught:
        worker.call(method, timeout_s=0.7 if method == "hang" else None)
    assert caught.value.verdict is verdict
    assert log in "\n".join(caught.value.log)
    assert caught.value.machine is (method == "exhaust")
    # Whoever lost its device would fail whatever it is asked next.
    survived = method in ("refuse", "blunder")
    assert worker.call("count", 1) == (2 if survived else 1)
    assert (worker.pid == first) is survived


def test_unavailable_is_said_so() -> None:
    with (
        IsolatedWorker("tests.runners.breaking:Breaking", {"available": False}) as worker,
        pytest.raises(RunnerUnavailableError, match="install it"),
    ):
        worker.call("pid")
