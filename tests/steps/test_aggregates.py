"""Requirements on several inputs together, and points of the trade-off curve, through the real
search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import bisect_trt
from bisect_trt import Result
from bisect_trt.base.sample import evenly
from bisect_trt.model.graph import Graph
from bisect_trt.steps import tradeoff
from fixtures.models import healthy, residual
from tests.conftest import forbid_inferences
from tests.copies import FEW

FIXTURE = residual()


def inputs(count: int) -> list[dict[str, np.ndarray]]:
    """Inputs of one kind: the fixture's, rolled along its longest axis."""
    name, array = next(iter(FIXTURE.inputs.items()))
    axis = int(np.argmax(array.shape))
    return [{name: np.roll(array, i, axis)} for i in range(count)]


def run(out: Path, count: int, **options: Any) -> Result:
    its = {"require": FIXTURE.require, "runner": "emulated", "out": out, "limits": FEW}
    return bisect_trt.bisect(FIXTURE.model, inputs(count), **{**its, **options})


@pytest.mark.slow
def test_a_mean_asks_for_no_more_than_the_worst(tmp_path: Path) -> None:
    metric, _, limit = FIXTURE.require.partition("<=")
    each = run(tmp_path / "each", 4)
    mean = run(tmp_path / "mean", 4, require=f"{metric}@mean<={limit}")
    assert each.passed and mean.passed and len(mean.pinned) <= len(each.pinned)
    assert mean.validation is not None and mean.validation.set_size == 4
    assert mean.validation.given.tested == 1 and mean.validation.perturbed.tested >= 59
    scores = mean.inputs["plan_score_emulated"].astype(float)
    assert len(scores) == 4 and scores.mean() <= 1.0
    assert "passed" not in mean.inputs, "none of them has to by itself"
    said = (tmp_path / "mean" / "report.md").read_text()
    assert "1 of 1 sets of 4 inputs" in said


def test_a_metric_of_all_inputs_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_all.py").write_text(
        "import numpy as np\n"
        "def farthest(references, candidates):\n"
        "    assert len(references) == len(candidates) == 3\n"
        "    return max(float(np.abs(r[n] - c[n]).max())\n"
        "               for r, c in zip(references, candidates) for n in r)\n"
    )
    monkeypatch.chdir(tmp_path)
    limit = FIXTURE.require.partition("<=")[2]
    options = {"require": f"farthest<={limit}", "metric": "my_all:farthest@all"}
    result = run(tmp_path / "out", 3, **options)
    assert result.passed and result.pinned and result.score <= 1.0
    assert result.validation is not None and result.validation.prediction_limit == np.inf
    assert result.validation.word is not None and result.validation.word.value != "validated"
    # Of one input it says nothing.
    assert result.inputs["plan_score_emulated"].isna().all() and "passed" not in result.inputs
    # The cache knows what was told of all inputs together.
    forbid_inferences(monkeypatch)
    again = run(tmp_path / "out", 3, **options)
    assert again.pinned == result.pinned and again.validation == result.validation


@pytest.mark.slow
@pytest.mark.parametrize("robust", [0.0, None])
def test_a_share_of_the_inputs_decides_where_that_was_asked_for(
    tmp_path: Path, robust: float | None
) -> None:
    """One of five inputs is thirty times as large, and misses what the others meet: its copies
    would too, so that no more of unseen inputs are asked to hold than of the given ones.
    """
    given = inputs(5)
    name = next(iter(given[0]))
    given[4] = {name: given[4][name] * 30.0}
    options = {"runner": "emulated", "require": FIXTURE.require, "robust": robust}
    options["weights"] = "nearest"
    strict = bisect_trt.bisect(FIXTURE.model, given, out=tmp_path / "a", **options)
    loose = bisect_trt.bisect(FIXTURE.model, given, out=tmp_path / "b", allow_misses=0.2, **options)
    assert loose.passed and 1.5 * len(loose.pinned) < len(strict.pinned)
    assert loose.validation is not None and loose.validation.wanted == 0.8
    table = pd.read_csv(tmp_path / "b" / "inputs.csv")
    assert loose.validation.given.passed == sum(table["passed"])
    if robust == 0.0:
        assert list(table["passed"]) == [True, True, True, True, False]
    else:
        # Five inputs bound no share of 0.8 by themselves: how far their copies reach decides.
        near = loose.validation.prediction_limit <= 1.0
        assert loose.validation.word is not None and loose.validation.is_bounded
        assert loose.validation.word.value == ("validated" if near else "inconclusive")


