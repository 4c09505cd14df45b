"""The five public stories in one table: errors at each precision, the cause, the layers kept in
FP32, what they cost; and the cures side by side.

``python -m benchmarks.cases`` judges by emulation; with ``tensorrt`` behind it by the engine, on a
machine with a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import bisect_trt
from benchmarks.common import RESULTS, machine, table
from bisect_trt.base.errors import BisectError, RunnerFailedError
from bisect_trt.base.outcomes import PLAN
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.parser import load_metrics, parse_requirements
from bisect_trt.model.patterns import find_patterns
from bisect_trt.report.summarise import Result
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.ort_session import reference_session, run_all
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from fixtures import cases
from fixtures.cases.unimatch import noise
from fixtures.fixture import Fixture

LIMIT = 0.3
"""UniMatch's requirement, which turns its scores into pixels."""

RUNNER = sys.argv[1] if len(sys.argv) > 1 else "emulated"


def solve(fixture: Fixture, **options: Any) -> Result:
    """One run on the runner of this table, on the given inputs alone as the pages of the cases."""
    with tempfile.TemporaryDirectory() as folder:
        return bisect_trt.bisect(
            fixture.model,
            options.pop("inputs", fixture.inputs),
            precision=options.pop("precision", fixture.precision),
            require=fixture.require,
            metric=fixture.metrics,
            runner=RUNNER,
            out=folder,
            robust=0,
            **options,
        )


@cache
def errors(name: str, make: Callable[[], Fixture]) -> list[float]:
    """Scores of FP32, TF32, FP16 and BF16 by this table's runner; infinite where the engine cannot
    be built.
    """
    fixture = make()
    sample = Sample(name, fixture.inputs)
    requirements = parse_requirements(
        (fixture.require,),
        [o.name for o in fixture.model.graph.output],
        *load_metrics(fixture.metrics),
    )
    reference = run_all(reference_session(fixture.model), sample.arrays, name)
    engine = None if RUNNER == "emulated" else TensorRTRunner(fixture.model, [sample])
    found = []
    for precision in (Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16):
        runner = engine or EmulatedRunner(
            fixture.model, precision if precision.is_storage else Precision.FP16
        )
        try:
            found.append(
                requirements.score(
                    reference, next(iter(runner.outputs(PrecisionPlan(precision), [sample])))
                )
            )
        except RunnerFailedError as error:
            print(f"{name} {precision}: {error}")
            found.append(float("inf"))
    if engine is not None:
        engine.close()
    return found


def augmented() -> list[list[Any]]:
    """A row for each augmented input; ``unrepaired`` counts layers on the original graph."""
    rows = []
    for name, make in cases.AUGMENTED.items():
        fixture = make()
        try:
            result = solve(fixture)
        except BisectError as error:
            print(f"{name}: {error}")
            continue
        builds = (result.engine and result.engine.builds_beyond_baselines) or 0
        evaluations = sum(
            count for runner, count in result.evaluations.items() if runner.startswith("emulated")
        )
        pins = f"{len(result.pinned)} of {result.layer_count}"
        original = [choice for choice in result.choice_rows if choice.name == PLAN]
        cause = result.cause.value + (
            "" if result.cause.value == fixture.cause else f" (emulated: {fixture.cause})"
        )
        rows.append(
            [
                name,
                fixture.require,
                *errors(fixture.name, BY_NAME[fixture.name]),
                cause,
                pins,
                len(original[0].pinned) if original else "",
                result.passed,
                result.score,
                evaluations,
                builds,
            ]
        )
        print(rows[-1], flush=True)
    return rows


def cures(make: Callable[[], Fixture]) -> list[list[Any]]:
    """The repairs, the plan found, every LayerNorm in FP32, and BF16: score, layers in FP32 and, on
    an engine, latency.
    """
    fixture = make()
    norms = frozenset(
        name for p in find_patterns(fixture.model) if p.kind == "LayerNorm" for name in p.layers
    )
    rows = []

    def add(what: str, result: Result) -> None:
        latency = {
            row["engine"].rpartition(" ")[2]: row["latency_ms"]
            for row in result.cost.to_dict(orient="records")
        }
        rows.append(
            [
                what,
                len(result.pinned),
                result.passed,
                result.score,
                latency.get("plan", latency.get(result.precision.value, "")),
            ]
        )

    add("repaired", solve(fixture))
    add("the plan found", solve(fixture, repair="none", weights="nearest"))
    with tempfile.TemporaryDirectory() as folder:
        checked = bisect_trt.verify(
            fixture.model,
            fixture.inputs,
            PrecisionPlan(Precision.FP16, norms),
            require=fixture.require,
            metric=fixture.metrics,
            runner=RUNNER,
            out=folder,
        )
    rows.append(
        ["every LayerNorm in FP32", len(norms), checked.passed, checked.checks[0].detail, ""]
    )
    for what, options in (
        ("--repair layernorm", {"repair": "layernorm"}),
        ("BF16 instead", {"precision": "bf16"}),
    ):
        try:
            add(what, solve(fixture, **options))
        except BisectError as error:
            rows.append([what, "", False, str(error)[:60], ""])
    return rows


def noise_against_photo() -> list[list[Any]]:
    """UniMatch's errors on the photos and on random numbers, its graph left alone."""
    fixture = cases.unimatch()
    rows = []
    for what, inputs in (("two photos", fixture.inputs), ("random numbers", noise())):
        result = solve(fixture, inputs=inputs, repair="none", weights="nearest")
        prefix = "" if RUNNER == "emulated" else f"{RUNNER} "
        for label in ("fp32", "fp16", "plan"):
            found = result.outputs[result.outputs["baseline"] == f"{prefix}{label}"]
            for row in found.to_dict(orient="records"):
                rows.append(
                    [
                        what,
                        label,
                        row["score"] * LIMIT,
                        row["max_abs"],
                        row["median_abs"],
                        len(result.pinned) if label == "plan" else "",
                    ]
                )
    return rows


BY_NAME = {make().name: make for make in cases.AUGMENTED.values()}


def main() -> None:
    """Print the tables and keep them in results/."""
    lines = [
        f"# The five cases, judged by {RUNNER}",
        "",
        f"`python -m benchmarks.cases {RUNNER}`, {machine()}",
        "",
    ]
    lines += [
        "Errors are scores: multiples of the tolerance, at most 1 passes. Searched on the given "
        "inputs alone. Unrepaired: the layers in FP32 where the graph is left alone.",
        "",
    ]
    head = [
        "case",
        "requirement",
        "FP32",
        "TF32",
        "FP16",
        "BF16",
        "cause",
        "in FP32",
        "unrepaired",
        "met",
        "score after",
        "evaluations",
        "builds",
    ]
    lines += table(head, augmented())
    for make in (cases.nafnet, cases.encoder):
        lines += [
            "",
            f"## Cures compared: {make().name}",
            "",
            *table(["cure", "in FP32", "met", "score", "latency ms"], cures(make)),
        ]
    head = ["input", "engine", "end-point error", "max error", "median error", "in FP32"]
    lines += [
        "",
        "## UniMatch on photos and on noise, pixels",
        "",
        *table(head, noise_against_photo()),
    ]
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"cases-{RUNNER}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
