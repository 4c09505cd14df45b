"""Decisions and aggregates, against what they are by definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.decisions import decision, is_decision, places_of
from bisect_trt.metrics.parser import load_metrics, parse_requirements
from bisect_trt.metrics.requirements import aggregate, brief, is_aggregate, times


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_top_k_is_the_rank_of_the_references_best(seed: int, k: int) -> None:
    random = np.random.default_rng(seed)
    # Few values, so that there are ties.
    reference, candidate = random.integers(0, 4, (2, 5, 6)).astype(np.float32)
    hits = []
    for ref, got in zip(reference, candidate, strict=True):
        ordered = sorted(range(6), key=lambda i: (-got[i], i))
        hits.append(int(np.argmax(ref)) in ordered[:k])
    assert decision(f"top{k}", reference, candidate) == pytest.approx(np.mean(hits))
    assert decision(f"top{k}", reference, reference) == 1.0


def test_how_many_places_a_metric_asks_for() -> None:
    assert [places_of(m) for m in ("top1", "top12", "argmax", "mask_iou")] == [1, 12, 1, 0]


def test_argmax_is_over_channels() -> None:
    reference = np.zeros((1, 3, 2, 2), np.float32)
    reference[0, 1] = 1.0
    candidate = reference.copy()
    candidate[0, 2, 0, 0] = 2.0
    assert decision("argmax", reference, candidate) == 0.75
    rows = np.float32([[0, 1], [1, 0]])
    assert decision("argmax", rows, np.float32([[0, 1], [0, 1]])) == 0.5


def test_class_ids_are_decisions_already() -> None:
    """An argmax in the graph: along a row of ids the largest one tells nothing."""
    ids = np.int64([[[7, 1, 2, 1], [3, 9, 0, 1]]])
    other = np.int64([[[7, 2, 0, 0], [0, 9, 1, 1]]])
    for metric in ("argmax", "top1", "top5"):
        assert decision(metric, ids, other) == 3 / 8
        assert decision(metric, ids > 1, other > 1) == 5 / 8


def test_what_overshoots_a_sigmoid_is_no_logit() -> None:
    chances, moved = np.float32([-0.1, 0.6, 1.1, 0.1]), np.float32([-0.1, 0.4, 1.1, 0.1])
    assert decision("mask_iou", chances, moved) == 0.5
    logits = np.float32([-0.2, 0.1, 0.4])
    assert decision("mask_iou", logits, -logits) == 0.0


def test_a_quantised_classifier_s_scores_are_scores() -> None:
    assert decision("top1", np.uint8([[1, 2, 3]]), np.uint8([[1, 2, 4]])) == 1.0


def test_masks_are_cut_at_a_half_or_at_nought() -> None:
    chances, moved = np.float32([0.4, 0.6, 0.9, 0.1]), np.float32([0.6, 0.7, 0.2, 0.1])
    assert decision("mask_iou", chances, moved) == pytest.approx(1 / 3)
    logits, other = np.float32([-3, 0.2, 4, -1]), np.float32([-3, -0.2, 4, -1])
    assert decision("mask_iou", logits, other) == 0.5
    assert decision("mask_iou", np.zeros(4, np.float32), np.zeros(4, np.float32)) == 1.0


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=30), st.integers(1, 99))
def test_a_percentile_is_what_so_many_keep_to(values: list[float], percent: int) -> None:
    bound = aggregate(f"p{percent}", values, at_least=False)
    assert np.mean(np.asarray(values) <= bound) >= percent / 100.0 - 1e-9
    below = [v for v in values if v < bound]
    assert len(below) / len(values) < percent / 100.0
    mirrored = aggregate(f"p{percent}", [-v for v in values], at_least=True)
    assert mirrored == -bound


def test_what_could_not_be_told_is_worse_than_any_number() -> None:
    for better in (True, False):
        assert math.isnan(aggregate("mean", [1.0, math.nan], at_least=better))
        assert math.isnan(aggregate("p95", [1.0, 2.0, math.nan], at_least=better))
    assert aggregate("median", [1.0, 2.0, math.nan], at_least=False) == 2.0
    assert aggregate("median", [1.0, 2.0, math.nan], at_least=True) == 1.0
    assert [is_aggregate(t) for t in ("worst", "p95", "p99.9", "p100", "p0", "p101", "best")] == [
        True,
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert [is_decision(t) for t in ("top1", "top10", "top0", "argmax", "iou")] == [
        True,
        True,
        False,
        True,
        False,
    ]


def test_several_inputs_are_judged_by_their_aggregate() -> None:
    requirements = parse_requirements(["max_abs@mean<=1", "y:cosine@median>=0.9"], ["y"])
    assert requirements.of_sets
    values = [(0.5, 0.99), (1.9, 0.5), (0.4, 0.95)]
    assert requirements.together(values) == pytest.approx((0.5 + 1.9 + 0.4) / 3)
    assert requirements.together([(2.0, 1.0)]) == 2.0
    each = parse_requirements(["max_abs<=1"], ["y"])
    assert not each.of_sets
    assert each.together([(0.5,), (1.9,), (0.4,)]) == 1.9
    assert each.together([(0.5,), (1.9,), (0.4,)], share=0.6) == 0.5


def test_a_tolerance_may_have_an_aggregate_too() -> None:
    item = parse_requirements(["y:rtol=1e-2,atol=1e-3@p95"], ["y"]).items[0]
    assert (item.limit, item.relative, item.output, item.aggregate) == (1e-3, 1e-2, "y", "p95")
    item = parse_requirements(["a:0:top1@mean>=0.99"], ["a:0"]).items[0]
    assert (item.output, item.metric, item.aggregate, item.at_least) == (
        "a:0",
        "top1",
        "mean",
        True,
    )
    assert item.score_of(0.98) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_abs@best<=1", "unknown aggregate"),
        ("max_abs@p0<=1", "unknown aggregate"),
        ("max_abs@all<=1", "is marked where it is named, --metric MODULE:FUNCTION@all"),
        ("top1<=0.9", "bounded with >="),
        ("mask_iou>=0", "every plan meets it, mask_iou is 0 or more"),
        ("cosine>=-1", "every plan meets it, cosine is -1 or more"),
        ("top1>=1.5", "at most 1"),
        ("top0>=0.5", "unknown metric"),
        ("atol=1,atol=2", "twice"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        parse_requirements([text], ["y"])


def test_metrics_of_all_inputs_are_told_apart(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_f1.py").write_text(  # type: ignore[operator]
        "def worst(r, c): return 0.0\ndef f1(r, c): return len(r) / 10\n"
    )
    monkeypatch.chdir(tmp_path)  # type: ignore[arg-type]
    single, collective = load_metrics(["my_f1:worst", "my_f1.py:f1@all"])
    assert list(single) == ["worst"] and list(collective) == ["f1"]
    requirements = parse_requirements(["worst<=1", "f1>=0.9"], ["y"], single, collective)
    one = {"y": np.float32([1.0])}
    assert requirements.judge(one, one).score == 0.0
    told = requirements.judge_all([one, one], [one, one])
    assert told == [0.2]
    assert requirements.together([(0.0, math.nan)] * 2, collective=told) == pytest.approx(
        1.0 + 0.7 / 0.9
    )
    with pytest.raises(BadInputError, match="sees all inputs"):
        parse_requirements(["worst<=1", "f1@mean>=0.9"], ["y"], single, collective)


def test_a_metric_of_the_users_may_have_a_known_name() -> None:
    """In per cent, for example: the scale of our own does not apply."""
    requirements = parse_requirements(["top1>=76"], ["y"], {"top1": lambda r, c: 40.0})
    one = {"y": np.float32([1.0])}
    assert requirements.judge(one, one).score == pytest.approx(1 + (76 - 40) / 76)


def test_an_exact_input_does_not_hide_the_others() -> None:
    assert aggregate("mean", [math.inf, 5.0, 5.0, 5.0], at_least=True) == pytest.approx(53.75)
    assert aggregate("median", [math.inf, -50.0], at_least=True) == pytest.approx(75.0)
    assert math.isnan(aggregate("median", [math.inf, math.nan], at_least=True))
    assert aggregate("median", [-math.inf, math.inf], at_least=False) == math.inf
    assert aggregate("mean", [math.inf], at_least=True) == 200.0
    assert math.isnan(aggregate("mean", [math.inf, math.nan], at_least=True))


MINE = {"mine": lambda reference, candidate: 0.0}


def test_a_mean_over_what_could_not_be_told_is_no_number_of_tolerances() -> None:
    for text in ("max_abs@mean<=1e-2", "cosine@p95>=0.9", "snr_db@mean>=40"):
        requirements = parse_requirements([text], ["y"])
        score = requirements.together([(0.5,), (math.nan,)])
        assert math.isinf(score) and times(score).startswith("NaN or infinite")
        assert requirements.by_condition([(0.5,), (math.nan,)]) == (score,)


def test_what_is_beyond_the_scale_is_told_so() -> None:
    requirements = parse_requirements(["max_abs<=1e-9"], ["y"])
    score = requirements.score({"y": np.zeros(2, np.float32)}, {"y": np.full(2, 66, np.float32)})
    assert times(score) == "more than 9.99e+08 times the tolerance"
    assert brief(score) == "> 9.99e+08 \u00d7"


def test_outputs_that_are_finite_keep_their_scores_beside_one_that_is_not() -> None:
    """And none passes for it: infinities nobody asks about count too."""
    fine, broken = np.float32([1.0, 2.0]), np.float32([1.0, np.inf])
    reference = {"a": fine, "b": fine}
    candidate = {"a": np.float32([1.5, 2.0]), "b": broken}
    both = parse_requirements(["a:max_abs<=1", "b:max_abs<=1", "mine<=1"], ["a", "b"], MINE)
    judged = both.judge(reference, candidate)
    assert math.isinf(judged.score) and judged.values[0] == 0.5
    assert all(map(math.isnan, judged.values[1:]))
    assert both.by_condition([judged.values])[0] == 0.5
    assert math.isinf(both.together([judged.values]))
    spared = parse_requirements(["a:max_abs@p50<=1", "b:max_abs<=1"], ["a", "b", "c"])
    right, whole = dict.fromkeys("abc", fine), dict.fromkeys("ac", broken)
    for found in ({**right, "c": broken}, {**right, **whole}):  # c, of which nobody asks
        values = [spared.judge(right, one).values for one in (right, right, found)]
        assert math.isinf(spared.together(values))
    for texts in (["a:max_abs<=1"], ["a:max_abs@mean<=1", "a:cosine>=0"]):
        asked = parse_requirements(texts, ["a", "b"])
        judged = asked.judge(reference, candidate)
        assert math.isinf(judged.score) and math.isinf(asked.together([judged.values]))


def test_a_miss_where_none_is_allowed_is_no_number_of_tolerances() -> None:
    requirements = parse_requirements(["top1>=1"], ["y"], {})
    one, other = {"y": np.float32([[1.0, 0.0]])}, {"y": np.float32([[0.0, 1.0]])}
    assert times(requirements.score(one, other)) == "a miss where none is allowed"
    for finite in ("max_abs<=1e-30", "snr_db>=400"):
        asked = parse_requirements([finite], ["y"], {})
        assert times(asked.score(one, other)).endswith("times the tolerance")
