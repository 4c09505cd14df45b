"""Pins in words, the regime, and the figures that a reader holds a search against."""

from __future__ import annotations

import math

import pytest

from bisect_trt.graph import list_layers
from bisect_trt.model.layers import Layer
from bisect_trt.model.patterns import Pattern, find_patterns
from bisect_trt.report.tables import in_words
from bisect_trt.search.find import (
    Regime,
    count_violations,
    information_bound,
    ranking_auc,
    regime_of,
)
from fixtures.encoders import encoder_decomposed
from tests.conftest import Finished


def test_layernorms_are_told_as_such() -> None:
    fixture = encoder_decomposed()
    layers, patterns = list_layers(fixture.model), find_patterns(fixture.model)
    assert fixture.pins is not None
    pinned = [layer.name for layer in layers if layer.name in fixture.pins]
    assert in_words(pinned, patterns, layers) == ["5 of the 5 LayerNorms: Pow, ReduceMean of each"]
    more = [
        *pinned,
        "/encoder/layers.0/mlp/MatMul",
        "/encoder/layers.0/mlp/MatMul_1",
        "/head/MatMul",
    ]
    assert in_words(more, patterns, layers)[1:] == ["encoder/layers.0: 2 MatMul", "head: MatMul"]


def test_the_largest_blocks_come_first_and_the_rest_is_counted() -> None:
    layers = [Layer(f"m{i % 9}/x/l{i}", "Add", i, (), (), frozenset()) for i in range(60)]
    soft = Layer("s", "Softmax", 60, (), (), frozenset())
    pinned = [*(layer.name for layer in layers[:45]), *(layer.name for layer in layers[45::9]), "s"]
    words = in_words(pinned, [Pattern("Softmax", ("s",), False)], [*layers, soft])
    assert words[0] == "m0/x: 7 Add" and words[-1] == "and 16 more in 4 blocks, in pins.csv"
    assert in_words(["s"], [Pattern("Softmax", ("s",), False)], [soft]) == ["Softmax"]
    others = [Pattern("Softmax", (name,), False) for name in ("s", "t")]
    assert in_words(["s"], others, [soft]) == ["1 of the 2 Softmaxes"]


def test_regimes() -> None:
    assert regime_of(3, 252) is regime_of(10, 75) is Regime.FEW_CULPRITS
    assert regime_of(91, 252) is regime_of(248, 252) is regime_of(252, 252) is Regime.DIFFUSE
    assert regime_of(2, 10) is regime_of(1, 2) is None


def test_auc_bound_and_violations() -> None:
    ranked = {f"l{i}": float(i) for i in range(10)}
    assert ranking_auc(ranked, ["l9", "l8"]) == 1.0
    assert ranking_auc(ranked, ["l0"]) == 0.0
    assert ranking_auc(dict.fromkeys(ranked, 1.0), ["l3"]) == 0.5
    assert math.isnan(ranking_auc(ranked, []))
    assert information_bound(1000, 4) == pytest.approx(math.log2(math.comb(1000, 4)))
    sets = [
        (frozenset("ab"), True),
        (frozenset("abc"), False),
        (frozenset("b"), False),
        (frozenset("abcd"), True),
    ]
    assert count_violations(sets) == 1


def test_a_run_reports_them(finished: Finished) -> None:
    result = finished(encoder_decomposed)
    search = result.as_json()["search"]
    assert (
        search["regime"] == "few culprits"
        and search["suspicion_auc"] > 0.95
        and search["violations"] == 0
    )
    assert search["blocks"] == ["5 of the 5 LayerNorms: Pow, ReduceMean of each"]
    assert search["information_bound"] == pytest.approx(information_bound(75, 10))
    report = (result.folder / "report.html").read_text()
    assert "5 of the 5 LayerNorms: Pow, ReduceMean of each" in report
