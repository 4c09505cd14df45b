"""Do reverse passes rank layers as runs of each layer alone do, and what do they take?

``python -m benchmarks.ranking [--cases "det;rec"]`` prints a row for each model. Times are in plain
inferences by ONNX Runtime, the smallest of several each, as others use the machine. ``rank`` is
Spearman's correlation with the mean square of each layer's errors, of 60 layers where there are
more than 500, at the 64 most disturbed output elements, on one input. Layers that miss the
requirement alone do not choose the elements. ``own error`` is what ranks without a pass.
``--exported`` is a folder that ``benchmarks.models.exported`` wrote: its models can be named too.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
from numpy.typing import NDArray

from benchmarks.common import machine, table
from benchmarks.models.model_builder import Builder, Made
from benchmarks.models.plan_cases import CASES
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.error_sample import ErrorSample
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.metrics.parser import load_metrics, parse_requirements
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.reference import Reference
from fixtures.cases.rtdetr import rtdetr

NAMES = ("det", "rec", "encoder", "NAFNet", "RT-DETR", "transformer")
MAX_ALONE, ALONE, ELEMENTS = 500, 60, 64
WEIGHINGS = (8, 16)


def transformer(blocks: int = 33) -> Made:
    """About 1,000 layers: blocks of width 96 on 64 places."""
    width, places = 96, 64
    random = np.random.default_rng(5)
    to = Builder(random)
    inputs = {"x": random.standard_normal((1, places, width)).astype(np.float32)}
    x = "x"
    for block in range(blocks):
        to.scope = f"/blocks.{block}"
        normed = to.layer_norm(x, width)
        x = to.add("Add", x, to.attention(normed, normed, width, 4, places, places))
        hidden = to.gelu(to.linear(to.layer_norm(x, width), width, 2 * width))
        x = to.add("Add", x, to.linear(hidden, 2 * width, width))
    return to.model(inputs, [to.layer_norm(x, width)]), inputs


@dataclass(frozen=True)
class Ranked:
    """A model with one input and what is required of its outputs."""

    graph: Graph
    reference: Reference
    sample: Sample
    require: str
    metrics: tuple[str, ...] = ()


def made(name: str, folder: Path, exported: Path) -> Ranked:
    """The model of that name: of ``exported``, a fixture, or generated in ``folder``."""
    path = exported / f"{name}.onnx"
    if path.exists():
        with np.load(exported / f"{name}.npz") as arrays_of_file:
            arrays = dict(arrays_of_file)
        require, metrics = "snr_db>=40", ()
    elif name in CASES:
        case = CASES[name]
        path, arrays = case.model(folder), case.make(3)
        require, metrics = case.require, case.metrics
    else:
        path, require, metrics = folder / "model.onnx", "snr_db>=40", ()
        model, arrays = (
            transformer() if name == "transformer" else (rtdetr().model, rtdetr().inputs)
        )
        onnx.save_model(model, str(path))
    graph = Graph(load_model(path).proto)
    return Ranked(graph, Reference(graph, str(path)), Sample("", arrays), require, metrics)


def fastest(work: Callable[[], object], rounds: int) -> float:
    """Seconds."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def rank_correlation(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Over the layers that both have."""
    both = pd.DataFrame({"first": pd.Series(first), "second": pd.Series(second)}).dropna()
    return float(both.rank().corr().loc["first", "second"])


def weighings(
    chosen: ErrorSample, places: NDArray[np.intp], count: int
) -> list[dict[str, NDArray[np.float32]]]:
    """Random signs at ``places``."""
    random, found = np.random.default_rng(0), []
    for _ in range(count):
        factors = np.zeros(chosen.size)
        factors[places] = random.choice([-1.0, 1.0], places.size)
        found.append(chosen.weights(factors))
    return found


def own_errors(runner: EmulatedRunner, sample: Sample) -> dict[str, float]:
    """The error that each layer introduces, in negative dB of its output."""
    found: dict[str, float] = {}
    for values in runner.trace(sample, PrecisionPlan(Precision.FP16)):
        ratio = -tensor_error(values.reference, values.introduced).snr_db
        found[values.layer] = max(found.get(values.layer, -np.inf), ratio)
    return found


def row(name: str, folder: Path, exported: Path) -> list[object]:
    """What ranking takes, and how well it ranks."""
    case = made(name, folder, exported)
    requirements = parse_requirements(
        [case.require], case.graph.outputs, *load_metrics(list(case.metrics))
    )
    exact = case.reference.outputs(case.sample)
    runner, precision = EmulatedRunner(case.graph), Precision.FP16
    layers = [layer.name for layer in case.graph.layers_at(precision)]
    own = own_errors(runner, case.sample)
    few = layers if len(layers) <= MAX_ALONE else evenly(layers, ALONE)
    began = time.perf_counter()
    alone = dict(runner.sensitivities(case.sample, precision, few))
    single = (time.perf_counter() - began) / len(few)
    # One layer that misses by far would choose elements that the others leave as they are.
    needed = {n for n, o in alone.items() if o is None or not requirements.score(exact, o) <= 1.0}
    needed |= {n for n, ratio in own.items() if not ratio < np.inf}
    reduced = next(iter(runner.outputs(PrecisionPlan(precision).with_pins(needed), [case.sample])))
    chosen = ErrorSample(requirements, exact, reduced)
    places = np.argsort(-np.abs(chosen.errors(reduced)))[:ELEMENTS]
    given = weighings(chosen, places, max(WEIGHINGS))
    rounds = 3 if single < 0.5 else 1
    plain = fastest(lambda: case.reference.outputs(case.sample), 5)
    first = given[:1]
    one = fastest(lambda: runner.first_order_effects(case.sample, precision, first), rounds)
    all_ = fastest(lambda: runner.first_order_effects(case.sample, precision, given), rounds)
    each = (all_ - one) / (max(WEIGHINGS) - 1)
    found = runner.first_order_effects(case.sample, precision, given)
    covered = [n for n in layers if n not in found.uncovered]
    true = {
        n: _mean_square(chosen, o, places)
        for n, o in alone.items()
        if o is not None and n not in found.uncovered
    }
    ranks = []
    for count in WEIGHINGS:
        estimates = {n: float(np.mean(found.effects[n][:count] ** 2)) for n in covered}
        ranks.append(f"{rank_correlation(estimates, true):.3f}")
    return [
        name,
        f"{len(layers):,}",
        len(found.uncovered),
        f"{single * len(layers) / plain:,.0f}",
        f"{(one - each) / plain:.1f}",
        f"{each / plain:.1f}",
        f"{all_ / plain:,.0f}",
        *ranks,
        f"{rank_correlation(own, true):.3f}",
    ]


def _mean_square(chosen: ErrorSample, outputs: Arrays, places: NDArray[np.intp]) -> float:
    return float(np.mean(np.square(chosen.errors(outputs)[places], dtype=np.float64)))


HEAD: Sequence[str] = (
    *("model", "layers", "without an estimate", "each layer alone", "forward and writing"),
    *("a weighing", f"{max(WEIGHINGS)} weighings in all"),
    *(f"rank, {count} weighings" for count in WEIGHINGS),
    "rank, own error",
)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=";".join(NAMES))
    parser.add_argument("--exported", type=Path, default=Path("exported"))
    asked = parser.parse_args()
    print(f"`python -m benchmarks.ranking {shlex.join(sys.argv[1:])}`, {machine()}\n")
    rows = []
    for name in asked.cases.split(";"):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, Path(folder), asked.exported))
    print("\n".join(table(HEAD, rows)))


if __name__ == "__main__":
    main()