def test_the_frontier_shows_what_each_number_of_pins_holds_on(tmp_path: Path) -> None:
    result = run(tmp_path, 4)
    table = pd.read_csv(tmp_path / "tradeoff.csv")
    assert list(table["pins"]) == sorted(table["pins"]) and table["pins"].iloc[0] == 0
    assert table["pins"].iloc[-1] == result.layer_count
    steps = {n for n in tradeoff.STEPS if n < result.layer_count}
    assert steps < set(table["pins"]), "and half way from the answer to the steps beside it"
    for _, row in table.iterrows():
        missed = row["given_tested"] - row["given_passed"]
        named = [] if pd.isna(row["given_missed"]) else row["given_missed"].split(", ")
        assert len(named) == min(missed, 4) and all("more" not in n for n in named[:3])
    assert table["given_missed"].notna().any() and table["given_missed"].isna().any()
    answer = table[table["set"] == "answer"].iloc[0]
    assert answer["pins"] == len(result.pinned) and answer["given_share"] == 1.0
    assert result.validation is not None
    for kind in ("perturbed", "augmented"):  # as its test counted them
        holding = getattr(result.validation, kind)
        assert (answer[f"{kind}_passed"], answer[f"{kind}_tested"]) == (
            holding.passed,
            holding.tested,
        )
    everything = table.iloc[-1]
    assert everything["perturbed_share"] == 1.0 and everything["worst_score"] < 0.1
    assert table["perturbed_share"].iloc[0] < 1.0
    assert (table["perturbed_lower_bound"] <= table["perturbed_share"]).all()
    layers = pd.read_csv(tmp_path / "layers.csv")
    assert sorted(layers["rank"]) == list(range(1, result.layer_count + 1))
    page = (tmp_path / "report.html").read_text()
    assert 'id="layers-plot"' in page and "Inputs that pass, by layers in FP32" in page


def test_held_layers_are_no_steps_of_the_frontier(tmp_path: Path) -> None:
    held = tuple(layer.name for layer in Graph(FIXTURE.model).layers[:40])
    result = run(tmp_path, 4, keep_fp32=held)
    pins = list(result.tradeoff["pins"])
    assert min(pins) == 40 and max(pins) == result.layer_count
    assert len(set(pins)) == len(pins), "each set once"


def test_the_frontier_is_judged_on_the_inputs_that_decide(tmp_path: Path) -> None:
    """Of thirty inputs 24 are spread over their order; the worst one need not be among them."""
    given = [{n: a * np.float32(0.05) for n, a in of.items()} for of in inputs(30)]
    left_out = min(set(range(30)) - set(evenly(range(30), 24)))
    given[left_out] = inputs(30)[left_out]
    result = bisect_trt.bisect(
        FIXTURE.model,
        given,
        require="max_abs<=5e-3",
        runner="emulated",
        holdout="none",
        out=tmp_path,
        limits=FEW,
    )
    first = result.tradeoff.iloc[0]
    assert first["pins"] == 0 and first["given_tested"] == 25
    assert first["given_missed"] == result.samples[left_out]


def test_a_variant_may_be_a_function_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "double.py").write_text(
        "import numpy as np\n"
        "def louder(arrays, random):\n"
        "    return {n: (a * (1 + random.random())).astype(a.dtype) for n, a in arrays.items()}\n"
    )
    result = run(tmp_path / "out", 1, augmented="double:louder")
    assert (
        result.validation is not None
        and result.validation.augmented.tested == result.validation.perturbed.tested
    )


def test_a_metric_of_all_inputs_never_sees_what_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything in FP16 overflows; two conditions are on one metric."""
    (tmp_path / "my_strict.py").write_text(
        "import numpy as np\n"
        "def farthest(references, candidates):\n"
        "    assert all(np.isfinite(c[n]).all() for c in candidates for n in c)\n"
        "    return max(float(np.abs(r[n] - c[n]).max())\n"
        "               for r, c in zip(references, candidates) for n in r)\n"
    )
    monkeypatch.chdir(tmp_path)
    fixture = healthy()
    given = [{n: a * np.float32(scale) for n, a in fixture.inputs.items()} for scale in (1e6, 9e5)]
    options = {
        "runner": "emulated",
        "require": ("farthest<=1e3", "farthest<=2e3"),
        "metric": "my_strict:farthest@all",
        "out": tmp_path / "out",
    }
    result = bisect_trt.bisect(fixture.model, given, **options, limits=FEW)
    assert result.passed and result.base_score == np.inf and result.pinned
    forbid_inferences(monkeypatch)
    again = bisect_trt.bisect(fixture.model, given, **options, limits=FEW)
    assert again.pinned == result.pinned and again.new_evaluations == 0
