"""Several workers, processes and Ray actors: the same answers, and a worker that is killed changes
nothing.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.errors import (
    BadInputError,
    MachineError,
    RunnerFailedError,
    RunnerUnavailableError,
)
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.report.summarise import Result
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.emulator_workers import (
    SERVER,
    EmulatorPool,
    server_arguments,
)
from bisect_trt.runners.process import IsolatedWorker, WorkerPool
from bisect_trt.steps.open_runners import open_emulator_pool
from fixtures.encoders import encoder_decomposed
from fixtures.models import residual
from tests.conftest import HANG_S


def fleet_of(workers: list[IsolatedWorker]) -> tuple[EmulatedRunner, EmulatorPool, Sample]:
    fixture = encoder_decomposed()
    sample = Sample("one", fixture.inputs)
    local = EmulatedRunner(fixture.model)
    arguments = server_arguments(fixture.model, Precision.FP16, 1)
    workers += [IsolatedWorker(SERVER, arguments) for _ in range(2)]
    return local, EmulatorPool(WorkerPool(workers, attempts=3, retry_timeouts=True)), sample


def test_workers_answer_as_the_emulator_does() -> None:
    local, emulator_pool, sample = fleet_of([])
    layers = [row.layer for row in local.trace(sample, PrecisionPlan(Precision.FP16))]
    try:
        for pins in ([], layers[:30], layers):
            plan = PrecisionPlan(Precision.FP16).with_pins(pins)
            here, there = (
                next(iter(local.outputs(plan, [sample]))),
                next(iter(emulator_pool.outputs(plan, [sample]))),
            )
            assert all(np.array_equal(here[n], there[n], equal_nan=True) for n in here)
        alone = [
            list(r.sensitivities(sample, Precision.FP16, layers)) for r in (local, emulator_pool)
        ]
        assert [name for name, _ in alone[0]] == [name for name, _ in alone[1]]
        for (_, one), (_, other) in zip(*alone, strict=True):
            assert one is not None and other is not None
            assert all(np.allclose(one[n], other[n], rtol=1e-6, equal_nan=True) for n in one)
    finally:
        emulator_pool.close()


def test_a_killed_worker_s_probe_is_asked_again() -> None:
    workers: list[IsolatedWorker] = []
    _, emulator_pool, sample = fleet_of(workers)
    plan = PrecisionPlan(Precision.FP16)
    try:
        before = [next(iter(emulator_pool.outputs(plan, [sample]))) for _ in range(2)]
        started = [worker.pid for worker in workers if worker.pid is not None]
        assert started
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        after = next(iter(emulator_pool.outputs(plan, [sample])))
        assert np.array_equal(before[0]["logits"], after["logits"], equal_nan=True)
    finally:
        emulator_pool.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run with two workers that nobody disturbs."""
    return run(tmp_path_factory.mktemp("whole"), workers=2)


class Doomed:
    """A remote that is lost at every call, and counts them."""

    def __init__(self, verdict: Verdict = Verdict.CRASHED, *, lost: bool = True) -> None:
        self.calls = 0
        self._error = RunnerFailedError("the process crashed (SIGSEGV)", verdict, lost=lost)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        self.calls += 1
        raise self._error

    def close(self) -> None: ...


@pytest.mark.parametrize("verdict", [Verdict.CRASHED, Verdict.TIMED_OUT])
def test_an_emulator_s_worker_that_is_always_lost_ends_the_run(verdict: Verdict) -> None:
    fixture = encoder_decomposed()
    doomed = Doomed(verdict)
    worker_pool = WorkerPool([doomed], attempts=3, retry_timeouts=True)
    emulator_pool = EmulatorPool(worker_pool)
    with pytest.raises(MachineError, match=r"--workers 1: .*SIGSEGV.*nothing is concluded"):
        list(emulator_pool.outputs(PrecisionPlan(Precision.FP16), [Sample("one", fixture.inputs)]))
    assert doomed.calls == 3


def test_an_engine_s_crash_counts_where_it_repeats_and_a_hang_or_an_answer_at_once() -> None:
    for verdict, lost, calls in (
        (Verdict.CRASHED, True, 2),
        (Verdict.TIMED_OUT, True, 1),
        (Verdict.BUILD_FAILED, False, 1),
        (Verdict.CRASHED, False, 1),
    ):
        doomed = Doomed(verdict, lost=lost)
        with pytest.raises(RunnerFailedError, match="SIGSEGV"):
            WorkerPool([doomed]).call("evaluate")
        assert doomed.calls == calls


@pytest.mark.parametrize("death", ["killed", "out of memory"])
def test_lost_workers_say_nothing_of_any_plan(
    death: str, whole: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"killed": "KilledServer", "out of memory": "GreedyServer"}[death]
    with monkeypatch.context() as spoilt:
        opened = partial(open_emulator_pool, server=f"tests.runners.breaking:{target}")
        spoilt.setattr("bisect_trt.steps.context.open_emulator_pool", opened)
        with pytest.raises(MachineError, match="nothing is concluded") as caught:
            run(tmp_path / "lost", workers=2)
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    with closing(sqlite3.connect(tmp_path / "lost" / "cache.sqlite")) as cache:
        assert not cache.execute("SELECT * FROM answers WHERE kind = 'evaluation'").fetchall()
    again = run(tmp_path / "lost", workers=2)
    assert again.pinned == whole.pinned and again.passed
    assert not (set(again.search["outcome"]) & {"crashed", "timed-out"})


def test_a_worker_that_does_nothing_is_timed_out() -> None:
    with IsolatedWorker("tests.runners.breaking:Breaking", {}) as worker:
        worker.call("count", 1)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(RunnerFailedError, match="no answer in 1 s") as caught:
            worker.call("count", 1, timeout_s=1.0)
        assert caught.value.lost and caught.value.verdict is Verdict.TIMED_OUT
        assert worker.call("count", 1) == 1


