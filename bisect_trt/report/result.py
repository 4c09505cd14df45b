"""The one record that a run ends in; every file and every line on the screen is written from it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from bisect_trt.core.errors import EXIT_NOT_MET, EXIT_OK
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.weight_range import Finding
from bisect_trt.probe.prober import ProbeResult
from bisect_trt.stations.triage import Cause


@dataclass(frozen=True)
class Result:
    """What ``run`` found.

    ``cause`` is triage's word, ``sentence`` says it to a person, ``passed`` whether ``plan`` meets
    the requirements by the runner's verdict. ``layers`` has a row a layer, ``outputs`` a row an
    output and baseline, ``search`` a row a probe in order, ``pins`` a row a pin with its proof,
    ``cost`` a row an engine; ``engine`` says what else was seen there, ``metrics`` are the
    ``--metric`` texts, ``rewritten`` the layers that a rewrite made, ``search_facts`` what kind of
    set was found, in the model's words, and what the search spent beside the bound. ``probes``
    counts plans by runner, ``new_probes`` those not answered by the journal; ``effect_runs`` counts
    the single-layer runs beside them.
    """

    model: str
    precision: Precision
    runner: str
    cause: Cause
    sentence: str
    passed: bool
    complete: bool
    plan: PrecisionPlan
    score: float
    base_score: float
    layer_count: int
    layers: pd.DataFrame
    outputs: pd.DataFrame
    search: pd.DataFrame
    pins: pd.DataFrame
    requirements: Sequence[str]
    samples: Sequence[str]
    findings: Sequence[Finding]
    probes: Mapping[str, int]
    new_probes: int
    effect_runs: int
    seconds: float
    folder: Path
    versions: Mapping[str, str] = field(default_factory=dict)
    cost: pd.DataFrame = field(default_factory=pd.DataFrame)
    engine: Mapping[str, Any] = field(default_factory=dict)
    search_facts: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    rewritten: Sequence[str] = ()

    @property
    def pinned(self) -> list[str]:
        """The pinned layers in network order."""
        return [str(name) for name in self.pins["layer"]] if len(self.pins) else []

    @property
    def exit_code(self) -> int:
        """0 if the plan written meets the requirements, 1 if none found does."""
        return EXIT_OK if self.passed else EXIT_NOT_MET

    def plan_json(self) -> str:
        """The content of plan.json: the plan, what it was found for, and the layers that a rewrite
        made, if there was one.
        """
        document = json.loads(self.plan.to_json()) | {
            "requirements": list(self.requirements),
            "metrics": list(self.metrics),
        }
        return json.dumps(
            document | ({"rewritten": list(self.rewritten)} if self.rewritten else {}), indent=2
        )

    def as_json(self) -> dict[str, Any]:
        """The content of run.json."""
        return {
            "model": self.model,
            "precision": self.precision.value,
            "runner": self.runner,
            "cause": self.cause.value,
            "sentence": self.sentence,
            "passed": self.passed,
            "complete": self.complete,
            "pinned": self.pinned,
            "layers": self.layer_count,
            "score": self.score,
            "base_score": self.base_score,
            "requirements": list(self.requirements),
            "samples": list(self.samples),
            "probes": dict(self.probes),
            "new_probes": self.new_probes,
            "effect_runs": self.effect_runs,
            "outputs": self.outputs.to_dict(orient="records"),
            "findings": [vars(f) for f in self.findings],
            "plan": {"base": self.plan.base.value, "pin_precision": self.plan.pin_precision.value},
            "engine": dict(self.engine),
            "search": dict(self.search_facts),
            "seconds": round(self.seconds, 3),
            "versions": dict(self.versions),
            "machine": {"system": platform.platform(), "processor": platform.machine()},
        }


def outputs_table(baselines: Mapping[str, ProbeResult]) -> pd.DataFrame:
    """A row for each baseline and output: worst errors over the samples, then their means."""
    rows: list[dict[str, Any]] = []
    for label, result in baselines.items():
        if not result.worst:
            rows.append(
                {
                    "baseline": label,
                    "output": "",
                    "verdict": result.verdict.value,
                    "score": result.score,
                }
            )
        for output, error in result.worst.items():
            mean = result.mean[output]
            rows.append(
                {
                    "baseline": label,
                    "output": output,
                    "verdict": result.verdict.value,
                    "score": result.score,
                    **error.as_dict(),
                    "mean_over_samples_max_abs": mean.max_abs,
                    "mean_over_samples_rmse": mean.rmse,
                    "mean_over_samples_cosine": mean.cosine,
                }
            )
    return pd.DataFrame(rows)


def search_table(probes: Sequence[ProbeResult]) -> pd.DataFrame:
    """A row for each distinct probe, in order."""
    rows = [
        {
            "probe": index,
            "runner": p.runner,
            "base": p.plan.base.value,
            "pins": len(p.plan.pinned),
            "verdict": p.verdict.value,
            "score": p.score,
            "seconds": round(p.seconds, 4),
            "note": p.note,
            "pinned": json.dumps(sorted(p.plan.pinned))
            if len(p.plan.pinned) <= 64
            else f"{len(p.plan.pinned)} layers",
        }
        for index, p in enumerate(probes)
    ]
    return pd.DataFrame(rows)
