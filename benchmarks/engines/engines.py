"""The tool on real engines: emulated against measured errors, plans decided by the engine, builds,
latency, time split.

`make gpu-bench` on a machine with a GPU; results/ keeps what was printed, with the date, the
versions and the GPU.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import bisect_trt
from benchmarks.common import RESULTS, SHARED, load
from bisect_trt.core.errors import BisectError
from bisect_trt.core.precision import Precision
from bisect_trt.pipeline import compare
from bisect_trt.report.result import Result
from bisect_trt.stations.asked.settings import Settings
from fixtures.models import ALL
from tests import models

Case = tuple[str, Any, Mapping[str, Any], str, str]
SAMPLES = 16
STEPS = ("write", "parse", "build", "load", "context", "run")


def cases() -> list[Case]:
    """(name, model, inputs, precision, requirement): every fixture, then the OCR models."""
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else SHARED
    found: list[Case] = [
        (f.name, f.model, f.inputs, f.precision, f.require) for f in (make() for make in ALL)
    ]
    if models.DETECTOR.exists():
        found += [
            (
                "PP-OCR cls",
                models.CLASSIFIER,
                {"x": models.line(192)},
                "fp16",
                "atol=1e-2,rtol=1e-2",
            ),
            (
                "PP-OCRv4 det",
                models.DETECTOR,
                load(data / "ocr_det.npz"),
                "fp16",
                "atol=1e-1,rtol=1e-2",
            ),
            (
                "PP-OCRv4 rec",
                models.RECOGNISER,
                load(data / "ocr_rec.npz"),
                "fp16",
                "atol=3e-2,rtol=1e-2",
            ),
        ]
    return found


def rank_correlation(table: pd.DataFrame) -> tuple[float, int, int]:
    """Spearman over the layers finite on both sides, how many layers agree on being finite, and of
    how many.
    """
    both = table.dropna(subset=["engine_finite"]) if "engine_finite" in table else table.head(0)
    agree = (
        int((both["finite"].astype(bool) == both["engine_finite"].astype(bool)).sum())
        if len(both)
        else 0
    )
    usable = (
        both[both["finite"].astype(bool) & both["engine_finite"].astype(bool)]
        if len(both)
        else both
    )
    if len(usable) < 3:
        return float("nan"), agree, len(both)
    emulated, measured = usable["mean_over_samples_rmse"], usable["engine_mean_over_samples_rmse"]
    return float(emulated.rank().corr(measured.rank())), agree, len(both)


def samples(name: str, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What layers' errors are ranked on: one sample of a layer with few elements says little, so
    small inputs get more.

    A fixture's input is rolled along its last axis; the classifier's lines are cut from other
    places of the page.
    """
    if name == "PP-OCR cls":
        return [
            {"x": models.line(192, top, left)}
            for top in range(20, 140, 30)
            for left in range(0, 160, 40)
        ]
    if name.startswith("PP-OCR"):
        return [dict(inputs)]
    return [
        {
            n: np.roll(a, i * a.shape[-1] // SAMPLES, axis=-1)
            if a.ndim and a.dtype.kind == "f"
            else a
            for n, a in inputs.items()
        }
        for i in range(SAMPLES)
    ]


def layer_errors(
    name: str, model: Any, inputs: Mapping[str, Any], precision: str, requirement: str
) -> Result:
    """The layers' errors, emulated and on the engine."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = samples(name, inputs), Path(folder)
        return compare(
            Settings(
                model=model,
                inputs=given,
                precision=Precision(precision),
                require=(requirement,),
                runner="tensorrt",
                out=out,
            )
        )


def errors(result: Result) -> dict[str, float]:
    """The worst output's max_abs by baseline; infinite where something is not finite."""
    found: dict[str, float] = {}
    for label, rows in result.outputs.groupby("baseline", sort=False):
        finite = "finite" in rows and rows["finite"].astype(bool).all()
        found[str(label)] = float(rows["max_abs"].max()) if finite else float("inf")
    return found


def table(head: list[str], rows: list[list[Any]]) -> list[str]:
    """Markdown."""

    def text(v: Any) -> str:
        return f"{v:.3g}" if isinstance(v, float) else str(v)

    return ["| " + " | ".join(map(text, row)) + " |" for row in (head, ["---"] * len(head), *rows)]


class Tables:
    """The rows of the report, filled case by case and written after each, so that a run cut short
    leaves what it has.
    """

    def __init__(self) -> None:
        self.errors: list[list[Any]] = []
        self.plans: list[list[Any]] = []
        self.split: list[list[Any]] = []
        self.effects: list[list[Any]] = []
        self.builds: list[int] = []
        self.kept: dict[str, Any] = {}

    def add(
        self, name: str, requirement: str, result: Result, layers: pd.DataFrame, spent: float
    ) -> None:
        """One case: its run, and the errors of its layers over several samples."""
        found, engine, precision = errors(result), result.engine, result.precision.value
        assert engine is not None
        rho, agree, of = rank_correlation(layers)
        pairs = []
        for base in ("fp32", "tf32", precision):
            pairs.append(
                f"{found.get(base, np.nan):.2e} / {found.get(f'tensorrt {base}', np.nan):.2e}"
            )
        self.errors.append([name, precision, *pairs, engine.fp32_is, rho, f"{agree} of {of}"])
        latency = {
            row["engine"].removeprefix("tensorrt "): row["latency_ms"]
            for row in result.cost.to_dict(orient="records")
        }
        made = engine.builds_beyond_baselines or 0
        if "plan" in latency:
            self.builds.append(made)
        pins, share = (
            f"{len(result.pinned)} of {result.layer_count}",
            engine.tolerance_share,
        )
        times = [latency.get(k, np.nan) for k in ("fp32", precision, "plan")]
        cause = result.cause.value
        self.plans.append(
            [
                name,
                requirement,
                cause,
                result.passed,
                pins,
                made,
                share,
                result.base_score,
                result.score,
                *times,
                spent,
            ]
        )
        effect = engine.probe_effect
        if effect:
            self.effects.append(
                [
                    name,
                    effect.unmarked_score,
                    effect.marked_score,
                    engine.layer_errors_from,
                ]
            )
        for row in result.cost.to_dict(orient="records"):
            self.split.append(
                [
                    name,
                    row["engine"],
                    *(row[f"{s}_s"] for s in STEPS),
                    row["probe_s"],
                    row["own_share"],
                ]
            )
        told = ("layer", "op", "rmse", "max_abs", "finite", "mean_over_samples_rmse")
        columns = [c for c in layers if c in told or c.startswith("engine_")]
        self.kept[name] = {
            **result.as_json(),
            "layer_errors": layers[columns].to_dict(orient="list"),
        }

    def lines(self, versions: Mapping[str, str]) -> list[str]:
        """The report."""
        shares = [row[-1] for row in self.split]
        known = ", ".join(f"{k} {v}" for k, v in versions.items() if k not in ("profile", "typing"))
        marks = ["model", "unmarked", "marked", "layer errors from"]
        errors_head = [
            "model",
            "precision",
            "FP32",
            "TF32",
            "reduced",
            "engine's FP32 is",
            "Spearman of layer errors",
            "finite alike",
        ]
        plans_head = [
            "model",
            "requirement",
            "cause",
            "met",
            "pins",
            "builds",
            "emulator's share",
            "score before",
            "score after",
        ]
        return [
            "# Engines",
            "",
            f"`make gpu-bench`, {date.today()}, {known}",
            "",
            "## Final errors (max abs, emulated / engine), and how the layers' errors rank",
            "",
            *table(errors_head, self.errors),
            "",
            "## Plans decided by the engine",
            "",
            *table([*plans_head, "FP32 ms", "reduced ms", "plan ms", "run s"], self.plans),
            "",
            f"Builds beyond the baselines: median {statistics.median(self.builds or [0])}, most "
            f"{max(self.builds, default=0)}.",
            "",
            "## Marking changes the engine (final score, all layers lowered)",
            "",
            *table(marks, self.effects),
            "",
            "## A probe's seconds, and the tool's own share (limit 0.15)",
            "",
            *table(["model", "engine", *STEPS, "whole probe", "own share"], self.split),
            "",
            f"Own share: median {statistics.median(shares or [np.nan]):.3f}, most "
            f"{max(shares, default=np.nan):.3f}.",
        ]

    def write(self, versions: Mapping[str, str]) -> None:
        """results/engines.md and .json."""
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "engines.md").write_text("\n".join(self.lines(versions)) + "\n")
        (RESULTS / "engines.json").write_text(json.dumps(self.kept, indent=1, default=str))


def main() -> None:
    """Run every case, or those whose names the second argument, a regular expression, finds."""
    tables, versions = Tables(), dict[str, str]()
    wanted = re.compile(sys.argv[2] if len(sys.argv) > 2 else "")
    for name, model, inputs, precision, requirement in cases():
        if not wanted.search(name):
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = bisect_trt.bisect(
                    model,
                    inputs,
                    precision=precision,
                    require=requirement,
                    runner="tensorrt",
                    out=folder,
                )
                spent = time.perf_counter() - began
                layers = layer_errors(name, model, inputs, precision, requirement).layers
            except BisectError as error:
                print(f"{name}: {error}")
                continue
        versions = dict(result.versions)
        tables.add(name, requirement, result, layers, spent)
        tables.write(versions)
        met = "met" if result.passed else "not met"
        print(
            f"{name}: {result.cause}, {met}, {len(result.pinned)} pins, {spent:.0f} s. "
            f"{result.sentence}"
        )
        for finding in result.findings:
            if finding.kind != "weight-underflow":
                print(f"    {finding.kind} {finding.where}: {finding.message[:160]}")
    print("\n".join(tables.lines(versions)))


if __name__ == "__main__":
    main()
