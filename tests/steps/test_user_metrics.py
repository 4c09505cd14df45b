"""Metrics of the user's: one that breaks its contract is named as the fault, none can harm what it
is shown, and an answer is recalled only where nothing that it depends on has changed.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import ValidationVerdict
from bisect_trt.report.record import read_run
from fixtures.models import healthy, residual
from tests.command import call, saved
from tests.copies import FEW

BROKEN = {
    "writes": ("def m(a, b):\n    b['y'] -= a['y']\n    return 0.0", "writes into the arrays"),
    "sorts in place": ("def m(a, b):\n    a['y'].sort()\n    return 0.0", "writes into the arrays"),
    "writes behind numpy's back": (
        "import ctypes\ndef m(a, b):\n    ctypes.memset(a['y'].ctypes.data, 0, 8)\n    return 0.0",
        "writes into the arrays",
    ),
    "NaN": ("def m(a, b): return float('nan')", "it gave NaN"),
    "raises": ("def m(a, b): raise KeyError('boom')", "KeyError"),
    "raises outside": ("raise OSError('no labels')", "no labels"),
    "exits": ("import sys\ndef m(a, b): sys.exit(3)", "called exit(3)"),
    "exits when imported": ("raise SystemExit", "called exit"),
    "no number": ("def m(a, b): return '0.5'", "it gave str; let it give a number"),
    "an array": ("def m(a, b): return a['y']", "TypeError"),
    "nothing": ("def m(a, b): return None", "it gave NoneType"),
    "random": ("import random\ndef m(a, b): return random.random()", "not deterministic"),
    "counts its calls": (
        "n = []\ndef m(a, b):\n    n.append(1)\n    return len(n)",
        "deterministic",
    ),
    "refuses the reference": ("def m(a, b): return 7.0", "for the reference beside itself"),
}


def desk(folder: Path, metric: str) -> list[str]:
    """A model, an input and a metric in ``folder``, and the command's arguments."""
    (folder / "own_metric.py").write_text(metric)
    own = ["--metric", str(folder / "own_metric.py:m"), "--requirement", "m<=0.5"]
    return [*saved(healthy(), folder), "--out", str(folder / "run"), "--robust", "0", *own]


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("of_all", [False, True])
def test_the_metric_is_named_as_the_fault(fault: str, of_all: bool, tmp_path: Path) -> None:
    code, words = BROKEN[fault]
    if of_all:
        code = code.replace("a['y']", "a[0]['y']").replace("b['y']", "b[0]['y']")
    arguments = desk(tmp_path, code)
    if of_all:
        arguments[arguments.index("--metric") + 1] += "@all"
    result = call("run", *arguments, limits=FEW)
    assert result.exit_code == 2, result.output
    complaint = result.output.strip().splitlines()
    assert len(complaint) == 1 and "--metric" in complaint[0] and words in complaint[0]
    assert not (tmp_path / "run" / "run.json").exists()


def test_what_a_metric_prints_does_not_spoil_the_answer(tmp_path: Path) -> None:
    noisy = "print('hello from the import')\ndef m(a, b):\n    print('scoring')\n    return 0.0"
    result = call("run", *desk(tmp_path, noisy), "--json", limits=FEW)
    assert result.exit_code == 0 and json.loads(result.stdout)["passed"]
    assert "hello from the import" in result.stderr and "scoring" in result.stderr


def run(folder: Path) -> Any:
    for name in ("own_helper", "own_constants"):
        sys.modules.pop(name, None)
    fixture = healthy()
    metric = str(folder / "own_metric.py:m")
    require, out = "m<=0.5", folder / "run"
    return bisect_trt.bisect(
        fixture.model, fixture.inputs, metric=metric, require=require, out=out, robust=0
    )


CHANGES: dict[str, Callable[[Path], object]] = {
    "the metric": lambda f: rewrite(f / "own_metric.py", "* LIMIT", "* LIMIT * 0.5"),
    "a constant beside it": lambda f: rewrite(f / "own_metric.py", "SCALE = 1", "SCALE = 2"),
    "a helper": lambda f: rewrite(f / "own_helper.py", "max()", "mean()"),
    "a constant of the helper's helper": lambda f: rewrite(f / "own_constants.py", "1.0", "1.5"),
}


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_is_recalled_only_where_nothing_changed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_constants.py").write_text("LIMIT = 1.0\n")
    (tmp_path / "own_helper.py").write_text(
        "def worst(a, b):\n"
        "    from own_constants import LIMIT\n"
        "    return abs(a - b).max() * LIMIT\n"
    )
    (tmp_path / "own_metric.py").write_text(
        "from own_helper import worst\n"
        "LIMIT = SCALE = 1\n"
        "def m(a, b):\n"
        "    return float(worst(a['y'], b['y'])) * SCALE * LIMIT\n"
    )
    first = run(tmp_path)
    assert first.new_evaluations > 0 and run(tmp_path).new_evaluations == 0
    CHANGES[change](tmp_path)
    assert run(tmp_path).new_evaluations == first.new_evaluations, "asked again"
    assert run(tmp_path).new_evaluations == 0, "and known from then on"


