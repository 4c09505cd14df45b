"""What repairs of the graph do: ``python -m benchmarks.repairs [NAME ...]``.

Fixtures, public reports and blocks of public architectures that miss in FP16: layers that must stay
in FP32 as they are, the edits, and the layers that must after them: both are rows of one run's
choices. Everything is emulated.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

import bisect_trt
from bisect_trt.base.outcomes import BF16, FP32, PLAN, REPAIRED, Cause
from bisect_trt.pipeline import repair
from bisect_trt.repair.edits import Rule
from bisect_trt.report.choices import Choice, Passes, recommended
from bisect_trt.report.repairs import Repaired
from bisect_trt.settings import Settings
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


def repaired(model: Model, folder: Path) -> Repaired:
    """The repair of a model."""
    inputs: Any = list(model.inputs)
    return repair(Settings(model=model.proto, inputs=inputs, out=folder))


def in_db(score: float) -> str:
    """The SNR of a score of ``snr_db>=40``."""
    if not math.isfinite(score):
        return "not finite"
    if score > 1e6:
        return "other integers"
    return f"{40.0 - 20.0 * math.log10(score):.1f}" if score > 0.0 else "exact"


def words(choice: Choice | None, kept: Collection[str] = ()) -> str:
    """The layers in FP32 but those of an FP16 source's own, and what they pass.

    Those that a rule has ``kept`` count.
    """
    if choice is None or choice.passes is Passes.NO:
        return "none passes"
    return f"{len(set(choice.pinned) - choice.plan.held.difference(kept))} {choice.passes}"


def row(model: Model) -> dict[str, object] | None:
    """A row of the table; None for a model whose FP16 is right."""
    began, inputs = time.perf_counter(), list[Any](model.inputs)
    with tempfile.TemporaryDirectory() as name:
        result = bisect_trt.bisect(
            model.proto, inputs, runner="emulated", out=Path(name), budget=BUDGET_MINUTES
        )
    if result.cause is Cause.NONE:
        return None
    choices = {choice.name: choice for choice in result.choice_rows}
    best = recommended(result.choice_rows)
    line: dict[str, object] = {
        "model": model.name,
        "layers": len(choices[FP32].pinned) if choices else "",
        "in FP32 as it is": words(choices.get(PLAN, choices.get(FP32))),
        "FP16, dB": in_db(result.base_score),
        "BF16, dB": in_db(choices[BF16].worst_score) if BF16 in choices else "",
        "edits": "none",
        "recommended": best.name if best is not None else "none",
        "s": f"{time.perf_counter() - began:.0f}",
    }
    proof, made = result.repair.proof, choices.get(REPAIRED)
    if proof is None or made is None:
        return line
    counts = Counter(edit.rule for edit in result.repair.rows)
    kept = [name for e in result.repair.rows if e.rule == Rule.INTEGERS for name in e.nodes]
    return {
        **line,
        "edits": ", ".join(f"{rule} {counts[rule]}" for rule in result.repair.rules),
        "nodes": f"{sum(edit.nodes_added for edit in result.repair.rows):+d}",
        "FP32 change": f"{proof.fp32_change:.0e}",
        "headroom": f"{proof.headroom:g}",
        "repaired, dB": in_db(proof.score_after),
        "in FP32 repaired": words(made, kept),
    }


COLUMNS = (
    *("model", "layers", "in FP32 as it is", "FP16, dB", "BF16, dB", "edits", "nodes"),
    *("FP32 change", "headroom", "repaired, dB", "in FP32 repaired", "recommended", "s"),
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
        cured += str(found.get("in FP32 repaired", "")).startswith("0 ")
        print(f"| {' | '.join(str(found.get(c, '')) for c in COLUMNS)} |", flush=True)
    print(f"\n{cured} of {needed} models that need layers in FP32 need none after the repair.")


if __name__ == "__main__":
    main()
