"""Does the memory traffic of a plan tell how long its engine takes? Needs a GPU and TensorRT.

``python -m benchmarks.engines.latencies [MODEL.onnx INPUTS.npz ...]`` builds engines of PP-OCRv4
det and rec, and of the models given, with growing sets of pins, and prints each one's latency
beside what follows from its traffic and the latencies of everything reduced and everything pinned.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import load as load_arrays
from benchmarks.common import machine
from benchmarks.models.plan_cases import CASES
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.pipeline import compare
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.problem import load
from bisect_trt.steps.tradeoff import relative_bytes

_PARTS = (0.02, 0.1, 0.3, 0.6)
"""Of the layers, in a random order and as a network's beginning."""


def cases() -> Iterator[tuple[str, Path, Mapping[str, Any]]]:
    """Name, model and input; the pages also at 1,280 by 768, where a kernel has more to do."""
    for name in ("det", "rec"):
        problem = CASES[name]
        yield name, problem.model(Path()), problem.make(0)
    page = CASES["det"].make(0)["x"]
    yield "det, 768 by 1,280", CASES["det"].model(Path()), {"x": np.tile(page, (1, 1, 4, 4))}
    for model, inputs in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        yield Path(model).stem, Path(model), load_arrays(Path(inputs))


def rows(name: str, model: Path, arrays: Mapping[str, Any]) -> Iterator[str]:
    """A row a set of pins."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Settings(model, [arrays], runner="emulated", out=Path(folder) / "out")
        table, problem = compare(asked).layers, load(asked, Observer())
    random = np.random.default_rng(0).permutation(problem.names).tolist()
    sets: list[tuple[str, list[str]]] = [("none", []), ("all", list(problem.names))]
    for part in _PARTS:
        count = max(1, round(part * len(problem.names)))
        sets += [("random", random[:count]), ("the first", list(problem.names[:count]))]
    runner = TensorRTRunner(problem.graph, problem.samples)
    found: dict[str, tuple[float, float]] = {}
    try:
        for how, pins in sets:
            plan: PrecisionPlan = problem.base.with_pins(pins)
            list(runner.outputs(plan, problem.samples))
            latency = float(runner.facts(plan)["latency_ms"])
            moved_bytes = relative_bytes(problem, table, plan)
            found.setdefault(how, (latency, moved_bytes))
            (least, _), (most, every) = found["none"], found.get("all", (latency, moved_bytes))
            part = (moved_bytes - 1.0) / (every - 1.0) if every > 1.0 else 0.0
            told = least + part * (most - least)
            yield (
                f"| {name} | {how} | {len(pins)} of {len(problem.names)} | {moved_bytes:.3f} "
                f"| {latency:.3f} | {told:.3f} | {latency / told:.2f} |"
            )
    finally:
        runner.close()


def main() -> None:
    """Print the table."""
    print(f"`python -m benchmarks.engines.latencies {' '.join(sys.argv[1:])}`, {machine()}\n")
    print("| model | pinned | layers | relative bytes | latency, ms | by traffic, ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for problem in cases():
        for line in rows(*problem):
            print(line, flush=True)


if __name__ == "__main__":
    main()
