"""Do weights' roundings, which add with their signs, rank layers better than mean squares do?

``python -m benchmarks.unseen.signed_effects [--cases "det;rec;NAFNet"]`` lowers each layer's
constants and what it computes apart, on two inputs, at the output elements that everything reduced
disturbs most. ``squares`` ranks by the mean square of both together, as the tool does; ``signed``
pins in turn the layer that takes most from (sum of the constants' effects) squared plus the sum of
the others' squares. Both prefixes are judged on 48 unseen inputs by one emulator.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import machine
from benchmarks.models.plan_cases import CASES, PlanCase
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.error_sample import ErrorSample
from bisect_trt.metrics.parser import load_metrics, parse_requirements
from bisect_trt.metrics.requirements import Requirements
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.model.switched import to_switched
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.ort_session import session_as_written
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.values import caller, owned, value_of

SIZES = {"det": (4, 8, 16, 32, 60), "rec": (15, 30, 60, 100, 200), "NAFNet": (2, 4, 6, 8, 10)}
SAMPLES, UNSEEN, UNSEEN_FROM, ELEMENTS = 2, 48, 100_000, 128
Vectors = dict[str, NDArray[np.float64]]


class Halves:
    """FP16 of some layers' constants, and of what other layers compute."""

    def __init__(self, graph: Graph) -> None:
        self._made = to_switched(graph, Precision.FP16, Precision.FP32)
        self._session = session_as_written(self._made.model, "the switched model")
        self._constants, self._outputs = ConstantStore(graph), graph.outputs
        self._switch = {state: owned(np.array(state)) for state in (False, True)}

    def outputs(self, arrays: Arrays, constants: set[str], computed: set[str]) -> Arrays:
        """The model's outputs.

        Args:
            arrays: the inputs by name.
            constants: the layers whose constants are rounded.
            computed: the layers whose operands and results are.
        """
        held = {name: owned(array) for name, array in arrays.items()}
        feed = {name: value_of(owner) for name, owner in held.items()}
        for name, flag in self._made.flags.items():
            on = not computed.isdisjoint(flag.on) and computed.isdisjoint(flag.off)
            feed[name] = value_of(self._switch[on])
        for name, weight in self._made.weights.items():
            precision = weight.reduced if weight.layer in constants else weight.pinned
            held[name] = self._constants.owner(weight.tensor, precision)
            feed[name] = value_of(held[name])
        found = caller(self._session)(feed, self._outputs, None)
        return {name: found[i].numpy() for i, name in enumerate(self._outputs)}


def sensitivities(
    graph: Graph, requirements: Requirements, exact: Sequence[Arrays], inputs: Sequence[Arrays]
) -> tuple[Vectors, Vectors, Vectors]:
    """By layer, in tolerances, over the samples' elements: what rounding its constants does, what
    rounding the rest does, and both.

    Args:
        graph: the model.
        requirements: give the tolerances.
        exact: each sample's reference outputs.
        inputs: each sample's inputs.
    """
    runner, layers = Halves(graph), [layer.name for layer in graph.layers_at(Precision.FP16)]
    parts: list[dict[str, list[NDArray[np.float32]]]] = [{n: [] for n in layers} for _ in range(3)]
    for reference, arrays in zip(exact, inputs, strict=True):
        finite = {
            name
            for name in layers
            if all(np.isfinite(o).all() for o in runner.outputs(arrays, {name}, {name}).values())
        }
        reduced = runner.outputs(arrays, finite, finite)
        chosen = ErrorSample(requirements, reference, reduced, ELEMENTS)
        for name in layers:
            for part, halves in zip(
                parts, (({name}, set()), (set(), {name}), ({name}, {name})), strict=True
            ):
                part[name].append(chosen.errors(runner.outputs(arrays, *halves)))
    constants, computed, both = (
        {n: np.concatenate(v).astype(np.float64) for n, v in part.items()} for part in parts
    )
    return constants, computed, both


def by_squares(both: Vectors) -> list[str]:
    """Most harmful first, by the mean square."""
    return sorted(both, key=lambda n: -_mean_square(both[n]))


def by_signs(constants: Vectors, computed: Vectors, both: Vectors) -> list[str]:
    """In turn the layer whose pin leaves the least: the squared sum of the constants' effects, plus
    the others' squares. What is not finite comes first.
    """
    broken = [n for n, vector in both.items() if not np.isfinite(vector).all()]
    left = [n for n in both if n not in set(broken)]
    total = np.sum([constants[n] for n in left], axis=0)
    chance = {n: _mean_square(computed[n]) for n in left}
    order = []
    while left:
        gains = [float(np.mean(total**2 - (total - constants[n]) ** 2)) + chance[n] for n in left]
        name = left.pop(int(np.argmax(gains)))
        total = total - constants[name]
        order.append(name)
    return broken + order


def _mean_square(vector: NDArray[np.float64]) -> float:
    return float(np.mean(vector * vector)) if np.isfinite(vector).all() else np.inf


def table(problem: PlanCase) -> list[str]:
    """A row for each number of pins."""
    with tempfile.TemporaryDirectory() as name:
        model = problem.model(Path(name))
        graph = Graph(load_model(model).proto)
        reference = Reference(graph, str(model))
    requirements = parse_requirements(
        [problem.require], graph.outputs, *load_metrics(list(problem.metrics))
    )
    inputs = [problem.make(n) for n in range(SAMPLES)]
    exact = [reference.outputs(Sample("", arrays)) for arrays in inputs]
    constants, computed, both = sensitivities(graph, requirements, exact, inputs)
    rankings = (by_squares(both), by_signs(constants, computed, both))
    unseen = [Sample("", problem.make(UNSEEN_FROM + n)) for n in range(UNSEEN)]
    true = [reference.outputs(sample) for sample in unseen]
    runner, rows = EmulatedRunner(graph), []
    for pins in SIZES[problem.name]:
        cells = []
        for ranking in rankings:
            plan = PrecisionPlan("fp16").with_pins(ranking[:pins])
            scores = [
                requirements.score(t, o)
                for t, o in zip(true, runner.outputs(plan, unseen), strict=True)
            ]
            cells.append(f"{sum(s <= 1.0 for s in scores)}, {np.quantile(scores, 0.95):.2f}")
        shared = len(set(rankings[0][:pins]) & set(rankings[1][:pins]))
        rows.append(f"| {problem.name} | {pins} | {' | '.join(cells)} | {shared} |")
    return rows


def main() -> None:
    """Print a row for each model and number of pins."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=";".join(SIZES))
    asked = parser.parse_args()
    print(f"`python -m benchmarks.unseen.signed_effects {shlex.join(sys.argv[1:])}`, {machine()}\n")
    print(f"| model | pins | squares: hold of {UNSEEN}, p95 | signed: hold, p95 | pins in both |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for name in asked.cases.split(";"):
        print("\n".join(table(CASES[name])), flush=True)


if __name__ == "__main__":
    main()
