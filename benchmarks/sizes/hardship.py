"""Runs under hardship: killed at random moments, its workers killed, on a disk of 200 kB, two at
once; each must end with the undisturbed answer, or with one line that says what to do.

``python -m benchmarks.sizes.hardship [--kills 50] [--worker-kills 30]`` prints the table that is
kept as benchmarks/results/hardship.md. The small disk needs the right to mount one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from bisect_trt.base.atomic_files import RESULT_FILES
from bisect_trt.graph import to_emulated
from bisect_trt.steps.saved_plan import read_plan
from fixtures.__main__ import input_bytes, model_bytes
from fixtures.fixture import Fixture
from fixtures.models import residual

COMMAND = [sys.executable, "-m", "bisect_trt", "run"]


def arguments(folder: Path, out: str, *more: str) -> list[str]:
    """The command for the fixture in ``folder``."""
    given = [str(folder / "m.onnx"), "--input", str(folder / "x.npz")]
    require = ["--requirement", residual().require, "--robust", "0"]
    return [*COMMAND, *given, *require, "--out", str(folder / out), *more]


def answer(out: Path) -> tuple[Any, ...]:
    """What a run ended with: the cause, the pins, the score."""
    run = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return run["cause"], tuple(run["pinned"]), run["score"]


def error_without(fixture: Fixture, out: Path) -> list[bool]:
    """For each pin of the plan in ``out``, whether the set without it misses the requirement, by
    a session of its own.
    """
    plan = read_plan(out / "plan.json").plan
    limit = float(fixture.require.partition("<=")[2])
    feed = dict(fixture.inputs)

    def outputs(model: Any) -> Any:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        data = model.SerializeToString()
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        return session.run(None, feed)[0].astype(np.float64)

    exact = outputs(fixture.model)
    spread = float(np.ptp(exact))
    found = []
    for pin in sorted(plan.pinned):
        got = outputs(to_emulated(fixture.model, plan.with_pins(plan.pinned - {pin})))
        found.append(float(np.abs(got - exact).max()) / spread > limit)
    return found


def undisturbed(folder: Path, *more: str) -> tuple[tuple[Any, ...], float]:
    """The answer of a run that nobody disturbs, and its seconds."""
    began = time.monotonic()
    out = f"whole{len(more)}"
    subprocess.run(arguments(folder, out, *more, "--quiet"), check=True)
    return answer(folder / out), time.monotonic() - began


def kill_runs(folder: Path, count: int) -> list[str]:
    """Kill the process itself at ``count`` random moments, then let it end."""
    whole, seconds = undisturbed(folder)
    draw = random.Random(0)
    same = mixed = proved = pins = 0
    for number in range(count):
        out = f"killed{number}"
        process = subprocess.Popen(
            arguments(folder, out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        time.sleep(draw.uniform(0.3, 1.0) * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = {p.name for p in (folder / out).iterdir()} if (folder / out).exists() else set()
        results = left & set(RESULT_FILES)
        mixed += bool(results) and "run.json" not in results
        subprocess.run(arguments(folder, out, "--quiet"), check=True)
        same += answer(folder / out) == whole
        fails = error_without(residual(), folder / out)
        proved, pins = proved + sum(fails), pins + len(fails)
    return [
        f"| kill -9 of the process, {count} random moments | {same} of {count} ended with the "
        f"undisturbed answer; {mixed} left some files of a result without run.json; {proved} of "
        f"{pins} pins fail again when removed |"
    ]


def children_of(parent: int) -> list[int]:
    """The worker processes of ``parent``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and "workers.child" in (entry / "cmdline").read_text():
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                found += [int(entry.name)] if int(stat[1]) == parent else []
        except OSError:
            continue
    return found


def kill_workers(folder: Path, count: int) -> list[str]:
    """Kill a worker at ``count`` random moments, three a run."""
    whole, seconds = undisturbed(folder, "--workers", "2")
    draw = random.Random(1)
    same = killed = runs = proved = pins = 0
    verdicts: set[str] = set()
    while killed < count:
        out = f"workers{runs}"
        process = subprocess.Popen(arguments(folder, out, "--workers", "2", "--quiet"))

        def killer(process: subprocess.Popen[bytes] = process) -> int:
            done = 0
            while process.poll() is None and done < 3:
                time.sleep(draw.uniform(0.2, 0.35) * seconds)
                children = children_of(process.pid)
                if children:
                    os.kill(draw.choice(children), signal.SIGKILL)
                    done += 1
            return done

        made: list[int] = []
        thread = threading.Thread(target=lambda k=killer, m=made: m.append(k()))
        thread.start()
        code = process.wait()
        thread.join()
        killed, runs = killed + made[0], runs + 1
        same += code == 0 and answer(folder / out) == whole
        search = (folder / out / "search.csv").read_text(encoding="utf-8")
        verdicts |= {v for v in ("crashed", "timed-out") if v in search}
        fails = error_without(residual(), folder / out)
        proved, pins = proved + sum(fails), pins + len(fails)
    said = ", ".join(sorted(verdicts)) or "none"
    return [
        f"| kill -9 of workers, {killed} times in {runs} runs of two workers | {same} of {runs} "
        f"ended with the undisturbed answer; verdicts blamed on it: {said}; {proved} of {pins} "
        "pins fail again when removed |"
    ]


def small_disk(folder: Path) -> list[str]:
    """A run on a disk of 200 kB, then on the same once there is room."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode:
        return ["| a disk of 200 kB | not run: nothing may be mounted here |"]
    try:
        (disk / "ballast").write_bytes(b"0" * 120_000)
        full = subprocess.run(
            arguments(folder, "disk/run"), capture_output=True, text=True, check=False
        )
        left = sorted(p.name for p in (disk / "run").iterdir()) if (disk / "run").exists() else []
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        again = subprocess.run(
            arguments(folder, "disk/run", "--json"), capture_output=True, text=True, check=False
        )
        new = json.loads(again.stdout)["new_evaluations"] if again.returncode == 0 else "?"
        said = full.stderr.strip().replace(str(folder), "")
        return [
            f"| a disk of 200 kB, 120 of them taken | exit {full.returncode}: `{said}`; left: "
            f"{', '.join(left)} | ",
            f"| the same command once there is room | exit {again.returncode}, {new} new "
            "evaluations |",
        ]
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def two_at_once(folder: Path) -> list[str]:
    """Two runs in one folder."""
    first = subprocess.Popen(arguments(folder, "both"), stdout=subprocess.DEVNULL)
    while not (folder / "both" / "cache.sqlite").exists():
        time.sleep(0.05)
    second = subprocess.run(arguments(folder, "both"), capture_output=True, text=True, check=False)
    code = first.wait()
    said = second.stderr.strip().replace(str(folder), "")
    files = len([p for p in (folder / "both").iterdir() if p.name in RESULT_FILES])
    return [
        f"| two runs in one folder | the second: exit {second.returncode}, `{said}`; the first: "
        f"exit {code}, {files} files of its result |"
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--worker-kills", type=int, default=30)
    chosen = parser.parse_args()
    fixture = residual()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "m.onnx").write_bytes(model_bytes(fixture))
        (folder / "x.npz").write_bytes(input_bytes(fixture))
        print("| what | what happened |\n| --- | --- |")
        for line in (
            *two_at_once(folder),
            *small_disk(folder),
            *kill_runs(folder, chosen.kills),
            *kill_workers(folder, chosen.worker_kills),
        ):
            print(line, flush=True)


if __name__ == "__main__":
    main()
