"""Several workers, processes and Ray actors: the same answers, and a worker that is killed changes
nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.core.errors import BadInputError, RunnerFailedError, RunnerUnavailableError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.core.verdict import Verdict
from bisect_trt.report.result import Result
from bisect_trt.runners.emulator.fleet import EmulatedFleet
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.runners.emulator.server import SERVER, server_arguments
from bisect_trt.runners.workers.crew import Crew
from bisect_trt.runners.workers.process import IsolatedWorker
from fixtures.models import encoder_decomposed, residual


def fleet_of(workers: list[IsolatedWorker]) -> tuple[EmulatedRunner, EmulatedFleet, Sample]:
    fixture = encoder_decomposed()
    sample = Sample("one", fixture.inputs)
    local = EmulatedRunner(fixture.model)
    arguments = server_arguments(fixture.model, Precision.FP16, 1)
    workers += [IsolatedWorker(SERVER, arguments) for _ in range(2)]
    return local, EmulatedFleet(local, Crew(workers, attempts=3)), sample


def test_workers_answer_as_the_emulator_does() -> None:
    local, fleet, sample = fleet_of([])
    layers = [row.layer for row in local.trace(sample, PrecisionPlan(Precision.FP16))]
    try:
        for pins in ([], layers[:30], layers):
            plan = PrecisionPlan(Precision.FP16).with_pins(pins)
            here, there = (
                next(iter(local.outputs(plan, [sample]))),
                next(iter(fleet.outputs(plan, [sample]))),
            )
            assert all(np.array_equal(here[n], there[n], equal_nan=True) for n in here)
        alone = [list(r.effects(sample, Precision.FP16, layers)) for r in (local, fleet)]
        assert [name for name, _ in alone[0]] == [name for name, _ in alone[1]]
        for (_, one), (_, other) in zip(*alone, strict=True):
            assert one is not None and other is not None
            assert all(np.allclose(one[n], other[n], rtol=1e-6, equal_nan=True) for n in one)
    finally:
        fleet.close()


def test_a_killed_worker_s_probe_is_asked_again() -> None:
    workers: list[IsolatedWorker] = []
    _, fleet, sample = fleet_of(workers)
    plan = PrecisionPlan(Precision.FP16)
    try:
        before = [next(iter(fleet.outputs(plan, [sample]))) for _ in range(2)]
        for worker in workers:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        after = next(iter(fleet.outputs(plan, [sample])))
        assert np.array_equal(before[0]["logits"], after["logits"], equal_nan=True)
    finally:
        fleet.close()


def test_a_plan_that_kills_every_worker_is_a_verdict() -> None:
    calls: list[str] = []

    class Doomed:
        def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
            calls.append(method)
            raise RunnerFailedError("the process crashed (SIGSEGV)", Verdict.CRASHED)

        def close(self) -> None: ...

    crew = Crew([Doomed(), Doomed()], attempts=3)
    with pytest.raises(RunnerFailedError, match="SIGSEGV"):
        crew.call("outputs", "plan")
    assert calls == ["outputs"] * 3
    engines = Crew([Doomed(), Doomed()])
    with pytest.raises(RunnerFailedError, match="SIGSEGV"):
        engines.call("probe")
    assert calls[3:] == ["probe"]


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


def test_a_run_with_killed_workers_ends_with_the_same_set(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", workers=2)
    stop = threading.Event()

    killed = list[int]()

    def killer() -> None:
        """Kill a worker process of this run now and then."""
        while not stop.wait(0.7):
            children = [
                pid
                for pid in processes("bisect_trt.runners.workers.child")
                if parent_of(pid) == os.getpid()
            ]
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


def test_ray_gives_the_same_set_also_when_an_actor_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(
            [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    )
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    here = run(tmp_path / "here", workers=2)
    try:
        there = run(tmp_path / "there", workers=2, ray="local")
        assert there.pinned == here.pinned
        done, killed = threading.Event(), list[int]()

        def killer() -> None:
            """Kill one of the two actors as soon as both serve."""
            while not done.wait(0.5):
                actors = processes("ray::_Served")
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
        assert killed and wounded.pinned == here.pinned
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
    with pytest.raises(error, match="--ray"):
        run(tmp_path / "run", workers=2, ray=address)


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path: Path) -> None:
    fixture = residual()
    model, inputs = tmp_path / "m.onnx", tmp_path / "x.npz"
    onnx.save(fixture.model, model)
    np.savez(inputs, **fixture.inputs)
    command = [
        sys.executable,
        "-m",
        "bisect_trt",
        "run",
        str(model),
        "--input",
        str(inputs),
        "--requirement",
        fixture.require,
    ]
    process = subprocess.Popen(
        [*command, "--workers", "2", "--out", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "run" / "journal.sqlite").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130 and "run the same command again" in words
