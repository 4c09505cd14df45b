"""Predicted against measured times of plans: ``python -m benchmarks.engines.cost [MODEL ...]``.

Needs a GPU, TensorRT for RTX, and torch for the exported models. The engines of a model's table and
of further plans are timed in the same rounds; the further ones are not used for the table.
``--out FOLDER`` keeps every time, and a model that is there is not timed again.
"""

from __future__ import annotations

import json
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common import DETECTOR, load, machine
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.cost import CostTable, engines_to_build, estimated_table, measured_table
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.steps.timing import Build, Timing, time_engines
from tests.models import page

FP16 = Precision.FP16
NOTHING, EVERYTHING = "table 0", "table 1"
"""The first two engines of every table."""

Loaded = tuple[Graph, Sample]


def _exported(name: str, *shape: int) -> Callable[[Path], Loaded]:
    def make(folder: Path) -> Loaded:
        from benchmarks.models.exported import export

        path = export(name, folder, shape)
        inputs = load(path.with_suffix(".npz"))
        return Graph(load_model(path).proto), Sample(name, inputs)

    return make


def _detector(_: Path) -> Loaded:
    x = np.resize(page(), (8, 3, 736, 1280)).astype(np.float32)
    return Graph(load_model(DETECTOR).proto), Sample("det", {"x": x})


MODELS: dict[str, Callable[[Path], Loaded]] = {
    "det": _detector,
    "ViT-S": _exported("ViT-S", 32, 3, 224, 224),
    "ConvNeXt-T": _exported("ConvNeXt-T", 16, 3, 224, 224),
    "BERT": _exported("BERT", 32, 128),
    "U-Net": _exported("U-Net", 4, 3, 512, 512),
    "RT-DETR-R101": _exported("RT-DETR-R101", 1, 3, 640, 640),
    "ViT-L": _exported("ViT-L", 8, 3, 224, 224),
}


