"""What runs of the command cost each other, and what busy loops beside them cost, on two cores:
``python -m benchmarks.sizes.neighbours [ROUNDS]``.

Paired: each round makes both sides one after the other, so that a drifting machine hurts both.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import DETECTOR, MODELS, ROOT, machine

CORES, RUNS, LOOPS, ROUNDS = 2, 4, 4, 3
AT_ONCE, BESIDE = 1.3, 3.0
"""How many times as long is allowed."""


def started(out: Path) -> subprocess.Popen[bytes]:
    """A whole run on the detector, quiet."""
    given = [
        str(DETECTOR),
        "--input",
        str(MODELS / "page.npz"),
        "--requirement",
        "max_abs<=5e-2",
        "--robust",
        "0",
    ]
    command = [sys.executable, "-m", "bisect_trt", "run", *given, "--out", str(out), "--quiet"]
    return subprocess.Popen(command, cwd=ROOT)


def seconds(count: int, *, at_once: bool) -> float:
    """The wall time of ``count`` runs."""
    with tempfile.TemporaryDirectory(prefix="neighbours-") as folder:
        began = time.perf_counter()
        running = []
        for number in range(count):
            running.append(started(Path(folder) / str(number)))
            if not at_once:
                _ended_well(running.pop())
        for process in running:
            _ended_well(process)
        return time.perf_counter() - began


def _ended_well(process: subprocess.Popen[bytes]) -> None:
    if process.wait() != 0:
        raise SystemExit(f"a run ended with exit code {process.returncode}: nothing was measured")


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that do nothing but count."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)  # of whatever is started here too
    load = os.getloadavg()[0]
    print(f"{machine()}; bound to {len(cores)} cores; load {load:.1f} before", flush=True)
    seconds(1, at_once=False)  # files are in the system's memory from here on
    together: list[tuple[float, float]] = []
    beside: list[tuple[float, float]] = []
    for _ in range(rounds):
        together.append((seconds(RUNS, at_once=False), seconds(RUNS, at_once=True)))
        quiet = seconds(1, at_once=False)
        with busy_loops(LOOPS):
            beside.append((quiet, seconds(1, at_once=False)))
    print(
        f"\nPP-OCRv4 det, `--requirement max_abs<=5e-2 --robust 0`, medians of {rounds} rounds.\n"
    )
    print("| | quiet s | crowded s | ratio |")
    print("| --- | --- | --- | --- |")
    for what, found, most in (
        (f"{RUNS} runs: one after the other, at a time", together, AT_ONCE),
        (f"a run: alone, beside {LOOPS} busy loops", beside, BESIDE),
    ):
        ratio = statistics.median(crowded / quiet for quiet, crowded in found)
        first, second = (statistics.median(side) for side in zip(*found, strict=True))
        print(f"| {what} | {first:.1f} | {second:.1f} | {ratio:.2f} (at most {most:g}) |")


if __name__ == "__main__":
    main()
