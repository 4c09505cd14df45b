"""What repairs of the graph do: ``python -m benchmarks.repairs [NAME ...]``.

Fixtures, public reports and blocks of public architectures that miss in FP16: layers that must stay
in FP32 as they are, the edits, and the layers that must after them. Everything is emulated.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

import bisect_trt
from bisect_trt.base.outcomes import Cause
from bisect_trt.pipeline import repair
from bisect_trt.report.repairs import Repaired
from bisect_trt.report.summarise import Result
from bisect_trt.settings import Settings
from bisect_trt.steps.repair import Repair
from fixtures.blocks import BLOCKS
from fixtures.models import ALL
from fixtures.reports import REPORTS
from tests.models import DETECTOR, page

BUDGET_MINUTES = 3.0
"""What a search may take: a table of fifty models is to end within an hour."""


@dataclass(frozen=True)
class Model:
    """A model and the inputs that it is repaired and searched with."""

    name: str
    proto: onnx.ModelProto
    inputs: Sequence[Mapping[str, Any]]


def models() -> Iterator[Model]:
    """All models of the table."""
    for make in ALL:
        fixture = make()
        if fixture.precision == "fp16":
            yield Model(fixture.name, fixture.model, [fixture.inputs])
    for report in REPORTS:
        made = report()
        if made.precision == "fp16":
            yield Model(made.name, made.model, list(made.inputs))
    for block in BLOCKS:
        yield Model(f"block {block.name}", block.model(), list(block.given()))
    if DETECTOR.exists():
        yield Model("PP-OCRv4 det", onnx.load(DETECTOR), [{"x": page()}])


def searched(proto: onnx.ModelProto, model: Model, folder: Path) -> Result:
    """The run's result on a model, original or repaired."""
    inputs: Any = list(model.inputs)
    budget = BUDGET_MINUTES
    result: Result = bisect_trt.bisect(proto, inputs, runner="emulated", out=folder, budget=budget)
    return result


def repaired(model: Model, folder: Path) -> Repaired:
    """The repair of a model."""
    inputs: Any = list(model.inputs)
    return repair(Settings(model=model.proto, inputs=inputs, out=folder))


def worst_db(result: Result, baseline: str) -> str:
    """The lowest SNR of an output in a row of outputs.csv."""
    rows = result.outputs[result.outputs["baseline"] == baseline]
    if rows["outcome"].eq("non-finite").any():
        return "not finite"
    return f"{rows['snr_db'].min():.1f}" if len(rows) else ""


def words(result: Result) -> str:
    """The layers in FP32 and the verdict."""
    if not result.passed:
        return "none passes"
    verdict = result.validation.word if result.validation is not None else None
    return f"{len(result.pinned)} {verdict or ''}".strip()


def row(model: Model) -> dict[str, object] | None:
    """A row of the table; None for a model whose FP16 is right."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = searched(model.proto, model, folder / "as it is")
        if before.cause is Cause.NONE:
            return None
        made = repaired(model, folder / "repair")
        found = made.found
        line: dict[str, object] = {
            "model": model.name,
            "layers": before.layer_count,
            "in FP32 as it is": words(before),
            "FP16, dB": worst_db(before, "fp16"),
        }
        if made.model is None or not isinstance(found, Repair):
            return {**line, "edits": "none", "in FP32 repaired": "", "s": _seconds(began)}
        after = searched(made.model, model, folder / "repaired")
        added = len(made.model.graph.node) - len(model.proto.graph.node)
        return {
            **line,
            "edits": ", ".join(f"{rule} {_count(found, rule)}" for rule in found.rules),
            "nodes": f"{added:+d}",
            "FP32 change": f"{found.change.share:.0e}",
            "headroom": f"{found.headroom:g}",
            "repaired, dB": worst_db(after, "fp16"),
            "in FP32 repaired": words(after),
            "s": _seconds(began),
        }


def _seconds(began: float) -> str:
    return f"{time.perf_counter() - began:.0f}"


def _count(found: Repair, rule: str) -> int:
    return sum(edit.rule == rule for edit in found.edits)


COLUMNS = (
    *("model", "layers", "in FP32 as it is", "FP16, dB", "edits", "nodes", "FP32 change"),
    *("headroom", "repaired, dB", "in FP32 repaired", "s"),
)


def main() -> None:
    """Prints the table, a row as soon as it is there."""
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{' --- |' * len(COLUMNS)}")
    needed = cured = 0
    for model in models():
        if sys.argv[1:] and model.name not in sys.argv[1:]:
            continue
        found = row(model)
        if found is None:
            continue
        needed += 1
        cured += str(found["in FP32 repaired"]).startswith("0 ")
        print(f"| {' | '.join(str(found.get(c, '')) for c in COLUMNS)} |", flush=True)
    print(f"\n{cured} of {needed} models that need layers in FP32 need none after the repair.")


if __name__ == "__main__":
    main()