def processes(word: str) -> list[int]:
    """The processes whose command line holds ``word``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and word in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def children_of(parent: int) -> list[int]:
    """The worker processes of ``parent``."""
    found = processes("bisect_trt.runners.process")
    return [pid for pid in found if parent_of(pid) == parent]


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def run(out: Path, **options: Any) -> Result:
    fixture = residual()
    return bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        precision="fp16",
        require=fixture.require,
        runner="emulated",
        out=out,
        robust=0,
        **options,
    )


def test_a_run_with_killed_workers_ends_with_the_same_set(whole: Result, tmp_path: Path) -> None:
    stop = threading.Event()

    killed = list[int]()

    def killer() -> None:
        """Kill a worker process of this run now and then."""
        while not stop.wait(0.7):
            children = children_of(os.getpid())
            if children and len(killed) < 2:
                killed.append(children[0])
                os.kill(children[0], signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        wounded = run(tmp_path / "wounded", workers=2)
    finally:
        stop.set()
        thread.join()
    assert killed
    assert wounded.pinned == whole.pinned and wounded.passed and whole.passed
    again = run(tmp_path / "wounded", workers=1)
    assert again.passed


@pytest.mark.slow
def test_ray_gives_the_same_set_when_an_actor_is_killed(
    whole: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(
            [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    )
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        done, killed = threading.Event(), list[int]()

        def killer() -> None:
            """Kill one of the two actors as soon as both serve."""
            while not done.wait(0.1):
                actors = processes("ray::RayServed")
                if len(actors) >= 2:
                    killed.append(actors[0])
                    os.kill(actors[0], signal.SIGKILL)
                    return

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            wounded = run(tmp_path / "wounded", workers=2, ray="local")
        finally:
            done.set()
            thread.join()
        assert killed and wounded.pinned == whole.pinned
        if not ray.cluster_resources().get("GPU"):
            with pytest.raises(RunnerUnavailableError, match="no GPU for the workers"):
                run(tmp_path / "gpu", ray="local", emulate_on="cuda")
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("127.0.0.1:1", RunnerUnavailableError),
        ("nonsense", BadInputError),
        ("host:port", BadInputError),
    ],
)
def test_a_cluster_that_is_not_there_is_told_at_once(
    address: str, error: type[Exception], tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    with pytest.raises(error, match=f"^ray='{address}': "):
        run(tmp_path / "run", workers=2, ray=address)


def started(folder: Path, **how: Any) -> subprocess.Popen[str]:
    """A run with two workers, in a process of its own."""
    fixture = residual()
    model, inputs = folder / "m.onnx", folder / "x.npz"
    onnx.save(fixture.model, model)
    np.savez(inputs, **fixture.inputs)
    given = [str(model), "--input", str(inputs), "--requirement", fixture.require]
    command = [sys.executable, "-m", "bisect_trt", "run", *given, "--workers", "2"]
    out = ["--out", str(folder / "run")]
    streams: dict[str, Any] = {"stderr": subprocess.PIPE, **how}
    return subprocess.Popen([*command, *out], text=True, **streams)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_workers_are_stopped_can_be_interrupted(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = started(tmp_path)
    while len(children := children_of(process.pid)) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    for child in children:
        os.kill(child, signal.SIGSTOP)
    time.sleep(1.0)
    process.send_signal(number)
    _, words = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and "run the same command again" in words
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()], "nobody is left behind"


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path: Path) -> None:
    process = started(tmp_path)
    while not (tmp_path / "run" / "cache.sqlite").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, words = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and "run the same command again" in words


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
@pytest.mark.parametrize(("answer", "code"), [(signal.SIG_DFL, 130), (signal.SIG_IGN, 0)])
def test_a_terminal_that_is_closed_ends_a_run_as_ctrl_c_does_if_at_all(
    answer: signal.Handlers, code: int, tmp_path: Path
) -> None:
    """What is written to a terminal that has gone is an error: in the background, where the signal
    is not heard, it ended the run.
    """
    master, slave = os.openpty()
    streams = {"stdin": slave, "stdout": slave, "stderr": slave}

    def heard() -> None:  # who starts the tests may have it ignored, as nohup does
        signal.signal(signal.SIGHUP, answer)

    process = started(tmp_path, **streams, start_new_session=True, preexec_fn=heard)
    os.close(slave)
    while not (tmp_path / "run" / "cache.sqlite").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)  # as the system does for the terminal's own processes
    os.close(master)
    assert process.wait(timeout=HANG_S) == code


def test_a_closed_crew_starts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that lost its process while the run ended would start one that nobody ends."""
    called: list[str] = []

    class Lost:
        def call(self, method: str, *_: object, timeout_s: float | None = None) -> None:
            called.append(method)
            worker_pool.close()
            raise RunnerFailedError("gone", Verdict.CRASHED, lost=True)

        def close(self) -> None:
            pass

    worker_pool = WorkerPool([Lost()])
    with pytest.raises(RunnerFailedError, match="closed"):
        worker_pool.call("evaluate")
    assert called == ["evaluate"]


def test_calls_one_after_the_other_are_of_one_member() -> None:
    """A member starts at its first call: what is timed next should not be another one's start."""
    worker_pool = WorkerPool([Member(name) for name in "abc"])
    assert [worker_pool.call("name") for _ in range(4)] == ["a"] * 4


class Member:
    def __init__(self, name: str) -> None:
        self._name = name

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> str:
        del method, arguments, timeout_s
        return self._name

    def close(self) -> None:
        """Nothing to end."""
