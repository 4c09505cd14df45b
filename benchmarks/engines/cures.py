"""Which cures make an engine right and reproducible in many fresh processes? Needs a GPU and
TensorRT.

``python -m benchmarks.engines.cures MODEL INPUT OUT [--subgraph REPRODUCER] [--workers 8]`` tries
what ``bisect-trt cure`` tries, in as many processes; each runs the input 20 times and more. Rows
are printed as they come, and OUT is the command's folder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from benchmarks.common import machine
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import Precision
from bisect_trt.reduction.cures import try_cures
from bisect_trt.reduction.oracle import Budget, EngineTrials
from bisect_trt.reduction.reduce import fresh_engines, model_and_samples, tensorrt_trials
from bisect_trt.report.reduced import table_of_cures, write_cures
from bisect_trt.runners.tensorrt.records import EngineOptions
from bisect_trt.settings import Settings


class _Printed(Observer):
    """Prints a line for each cure, with the seconds so far."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def step(self, name: str) -> None:
        """Say what begins."""
        print(f"# {name}", flush=True)

    def progress(self, done: int, expected: int, note: str) -> None:
        """Say what one cure did; ``done`` counts engine builds."""
        del expected
        seconds = time.perf_counter() - self._began
        print(f"# {seconds:.0f} s, {done} builds: {note}", flush=True)


def main() -> None:
    """Try them and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("input", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--subgraph", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    asked = parser.parse_args()
    print(f"`python -m benchmarks.engines.cures {shlex.join(sys.argv[1:])}`, {machine()}\n")
    settings = Settings(asked.model, [asked.input], runner="tensorrt")
    observer = _Printed()
    graph, samples = model_and_samples(settings, observer)
    nodes = (
        json.loads((asked.subgraph / "reduce.json").read_text())["nodes"] if asked.subgraph else []
    )
    budget = Budget(None)

    def opens(options: EngineOptions) -> EngineTrials:
        engines = fresh_engines(settings, options)
        return tensorrt_trials(engines, Precision.FP32, budget, asked.workers)

    cures = try_cures(graph, samples, [node["name"] for node in nodes], opens, observer)
    asked.out.mkdir(parents=True, exist_ok=True)
    write_cures(cures, asked.out)
    columns = [
        "cure",
        "right",
        "reproducible",
        "processes",
        "runs",
        "wrong_runs",
        "error_over_allowed",
    ]
    columns += ["latency_ms", "engine_bytes"]
    print(table_of_cures(cures)[columns].to_csv(sep="|", index=False), flush=True)
    print(f"smallest: {cures.smallest.how if cures.smallest else 'none'}", flush=True)


if __name__ == "__main__":
    main()
