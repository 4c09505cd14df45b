"""Is the promise of memory kept by models of ordinary sizes, and does the estimate agree?

``python -m benchmarks.sizes.memory [NAMES]``. The promise is that of ``benchmarks.sizes.large``: at
most 2.5 times the weights, 3 times a plain inference's activations and 300 MB. The estimate is what
``--dry-run`` says of a run: at most 10 % below the peak, and about 30 % from it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import onnx

from benchmarks.common import CLASSIFIER, DETECTOR, MODELS, RECOGNISER, machine
from benchmarks.models.large_models import vit_small
from benchmarks.models.model_builder import Made
from benchmarks.sizes.large import PLAIN, measured, of_weights

_NEED = """
import sys
from bisect_trt.inputs.samples import load_samples
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import input_specs
from bisect_trt.model.load import load_model
from bisect_trt.steps.memory_need import need_of
from bisect_trt.settings import Settings
model = load_model(sys.argv[1]).proto
settings = Settings(sys.argv[1], (sys.argv[2],), require=("max_abs<=1",))
inputs = load_samples(settings.inputs, input_specs(model))
need = need_of(Graph(model), settings, inputs)
print(need.weights, need.bytes)
"""

COMMANDS = ("inspect", "compare", "run", "run --robust 0", "verify", "export")


@dataclass(frozen=True)
class Problem:
    """``make`` writes model.onnx and the named ``inputs`` into a folder; ``inputs`` is .npy where
    the model takes one, ``x``.
    """

    make: Callable[[Path], object]
    requirement: str
    inputs: str = "x.npz"


def _of(made: Callable[[], Made]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        model, inputs = made()
        onnx.save(model, folder / "model.onnx")
        np.savez(folder / "x.npz", **inputs)

    return make


def _demo(model: Path, shape: tuple[int, ...] | None = None) -> Callable[[Path], None]:
    """One of the demo's models, on its page or on seeded numbers."""

    def make(folder: Path) -> None:
        shutil.copy(model, folder / "model.onnx")
        if shape is None:
            shutil.copy(MODELS / "page.npz", folder / "x.npz")
            return
        values = np.random.default_rng(0).random(shape, np.float32)
        np.savez(folder / "x.npz", x=values)

    return make


CASES: Mapping[str, Problem] = {
    "OCR classifier": Problem(_demo(CLASSIFIER, (1, 3, 48, 192)), "max_abs<=1e-4"),
    "OCR detector": Problem(_demo(DETECTOR), "max_abs<=5e-2"),
    "OCR recogniser": Problem(_demo(RECOGNISER, (1, 3, 48, 320)), "max_abs<=1e-3"),
    "20 MB beside": Problem(of_weights(10, 700), "max_abs<=1e-3", "x.npy"),
    "20 MB inside": Problem(of_weights(10, 700, inside=True), "max_abs<=1e-3", "x.npy"),
    "50 MB beside": Problem(of_weights(12, 1024), "max_abs<=1e-3", "x.npy"),
    "50 MB inside": Problem(of_weights(12, 1024, inside=True), "max_abs<=1e-3", "x.npy"),
    "ViT-S": Problem(_of(vit_small), "max_abs<=1e-2"),
    "113 MB beside": Problem(of_weights(7, 2048), "max_abs<=1e-3", "x.npy"),
    "113 MB inside": Problem(of_weights(7, 2048, inside=True), "max_abs<=1e-3", "x.npy"),
    "200 MB beside": Problem(of_weights(12, 2048), "max_abs<=1e-3", "x.npy"),
    "200 MB inside": Problem(of_weights(12, 2048, inside=True), "max_abs<=1e-3", "x.npy"),
}


def _arguments(problem: Problem) -> Mapping[str, list[str]]:
    tool = ["-m", "bisect_trt"]
    given = ["model.onnx", "--input", problem.inputs]
    asked = ["--requirement", problem.requirement]
    plan = ["--plan", "run/plan.json"]
    run = [*tool, "run", *given, *asked, "--quiet", "--out"]
    return {
        "inspect": [*tool, "inspect", "model.onnx"],
        "compare": [*tool, "compare", *given, *asked, "--out", "compared"],
        "run": [*run, "run"],
        "run --robust 0": [*run, "fitted", "--robust", "0"],
        "verify": [*tool, "verify", *given, *plan, "--quiet", "--out", "verified"],
        "export": [*tool, "export", "model.onnx", *plan, "--format", "onnx", "-o", "typed.onnx"],
    }


def make(name: str, folder: Path) -> None:
    """Write the model and inputs of the case ``name``."""
    CASES[name].make(folder)


def row_of(name: str) -> str:
    """The row of the case ``name``."""
    problem = CASES[name]
    with tempfile.TemporaryDirectory(prefix="bisect-trt-memory-") as made:
        folder = Path(made)
        # In a process of its own: a child's peak begins with that of whoever started it.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(make, name, folder).result()
        said = measured(["-c", _NEED, "model.onnx", problem.inputs], folder)[3]
        weights, estimated = map(int, said.split())
        plain = measured(["-c", PLAIN, "model.onnx", problem.inputs], folder)
        activations = max(0, int(plain[3]) - weights)
        promise = 2.5 * weights + 3 * activations + 300e6
        peaks, cells = [], []
        for command, arguments in _arguments(problem).items():
            code, _, peak, _ = measured(arguments, folder)
            peaks.append(peak)
            cells.append(f"{peak / 1e6:,.0f}" + ("" if code in (0, 1) else f" (exit {code})"))
            print(f"{name}: {command} {cells[-1]} MB", file=sys.stderr, flush=True)
        off = estimated / max(peaks[2:4]) - 1.0
        kept = "yes" if max(peaks) <= promise else "no"
        numbers = (weights, activations, promise, estimated)
        first = " | ".join(f"{number / 1e6:,.0f}" for number in numbers)
        return f"| {name} | {first} | {off:+.0%} | {' | '.join(cells)} | {kept} |"


def main() -> None:
    """Print the cases named, or all; ``benchmarks/results/scale.md`` keeps the newest table."""
    named = sys.argv[1:]
    unknown = [name for name in named if name not in CASES]
    if unknown:
        sys.exit(f"{unknown[0]}: no such case; there are {', '.join(CASES)}")
    columns = ["model", "weights", "activations", "promise", "estimated", "off", *COMMANDS, "kept"]
    head = [
        "# Memory: what is promised, estimated and taken\n",
        f"`python -m benchmarks.sizes.memory`, {machine()}\n",
        "Megabytes (1e6 bytes); under each command the largest resident set that the system",
        "counted. The promise: 2.5 times the weights, 3 times a plain inference's activations (its",
        "peak less the weights), 300 MB. Off: the estimate beside the larger peak of the runs.\n",
        f"| {' | '.join(columns)} |",
        "| --- " * len(columns) + "|",
    ]
    print("\n".join(head), flush=True)
    for name in named or CASES:
        print(row_of(name), flush=True)


if __name__ == "__main__":
    main()
