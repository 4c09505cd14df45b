"""The tables of ``benchmarks.engines.engines``: rows a case, written after each."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from datetime import date
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.common import RESULTS, table
from bisect_trt.report.summarise import Result

STEPS = ("write", "parse", "build", "load", "context", "run")


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


def errors(result: Result) -> dict[str, float]:
    """The worst output's max_abs by baseline; infinite where something is not finite."""
    found: dict[str, float] = {}
    for label, rows in result.outputs.groupby("baseline", sort=False):
        finite = "finite" in rows and rows["finite"].astype(bool).all()
        found[str(label)] = float(rows["max_abs"].max()) if finite else float("inf")
    return found


def _plan(requirement: str, result: Result, made: int, latency: Mapping[str, float]) -> list[Any]:
    """What became of one case's plan."""
    assert result.engine is not None
    pins = f"{len(result.pinned)} of {result.layer_count}"
    scores = [result.engine.tolerance_share, result.base_score, result.score]
    times = [latency.get(k, np.nan) for k in ("fp32", result.precision.value, "plan")]
    return [requirement, result.cause.value, result.passed, pins, made, *scores, *times]


class Tables:
    """The rows of the report, filled case by case and written after each, so that a run cut short
    leaves what it has.
    """

    def __init__(self) -> None:
        self.errors: list[list[Any]] = []
        self.plans: list[list[Any]] = []
        self.split: list[list[Any]] = []
        self.sensitivities: list[list[Any]] = []
        self.builds: list[int] = []
        self.kept: dict[str, Any] = {}

    def add(
        self, name: str, requirement: str, result: Result, layers: pd.DataFrame, spent: float
    ) -> None:
        """One case: its run, and the errors of its layers over several samples."""
        found, engine, precision = errors(result), result.engine, result.precision.value
        assert engine is not None
        rho, agree, of = rank_correlation(layers)
        pairs = [
            f"{found.get(base, np.nan):.2e} / {found.get(f'tensorrt {base}', np.nan):.2e}"
            for base in ("fp32", "tf32", precision)
        ]
        self.errors.append([name, precision, *pairs, engine.fp32_is, rho, f"{agree} of {of}"])
        latency = {
            row["engine"].removeprefix("tensorrt "): row["latency_ms"]
            for row in result.cost.to_dict(orient="records")
        }
        made = engine.builds_beyond_baselines or 0
        if "plan" in latency:
            self.builds.append(made)
        self.plans.append([name, *_plan(requirement, result, made, latency), spent])
        sensitivity = engine.marking_effect
        if sensitivity:
            self.sensitivities.append(
                [
                    name,
                    sensitivity.unmarked_score,
                    sensitivity.marked_score,
                    engine.layer_errors_from,
                ]
            )
        for row in result.cost.to_dict(orient="records"):
            self.split.append(
                [
                    name,
                    row["engine"],
                    *(row[f"{s}_s"] for s in STEPS),
                    row["evaluation_s"],
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
        last = list({row[0]: row for row in self.split}.values())
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
            "in FP32",
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
            "## Marking changes the engine (final score, all layers reduced)",
            "",
            *table(marks, self.sensitivities),
            "",
            "## An evaluation's seconds by the last engine, and the tool's own share (limit 0.15)",
            "",
            *table(["model", "engine", *STEPS, "whole", "own share"], last),
            "",
            f"Own share over all engines: median {statistics.median(shares or [np.nan]):.3f}, most "
            f"{max(shares, default=np.nan):.3f}.",
        ]

    def write(self, versions: Mapping[str, str]) -> None:
        """results/engines.md and .json."""
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "engines.md").write_text("\n".join(self.lines(versions)) + "\n")
        (RESULTS / "engines.json").write_text(json.dumps(self.kept, indent=1, default=str))
