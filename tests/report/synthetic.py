"""Results as a run could have ended, of any size, without a run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from bisect_trt.base.outcomes import (
    AS_IS,
    FP32,
    PLAN,
    Cause,
    Finding,
    Reproducibility,
    Tally,
    Validation,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.report.choices import Choice, Passes
from bisect_trt.report.record import EngineFacts, SearchFacts
from bisect_trt.report.summarise import Result

OPS = ("Conv", "MatMul", "Add", "Softmax", "Pow")
TRADEOFF = (0, 2, 8, 32, 128)
INPUTS = 64
HOSTILE = (
    "<script>window.hurt = 1</script>",
    "\"><img src=x onerror='window.hurt = 1'>",
    "</script><script>window.hurt = 1</script>",
    'it\'s "quoted" `here` & {{ there }} ${x} %{y}',
    "long" * 1250,
    "\u05e9\u05dc\u05d5\u05dd/\u0645\u0631\u062d\u0628\u0627 (12)",
    "turned\u202eetirw\u202c",
    "<b>bold</b><br><a href='javascript:window.hurt = 1'>link</a>",
    "=cmd|' /C calc'!A0",
    "\u2028separator\u2029",
)


def synthetic_result(count: int, names: Sequence[str] = ()) -> Result:
    """A plan that passes on an engine, with something to show in every section.

    Args:
        count: layers; every twentieth is pinned.
        names: what the first layers are called, instead of ``encoder.layers.0.conv_0``.
    """
    layers = _layers(count, names)
    pinned = [str(n) for n in layers.loc[layers["pinned"], "layer"]]
    return Result(
        model=names[0] if names else "models/encoder.onnx",
        precision=Precision.FP16,
        runner="tensorrt",
        cause=Cause.OVERFLOW,
        sentence=f"FP16 overflows in {pinned[0]}: values become infinite there.",
        passed=True,
        complete=True,
        plan=PrecisionPlan(Precision.FP16, frozenset(pinned)),
        score=0.81,
        base_score=float("inf"),
        layer_count=count,
        layers=layers,
        outputs=_outputs(),
        search=_search(pinned),
        pins=_pins(layers),
        requirements=("max_abs<=1e-2", "logits:cosine>=0.999"),
        samples=[f"page_{i:03d}.npz" for i in range(INPUTS)],
        findings=[
            *(Finding("weight", n, f"constant of layer {n!r} holds 1e5") for n in pinned[:9]),
            Finding("reference", "logits", "output 'logits' holds NaN: look at it", True),
        ],
        evaluations={"emulated": 80, "tensorrt": 10},
        new_evaluations=90,
        sensitivity_runs=count,
        seconds=123.4,
        folder=Path("reports/encoder"),
        versions={"bisect-trt": "0", "gpu": "NVIDIA H200", "typing": "strong"},
        cost=_cost(len(pinned)),
        engine=EngineFacts(
            "tf32", 0.99, "tf32", "emulated-kernels", reproducibility=Reproducibility(59, passed=59)
        ),
        search_facts=SearchFacts("culprits", 0, ["the main graph: 3 Pow"], 0.98, 80, 40.0, 0, 0),
        validation=Validation(
            Tally(64, 64, 0.0, 0.81, "page_000.npz"),
            Tally(72, 72, 0.959, 0.93, "page_001.npz, perturbed 3.0"),
            Tally(23, 24, 0.79, 1.04, "page_002.npz, shift 1.0"),
            Tally(16, 16, 0.829, 0.9, "page_060.npz"),
            0.95,
        ),
        inputs=_inputs(names),
        tradeoff=_tradeoff(),
        by_requirement=pd.DataFrame(
            {
                "requirement": ["max_abs<=1e-2", "logits:cosine>=0.999"],
                "reduced_score": np.inf,
                "plan_score": [0.81, 0.5],
                "baselines": [{"fp32": 1e-4, "plan": 0.7}] * 2,
            }
        ),
        command="bisect-trt run models/encoder.onnx --input pages",
        model_digest="0123456789abcdef" * 4,
        dynamic_inputs=("x",),
    )


def with_choices(result: Result) -> Result:
    """The result beside the choices that a run on an engine has: what passes takes more time."""
    names = [str(name) for name in result.layers["layer"]]
    pinned = tuple(result.pinned)
    rows = [
        Choice(AS_IS, PrecisionPlan(Precision.FP16), (), False, math.inf, Passes.NO),
        Choice(PLAN, result.plan, pinned, False, 0.81, Passes.VALIDATED, recommended=True),
        Choice(FP32, result.plan, tuple(names), False, 1e-4, Passes.GIVEN),
    ]
    times = ((1.0, 1.0), (1.1, 0.9), (2.1, 0.0))
    rows = [
        replace(row, latency_ms=ms, saving_kept=kept, is_estimated=False)
        for row, (ms, kept) in zip(rows, times, strict=True)
    ]
    return replace(result, choice_rows=rows)


def _layers(count: int, names: Sequence[str]) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    places = np.arange(count)
    ops = [OPS[i % len(OPS)] for i in places]
    modules = [f"encoder.layers.{i // 40}.{('attn', 'mlp')[i % 2]}" for i in places]
    layer = [f"{m}.{o}_{i}" for m, o, i in zip(modules, ops, places, strict=True)]
    layer[: len(names)] = names
    modules[: len(names)] = names
    error = 10.0 ** draw.normal(-3.0, 0.5, count)
    own = error * draw.uniform(0.01, 1.0, count)
    source = places == 3 * count // 4
    error[places > 3 * count // 4] *= 300.0
    finite = ~((places > 3 * count // 4) & (places < 3 * count // 4 + 5))
    largest = 10.0 ** draw.normal(1.0, 1.0, count)
    score = 10.0 ** draw.normal(-1.5, 0.7, count)
    return pd.DataFrame(
        {
            "layer": layer,
            "op": ops,
            "scope": "",
            "max_abs": np.where(finite, error, np.inf),
            "snr_db": np.where(finite, -20.0 * np.log10(error), np.nan),
            "finite": finite,
            "introduced_max_abs": own,
            "ref_min": -largest,
            "ref_max": largest / 2.0,
            "introduced_finite": True,
            "rel_range": np.where(finite, error, np.inf),
            "introduced_rel_range": own,
            "constant_min": np.where(places % 2, np.nan, 1e-3),
            "constant_max": np.where(places % 2, np.nan, largest),
            "channels": 64,
            **{f"channel_peak_{q}": largest * p for q, p in _PEAKS.items()},
            "worst_channel": 7,
            "pinned": places % 20 == 0,
            "sensitivity": score,
            "rank": np.argsort(np.argsort(-score)) + 1,
            "source": source,
            "module": modules,
            "module_class": "Block",
            "file": "/home/you/net.py",
            "line": pd.Series(100 + places % 300, dtype="Int64"),
            "code": "return x + self.attn(x)",
        }
    )


_PEAKS = {"min": 0.001, "p25": 0.05, "p50": 0.1, "p75": 0.3, "max": 1.0}


def _outputs() -> pd.DataFrame:
    rows = []
    scores = {"fp32": 1e-4, "tf32": 0.6, "fp16": np.inf, "plan": 0.7, "tensorrt plan": 0.81}
    for baseline, score in scores.items():
        for output in ("logits", "boxes"):
            errors = {"max_abs": 1e-2 * score, "cosine": 1.0 - 1e-3 * min(score, 1e3)}
            errors["snr_db"] = 40.0
            verdict = "pass" if score <= 1.0 else "non-finite"
            row = {"baseline": baseline, "output": output, "outcome": verdict, "score": score}
            rows.append({**row, **errors, "finite": bool(np.isfinite(score))})
    return pd.DataFrame(rows)


def _search(pinned: Sequence[str]) -> pd.DataFrame:
    counts = [0, len(pinned), 1, 2, 4, 8, 16] + [len(pinned)] * 80
    rows = [
        {
            "evaluation": i,
            "runner": "emulated",
            "on": "search_set" if i % 3 else "given",
            "base": "fp16",
            "pins": pins,
            "outcome": "pass" if pins == len(pinned) else "non-finite" if not pins else "fail",
            "score": 0.8 if pins == len(pinned) else 3.0,
            "seconds": 0.5,
            "note": "",
            "pinned": "[]",
        }
        for i, pins in enumerate(counts)
    ]
    return pd.DataFrame(rows)


def _pins(layers: pd.DataFrame) -> pd.DataFrame:
    pins = layers.loc[layers["pinned"], ["layer", "op", "scope"]].reset_index(drop=True)
    return pins.assign(
        held=False,
        proved=True,
        proved_on="emulated",
        tolerance_share=1.0,
        outcome_without="fail",
        score_without=1.3,
        proof_evaluation=5,
        missed_on="photo.npz, perturbed 0.3",
    )


def _cost(pins: int) -> pd.DataFrame:
    rows = (("fp32", 0, 2.1), ("fp16", 0, 1.0), ("plan", pins, 1.1))
    return pd.DataFrame(
        [
            {
                "engine": f"tensorrt {name}",
                "outcome": "fail" if name == "fp16" else "pass",
                "pins": count,
                "latency_ms": ms,
                "engine_mb": 10.0,
                "build_s": 3.0,
            }
            for name, count, ms in rows
        ]
    )


def _inputs(names: Sequence[str]) -> pd.DataFrame:
    draw = np.random.default_rng(1)
    called = [f"page_{i:03d}.npz" for i in range(INPUTS)]
    called[: len(names)] = names
    return pd.DataFrame(
        {
            "input": called,
            "kind": ["holdout" if i % 5 == 4 else "given" for i in range(INPUTS)],
            "reduced_score_emulated": np.inf,
            "plan_score_emulated": draw.uniform(0.3, 0.8, INPUTS),
            "passed": True,
            "shapes": [json.dumps({"x": [1, 3, 32 * (1 + i % 3), 64]}) for i in range(INPUTS)],
            "sha256": "ab" * 32,
        }
    )


def _tradeoff() -> pd.DataFrame:
    rows = []
    for place, pins in enumerate(TRADEOFF):
        row: dict[str, object] = {"pins": pins, "set": "answer" if pins == 32 else "ranking"}
        for kind, tested in (("given", 24), ("holdout", 16), ("perturbed", 16), ("augmented", 8)):
            passed = tested * place // (len(TRADEOFF) - 1)
            row |= {f"{kind}_passed": passed, f"{kind}_tested": tested}
            row |= {f"{kind}_share": passed / tested, f"{kind}_lower_bound": 0.5}
        row |= {"p95_score": 2.0 / 3.0**place, "worst_score": 3.0 / 3.0**place}
        rows.append({**row, "saving_kept": 1.0 - pins / 400.0, "latency_ms": 1.0 + pins / 400.0})
    return pd.DataFrame(rows)