def test_a_fresh_run_asks_again(tmp_path: Path) -> None:
    fixture = healthy()
    options: dict[str, Any] = {"out": tmp_path, "robust": 0}
    for fresh, asks in ((False, True), (False, False), (True, True)):
        found = bisect_trt.bisect(fixture.model, fixture.inputs, fresh=fresh, **options, limits=FEW)
        assert (found.new_evaluations > 0) == asks and "--fresh" not in found.command


def test_functions_of_a_notebook(tmp_path: Path) -> None:
    fixture = healthy()
    seen = []

    def spread(scale: float, reference: Any, candidate: Any) -> float:
        seen.append(type(reference))
        return float(np.abs(reference["y"] - candidate["y"]).max()) * scale

    for metric in (functools.partial(spread, 1.0), functools.partial(spread, 2.0)):
        result = bisect_trt.bisect(
            fixture.model,
            fixture.inputs,
            metric=[metric],
            require="spread<=0.5",
            out=tmp_path / "run",
            robust=0,
        )
        assert result.passed and result.new_evaluations > 0, "another argument is another metric"
    assert seen and (tmp_path / "run" / "run.json").exists()
    with pytest.raises(BadInputError, match="two metrics have this name"):
        bisect_trt.bisect(
            fixture.model, fixture.inputs, metric=[metric, metric], require="spread<=1"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("require", "metric"), [("near>=0.95", "near"), ("same>=1", "same")])
def test_a_metric_that_is_best_near_its_limit_pins_no_more_than_the_error_it_is_made_of(
    tmp_path: Path, require: str, metric: str
) -> None:
    """An IoU of 1 uses 0.95 of a tolerance that asks for 0.95, a text that is the same all of one:
    margins below that pinned every layer.
    """
    fixture = residual()
    limit = float(fixture.require.removeprefix("rel_range<="))

    def near(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> float:
        moved = [np.abs(candidate[n] - a).max() / np.ptp(a) for n, a in reference.items()]
        return 1.0 - 0.05 * float(max(moved)) / limit

    def same(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> float:
        return float(near(reference, candidate) >= 0.95)

    def search(
        out: str, require: str, *metrics: Callable[..., float], of: Any = None
    ) -> bisect_trt.Result:
        given: dict[str, Any] = {"require": require, "metric": metrics, "runner": "emulated"}
        return bisect_trt.bisect(fixture.model, of or inputs, out=tmp_path / out, **given)

    shares = (1.0, 0.9, 0.95, 1.05, 1.1, 0.85, 1.15, 0.8)
    inputs = [{n: np.float32(a * by) for n, a in fixture.inputs.items()} for by in shares]
    plain = search("plain", fixture.require)
    own = search("own", require, near if metric == "near" else same)
    assert own.passed and own.validation is not None
    assert (
        own.validation.perturbed.lower_bound >= 0.95
        and own.validation.augmented.lower_bound >= 0.95
    )
    # The same or not: nothing says how near another input is to being read otherwise.
    # Scaled copies of one input are alike, and no word on others either way.
    assert own.validation.word is ValidationVerdict.INCONCLUSIVE and own.validation.alike
    assert (
        own.validation.prediction_limit <= 1.0
        if metric == "near"
        else own.validation.prediction_limit == math.inf
    )
    # The room for others begins where nothing is wrong.
    alone = search(f"own-{metric}", require, near if metric == "near" else same, of=inputs[:1])
    assert alone.validation is not None and alone.validation.prediction_limit > 0.95
    read = read_run(tmp_path / f"own-{metric}").validation
    assert (read.prediction_limit, read.word) == (
        alone.validation.prediction_limit,
        alone.validation.word,
    )
    assert 0 < len(own.pinned) <= 1.2 * len(plain.pinned) < plain.layer_count / 1.5
