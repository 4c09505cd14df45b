"""Outputs that mix scales, slices of outputs, and what the default asks: nothing impossible."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.decisions import TIE, decision, gaps
from bisect_trt.metrics.error_sample import ErrorSample
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.metrics.requirements import ReferenceOutputs, Requirements
from bisect_trt.metrics.scales import Scale, measure_scales

Array = NDArray[np.float32]
RANDOM = np.random.default_rng(0)


def half(array: Array) -> Array:
    return array.astype(np.float16).astype(np.float32)


def asked(references: list[Array], static: list[bool]) -> Requirements:
    scales = measure_scales([{"y": a} for a in references], {"y": static})
    return replace(parse_requirements([], ["y"]), scales=scales)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    raised = np.exp(logits - logits.max())
    return raised / raised.sum()


def boxes_beside_scores(count: int = 400) -> Array:
    boxes = RANDOM.uniform(0, 1280, (1, 4, count))
    scores = 1 / (1 + np.exp(-RANDOM.normal(-2, 2, (1, 1, count))))
    return np.concatenate([boxes, scores], 1).astype(np.float32)


def test_scores_beside_pixels_are_held_to_their_own_scale() -> None:
    references = [boxes_beside_scores() for _ in range(4)]
    judge = asked(references, [True, True, True])
    scale = judge.scales["y"]
    assert scale.axis == 1 and scale.groups == ((4,), (0, 1, 2, 3))
    wrong = references[0].copy()
    wrong[:, 4] = np.clip(wrong[:, 4] + 0.5, 0, 1)
    whole = parse_requirements(["y:snr_db>=40"], ["y"])
    assert whole.score({"y": references[0]}, {"y": wrong}) < 0.2, "invisible beside 1,280 pixels"
    assert judge.score({"y": references[0]}, {"y": wrong}) > 50
    assert judge.score({"y": references[0]}, {"y": half(references[0])}) < 0.5


def scores(*shape: int) -> Array:
    return (1 / (1 + np.exp(-RANDOM.normal(-1, 2, shape)))).astype(np.float32)


@pytest.mark.parametrize(
    "others",
    [
        lambda n: RANDOM.uniform(0, 96, (1, n, 4)),  # boxes of a small image: less than hundredfold
        lambda n: RANDOM.uniform(0, 640, (1, n, 4)) * ([1, 1, 1, 0.1] if n < 16 else 1),
        # Corners and a class's number, which bridges the gap.
        lambda n: np.concatenate(
            [RANDOM.uniform(0, 640, (1, n, 4)), RANDOM.integers(0, 80, (1, n, 1))], 2
        ),
        # Pixels and metres.
        lambda n: np.concatenate(
            [RANDOM.uniform(0, 640, (1, n, 2)), RANDOM.uniform(5, 40, (1, n, 2))], 2
        ),
    ],
)
@pytest.mark.parametrize("count", [1, 10, 100])
def test_probabilities_are_a_scale_of_their_own(others: object, count: int) -> None:
    """However few values there are, and whatever lies between them and the largest."""
    references = [
        np.concatenate([others(count), scores(1, count, 1)], 2).astype(np.float32)  # type: ignore[operator]
        for _ in range(12)
    ]
    judge = asked(references, [True, True, True])
    entries = references[0].shape[2]
    assert judge.scales["y"].groups[0] == (entries - 1,)
    for reference in references:
        wrong = reference.copy()
        wrong[..., -1] += 0.4
        assert judge.score({"y": reference}, {"y": wrong}) > 20
        assert judge.score({"y": reference}, {"y": half(reference)}) < 0.5


def test_one_small_number_is_no_probability() -> None:
    """Of a single input a logit may lie in 0 to 1 by chance."""
    logits = [np.float32([[0.05, 3.0, -4.0, 2.5, -1.5, 5.0]])] * 2
    assert asked(logits, [True, True]).scales["y"].axis is None


def test_features_are_no_probabilities() -> None:
    """Of ReLU some units are dead, or nearly so."""
    features = [np.maximum(RANDOM.normal(0.3, 1, (1, 64)), 0).astype(np.float32) for _ in range(8)]
    for array in features:
        array[:, :2] = [0.0, 1e-4]
    assert asked(features, [True, True]).scales["y"].axis is None


def test_the_score_is_the_worst_group_s_noise_over_one_percent() -> None:
    reference = np.concatenate([np.full((1, 1, 64), 1000.0), np.full((1, 1, 64), 0.5)], 1)
    judge = asked([reference.astype(np.float32)], [True, True, True])
    off = reference.copy()
    off[:, 1] += 0.01
    score = judge.score({"y": reference.astype(np.float32)}, {"y": off.astype(np.float32)})
    assert score == pytest.approx(0.01 / (0.5 * 1e-2), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "static"),
    [
        # A thousand classes of which most never occur.
        (lambda: softmax(RANDOM.normal(0, 4, (1, 1000))), [True, True]),
        # Eighty class columns, some of them with probabilities of 1e-8, beside boxes in pixels.
        (
            lambda: np.concatenate(
                [
                    RANDOM.uniform(0, 640, (1, 4, 200)),
                    np.exp(-RANDOM.uniform(0, 18, (1, 80, 1)) - RANDOM.uniform(0, 2, (1, 80, 200))),
                ],
                1,
            ),
            [True, True, True],
        ),
        # A batch of quiet and loud items, and a dynamic number of detections.
        (lambda: RANDOM.normal(size=(2, 64)) * np.array([[1e-4], [1e3]]), [True, True]),
        (lambda: RANDOM.normal(size=(1, 20, 64)) * np.logspace(-4, 4, 20)[:, None], [1, 0, 0]),
    ],
)
def test_nothing_impossible_is_asked(make: object, static: list[bool]) -> None:
    """Rounding the outputs alone to FP16 meets the default."""
    references = [make().astype(np.float32) for _ in range(3)]  # type: ignore[operator]
    judge = asked(references, [bool(s) for s in static])
    for reference in references:
        assert judge.score({"y": reference}, {"y": half(reference)}) <= 1.0


def test_a_blank_page_and_silence_ask_for_no_less_than_a_thousandth() -> None:
    loud = RANDOM.normal(size=(1, 4096)).astype(np.float32)
    for quiet in (np.zeros_like(loud), loud * np.float32(1e-7)):
        judge = asked([loud, quiet], [True, True])
        noise = np.full_like(loud, 1e-6)
        assert judge.score({"y": quiet}, {"y": quiet + noise}) <= 1.0
        assert asked([quiet], [True, True]).score({"y": quiet}, {"y": quiet + noise}) > 1.0


def test_columns_that_are_zero_belong_to_the_smallest_group() -> None:
    reference = boxes_beside_scores()
    reference = np.concatenate([reference, np.zeros_like(reference[:, :1])], 1)
    judge = asked([reference], [True, True, True])
    assert judge.scales["y"].groups == ((4, 5), (0, 1, 2, 3))


def test_a_scale_is_read_as_it_was_written() -> None:
    scale = Scale(1, ((4,), (0, 1, 2, 3)), (0.5, 700.0))
    assert Scale.from_json(scale.as_json()) == scale
    with pytest.raises(ValueError):
        Scale.from_json({"axis": 1, "groups": [[0]], "rms": []})


@given(st.integers(1, 40), st.floats(1e-6, 1e6), st.integers(0, 2**31))
def test_one_group_is_the_plain_ratio(count: int, size: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    reference = (random.normal(size=(1, count)) * size).astype(np.float32)
    candidate = (reference * np.float32(1.001)).astype(np.float32)
    judge = asked([reference], [True, True])
    told = judge.judge({"y": reference}, {"y": candidate}).values[0]
    plain = tensor_error(reference, candidate).snr_db
    assert told == plain or math.isclose(told, plain, rel_tol=1e-6)


def test_the_elements_of_a_search_are_in_their_group_s_tolerance() -> None:
    reference = boxes_beside_scores()
    judge = asked([reference], [True, True, True])
    off = reference + np.float32(0.01)
    sample = ErrorSample(judge, {"y": reference}, {"y": off}, 64)
    errors = sample.errors({"y": off})
    small, large = judge.scales["y"].rms
    assert errors.max() == pytest.approx(0.01 / (small * 1e-2), rel=1e-3)
    assert errors.min() == pytest.approx(0.01 / (large * 1e-2), rel=0.1)


def test_a_slice_is_judged_alone() -> None:
    reference = boxes_beside_scores()
    off = reference.copy()
    off[:, 4] += 0.1
    outputs = {"y": reference}, {"y": off}
    for text, score in (
        ("y[:,4:]:max_abs<=0.05", 2.0),
        ("y[:,4]:max_abs<=0.05", 2.0),
        ("y[:,-1]:max_abs<=0.05", 2.0),
        ("y[:,:4]:max_abs<=0.05", 0.0),
        ("y[0,4,:10]:max_abs<=0.05", 2.0),
    ):
        assert parse_requirements([text], ["y"]).score(*outputs) == pytest.approx(score, rel=1e-4)
    for text in ("y[a]:max_abs<=1", "y[::0]:max_abs<=1", "z[:,1]:max_abs<=1"):
        with pytest.raises(BadInputError, match="--requirement"):
            parse_requirements([text], ["y"])
    named = parse_requirements(["y[0]:max_abs<=1"], ["y[0]"])
    assert named.items[0].output == "y[0]" and not named.items[0].part


def test_integers_are_equal_but_for_ties() -> None:
    judge = parse_requirements([], ["y", "n"], whole=["n"])
    right = {"y": np.ones((1, 4), np.float32), "n": np.array([3, 5, 7])}
    one_off = {**right, "n": np.array([3, 5, 8])}
    assert judge.score(right, right) == 0.0 and judge.score(right, one_off) > 1.0
    tied = ReferenceOutputs(right, {"n": np.float32([1.0, 1.0, TIE / 2])})
    assert judge.score(tied, one_off) == 0.0
    assert judge.score(tied, {**right, "n": np.array([3, 6, 7])}) > 1.0


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 2**31))
def test_gaps_are_between_the_two_best(width: int, rows: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    ordered = np.sort(values, axis=1)
    rms = np.sqrt(np.mean(values.astype(np.float64) ** 2))
    np.testing.assert_allclose(gaps(values, 1), (ordered[:, -1] - ordered[:, -2]) / rms, rtol=1e-5)
    small = gaps(values, 1, smallest=True)
    np.testing.assert_allclose(small, (ordered[:, 1] - ordered[:, 0]) / rms, rtol=1e-5)
    assert np.isinf(gaps(values[:, :1], 1)).all()


def test_equal_is_the_share_that_is_the_same() -> None:
    assert decision("equal", np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.75
    assert decision("equal", np.array([True, False]), np.array([True, True])) == 0.5


def test_the_cosine_of_one_value_is_not_asked_beside_others() -> None:
    judge = parse_requirements(["cosine>=0.999"], ["y", "s"])
    right = {"y": np.float32([[1, 2, 3]]), "s": np.float32([1e-6])}
    assert judge.score(right, {**right, "s": np.float32([-1e-6])}) == 0.0
    assert judge.score({"s": right["s"]}, {"s": np.float32([-1e-6])}) > 1.0