def further_plans(table: CostTable, count: int, seed: int = 0) -> dict[str, frozenset[str]]:
    """Up to ``count`` plans that no table is made from: kinds and stretches, then random ones."""
    works = [work for block in table.blocks for work in block]
    names = [work.name for work in works]
    matrix = [work.name for work in works if work.is_matrix]
    others = [work.name for work in works if not work.is_matrix]
    random = np.random.default_rng(seed)

    def some(of: Sequence[str], share: float) -> list[str]:
        places = random.permutation(len(of))[: round(share * len(of))]
        return [of[place] for place in places]

    def kind(of_matrix: bool) -> list[str]:
        ops = Counter(work.op for work in works if work.is_matrix == of_matrix)
        (most, _), *_ = ops.most_common(1) or [("", 0)]
        return [work.name for work in works if work.op == most]

    structured: list[tuple[str, list[str]]] = [
        ("first tenth", names[: len(names) // 10]),
        ("others and the first eighth of the matrix layers", others + matrix[: len(matrix) // 8]),
        ("the commonest other kind", kind(of_matrix=False)),
        ("last quarter", names[-len(names) // 4 :]),
        ("the commonest matrix kind", kind(of_matrix=True)),
        ("first half of the matrix layers", matrix[: len(matrix) // 2]),
        ("first quarter", names[: len(names) // 4]),
        ("others and the last eighth of the matrix layers", others + matrix[-len(matrix) // 8 :]),
    ]
    at_random: list[tuple[str, list[str]]] = [
        ("a random tenth", some(names, 0.1)),
        ("others and a random eighth of the matrix layers", others + some(matrix, 0.125)),
        ("a random half", some(names, 0.5)),
        ("a random quarter of the matrix layers", some(matrix, 0.25)),
        ("a random third", some(names, 0.33)),
        ("others and a random half of the matrix layers", others + some(matrix, 0.5)),
        ("a random fifth", some(names, 0.2)),
        ("a random half of the others", some(others, 0.5)),
    ]
    mixed = [plan for pair in zip(structured, at_random, strict=True) for plan in pair]
    mixed += [("last half", names[len(names) // 2 :]), ("a random quarter", some(names, 0.25))]
    seen, found = set(engines_to_build(table)), dict[str, frozenset[str]]()
    for name, layers in mixed:
        pinned = frozenset(layers)
        if pinned not in seen and len(found) < count:
            seen.add(pinned)
            found[name] = pinned
    return found


@dataclass(frozen=True)
class Errors:
    """How predictions differ from measured times beyond FP16, of plans beyond FP16's spread.

    ``spearman`` is over these plans. ``largest`` and ``median`` are relative to what a plan costs,
    ``of_saving`` is the largest difference as a share of FP16's saving.
    """

    spearman: float
    largest: float
    median: float
    of_saving: float


def errors(predicted: Sequence[float], measured: Sequence[float], saving: float) -> Errors:
    """Compares times beyond FP16, in ms."""
    found, exact = np.asarray(predicted), np.asarray(measured)
    if len(exact) < 3:
        return Errors(*[float("nan")] * 4)
    ranks = np.stack([np.argsort(np.argsort(values)) for values in (found, exact)])
    off = np.abs(found - exact)
    relative = off / np.abs(exact)
    return Errors(
        float(np.corrcoef(ranks)[0, 1]),
        float(relative.max()),
        float(np.median(relative)),
        float(off.max() / saving),
    )


def pairs_in_order(timing: Timing, names: Sequence[str], predicted: Mapping[str, float]) -> str:
    """How many pairs of plans are predicted in their order, of those that differ measurably."""
    right = counted = 0
    for number, one in enumerate(names):
        for other in names[:number]:
            if timing.equal(one, other):
                continue
            counted += 1
            measured = timing.difference(one, other).median_ms
            right += (predicted[one] - predicted[other]) * measured > 0
    return f"{right} of {counted}"


def rows(timing: Timing, table: CostTable, pinned: Mapping[str, frozenset[str]]) -> list[str]:
    """The lines of a model: each plan's times, then the errors of both predictions."""
    timed = [name for name, plan in timing.plans.items() if not plan.failure]
    of_table = [name for name in timed if name.startswith("table ")]
    solved = measured_table(
        table, [pinned[name] for name in of_table], [timing.ms(name) for name in of_table]
    )
    fp16, fp32 = timing.ms(NOTHING), timing.ms(EVERYTHING)
    scale = (fp32 - fp16) / table.extra
    plans = {name: PrecisionPlan(FP16, pinned[name]) for name in timed}
    by_table = {name: solved.predicted(plan) for name, plan in plans.items()}
    by_estimate = {name: scale * table.predicted(plan) for name, plan in plans.items()}
    lines = []
    for name in timing.plans:
        if name not in plans:
            lines.append(f"  {name}: {timing.plans[name].failure}")
            continue
        plain = timing.plans[name].plain
        spread = timing.difference(name, NOTHING)
        lines.append(
            f"  {name}, {len(pinned[name])} layers: {timing.ms(name):.3f} ms "
            f"(plain {plain.median_ms if plain else np.nan:.3f}, spread "
            f"{spread.high_ms - spread.low_ms:.3f}), table {fp16 + by_table[name]:.3f}, "
            f"estimate {fp16 + by_estimate[name]:.3f}"
        )
    further = [name for name in timed if name not in of_table]
    clear = [name for name in further if not timing.equal(name, NOTHING)]
    lines.append(
        f"  FP16 {fp16:.3f}, FP32 {fp32:.3f} ms; {len(clear)} of {len(further)} further plans "
        f"differ from FP16. {' '.join([*timing.notes(), timing.advice(NOTHING)])}"
    )
    for what, predicted in (("table", by_table), ("estimate", by_estimate)):
        measured = [timing.ms(name) - fp16 for name in clear]
        off = errors([predicted[name] for name in clear], measured, fp32 - fp16)
        lines.append(
            f"  {what}: Spearman {off.spearman:.3f}, relative error largest {off.largest:.2f}, "
            f"median {off.median:.2f}; largest error {off.of_saving:.3f} of FP16's saving; pairs "
            f"in order {pairs_in_order(timing, further, predicted)}"
        )
    return lines


def kept(timing: Timing, pinned: Mapping[str, frozenset[str]], lines: list[str]) -> dict[str, Any]:
    """What is worth keeping of a model: its plans and every round."""
    return {
        "versions": dict(timing.versions),
        "lines": lines,
        "plans": {
            name: {
                "pinned": sorted(pinned[name]),
                "graph_ms": plan.rounds.graph_ms,
                "plain_ms": plan.rounds.plain_ms,
                "failure": plan.failure,
            }
            for name, plan in timing.plans.items()
        },
    }


def measure(name: str, plans: int, builders: int, module: str) -> tuple[list[str], dict[str, Any]]:
    """The lines of a model, and what is kept of it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        graph, sample = MODELS[name](Path(folder))
        table = estimated_table(graph, sample.shapes, FP16)
        pinned = {f"table {number}": p for number, p in enumerate(engines_to_build(table))}
        pinned |= further_plans(table, plans)
        timing = time_engines(
            {plan: Build(graph, PrecisionPlan(FP16, layers)) for plan, layers in pinned.items()},
            sample,
            module=module,
            builders=builders,
            timeout_s=300.0,
        )
    try:
        lines = rows(timing, table, pinned)
    except ValueError:  # FP16 or FP32 has no time: the others are worth keeping
        lines = [traceback.format_exc()]
    lines.append(f"  {time.perf_counter() - began:.0f} s, {dict(timing.versions)}")
    return lines, kept(timing, pinned, lines)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(MODELS)))
@click.option("--plans", default=16, show_default=True, help="Plans that the table is not made of.")
@click.option("--builders", default=4, show_default=True, help="Engines built at the same time.")
@click.option("--module", default="tensorrt_rtx", show_default=True, help="TensorRT's module.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder for every time.")
def main(names: tuple[str, ...], plans: int, builders: int, module: str, out: Path | None) -> None:
    """Print a model's times as soon as they are there."""
    click.echo(f"`python -m benchmarks.engines.cost {' '.join(names)}`, {machine()}")
    for name in names or MODELS:
        file = out / f"{name}.json" if out is not None else None
        if file is not None and file.exists():
            click.echo(f"{name}: in {file}")
            continue
        click.echo(f"{name}:")
        try:
            lines, found = measure(name, plans, builders, module)
        except Exception:  # one failing model does not end the others
            click.echo(traceback.format_exc())
            continue
        for line in lines:
            click.echo(line)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
