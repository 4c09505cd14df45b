"""Metrics against NumPy, requirements as users write them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.errors import mean_of, tensor_error, worst_of
from bisect_trt.metrics.parser import load_metrics, parse_requirements

ARRAYS = hnp.arrays(np.float32, (3, 5), elements=st.floats(-1e3, 1e3, width=32))


@given(ARRAYS, ARRAYS)
def test_metrics_are_numpys(reference: np.ndarray, candidate: np.ndarray) -> None:
    got = tensor_error(reference, candidate)
    ref, error = reference.astype(np.float64), np.abs(candidate.astype(np.float64) - reference)
    assert got.max_abs == error.max() and got.mean_abs == pytest.approx(error.mean())
    assert got.median_abs == pytest.approx(np.median(error)) and got.rmse == pytest.approx(
        np.sqrt((error**2).mean())
    )
    assert (got.ref_min, got.ref_max, got.finite) == (ref.min(), ref.max(), True)
    if np.ptp(ref) > 0:
        assert got.rel_range == pytest.approx(error.max() / np.ptp(ref))
    if error.any() and ref.any():
        assert got.snr_db == pytest.approx(
            10 * np.log10((ref**2).sum() / (error**2).sum()), abs=1e-6
        )
    norms = np.linalg.norm(ref) * np.linalg.norm(candidate.astype(np.float64))
    if norms > 0:
        assert got.cosine == pytest.approx((ref * candidate).sum() / norms, abs=1e-9)


def test_no_error_is_no_error() -> None:
    got = tensor_error(np.zeros(3, np.float32), np.zeros(3, np.float32))
    assert (got.max_abs, got.cosine, got.snr_db) == (0.0, 1.0, math.inf)
    assert tensor_error(np.zeros((0, 2)), np.zeros((0, 2))).max_abs == 0.0


def test_infinities_of_the_reference_are_no_error_but_new_ones_are() -> None:
    reference = np.float32([1, -np.inf, np.nan, 2])
    assert tensor_error(reference, reference.copy()).finite
    got = tensor_error(reference, np.float32([np.inf, -np.inf, np.nan, 2.5]))
    assert got.nonfinite == 1 and got.max_abs == 0.5


def test_the_range_is_the_reference_s_whatever_became_of_it() -> None:
    reference = np.float32([1, -7e4, np.inf, 9e4])
    for candidate in ([1, -7e4, np.inf, 9e4], [1, -np.inf, np.inf, np.inf], [np.nan] * 4):
        got = tensor_error(reference, np.float32(candidate))
        assert (got.ref_min, got.ref_max) == (-7e4, 9e4)
    nothing = tensor_error(np.float32([np.inf]), np.float32([1]))
    assert math.isnan(nothing.ref_min) and math.isnan(nothing.ref_max)


def test_integers_and_booleans() -> None:
    assert tensor_error(np.array([1, 2, 3]), np.array([1, 2, 5])).max_abs == 2.0
    assert tensor_error(np.array([True, False]), np.array([True, True])).max_abs == 1.0


def test_huge_values_do_not_overflow_the_cosine() -> None:
    assert tensor_error(np.float64([1e200, 0]), np.float64([1e200, 0])).cosine == 1.0


def test_several_samples_worst_and_mean() -> None:
    errors = [tensor_error(np.float32([0, 1]), np.float32([0, 1 + d])) for d in (0.5, 0.25)]
    assert worst_of(errors).max_abs == 0.5 and mean_of(errors).max_abs == 0.375
    assert worst_of(errors).snr_db == min(e.snr_db for e in errors)


OUT = {"y": np.float32([1.0, 100.0])}


@pytest.mark.parametrize(
    ("text", "moved", "score"),
    [
        ("max_abs<=0.5", [1.25, 100.0], 0.5),
        ("y:max_abs <= 0.5", [2.0, 100.0], 2.0),
        ("atol=0.5,rtol=0.01", [1.0, 103.0], 2.0),
        ("rtol=0.01,atol=0.5", [1.0, 103.0], 2.0),
        ("rtol=0.01", [1.0, 103.0], 3.0),
        ("atol=.5", [1.0, 100.25], 0.5),
        ("rel_range<=1e-2", [1.0, 100.99], 1.0),
    ],
)
def test_scores_are_multiples_of_the_tolerance(text: str, moved: list[float], score: float) -> None:
    requirements = parse_requirements([text], ["y"])
    assert requirements.score(OUT, {"y": np.float32(moved)}) == pytest.approx(score, rel=1e-5)


def test_lower_bounds_score_by_what_is_missing() -> None:
    assert parse_requirements(["cosine>=0.99"], ["y"]).items[0].score_of(0.98) == pytest.approx(2.0)
    assert parse_requirements(["snr_db>=40"], ["y"]).items[0].score_of(34.0) == pytest.approx(
        10 ** (6 / 20)
    )


def test_new_infinities_never_pass_even_where_no_requirement_looks() -> None:
    requirements = parse_requirements(["a:max_abs<=1"], ["a", "b"])
    reference = {"a": np.float32([1]), "b": np.float32([1])}
    assert (
        requirements.score(reference, {"a": np.float32([1]), "b": np.float32([np.nan])}) == math.inf
    )


def test_output_names_with_colons() -> None:
    item = parse_requirements(["Identity:0:max_abs<=1"], ["Identity:0"]).items[0]
    assert item.output == "Identity:0"


def test_the_default_is_forty_decibels_and_equal_integers() -> None:
    assert parse_requirements([], ["y"]).texts == ("snr_db>=40",)
    assert parse_requirements([], ["y", "n"], whole=["n"]).texts == ("snr_db>=40", "n:equal>=1")
    assert parse_requirements([], ["n"], whole=["n"]).texts == ("n:equal>=1",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "max_abs",
        "max_abs<1",
        "nonsense<=1",
        "max_abs>=1",
        "cosine<=0.9",
        "cosine>=1.5",
        "zz:max_abs<=1",
        "atol=0,rtol=0",
        "max_abs<=-1",
        "atol=-1",
        "max_abs<=1e-2x",
    ],
)
def test_bad_requirements_are_named(text: str) -> None:
    with pytest.raises(BadInputError, match="--requirement"):
        parse_requirements([text], ["y"])


def test_task_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mymetric.py").write_text(
        "def worst(ref, got):\n    return float(max(abs(ref[n] - got[n]).max() for n in ref))\n"
    )
    monkeypatch.chdir(tmp_path)
    requirements = parse_requirements(["worst<=2"], ["y"], *load_metrics(["mymetric:worst"]))
    assert requirements.score(OUT, {"y": np.float32([1, 101])}) == 0.5
    for bad in ("mymetric", "mymetric:absent", "no_such_module:f"):
        with pytest.raises(BadInputError, match="--metric"):
            load_metrics([bad])


@pytest.mark.parametrize("size", [2, 3, 1 << 17])
def test_equal_outputs_have_a_cosine_of_1(size: int) -> None:
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    assert tensor_error(values, values.copy()).cosine == 1.0


LIMITS = st.floats(-1e3, 1e3)


@given(LIMITS, st.lists(st.floats(-1e4, 1e4), min_size=2), st.sampled_from([">=", "<="]))
def test_a_users_metric_is_scored_by_how_far_it_is_beyond_its_limit(
    limit: float, values: list[float], bound: str
) -> None:
    """Of any sign: at most 1 is exactly what meets the condition, and worse never scores less."""
    (item,) = parse_requirements([f"own{bound}{limit!r}"], ["y"], {"own": lambda *_: 0.0}).items
    better = sorted(values, reverse=bound == ">=")
    scores = [item.score_of(value) for value in better]
    assert scores == sorted(scores)
    met = [value >= limit if bound == ">=" else value <= limit for value in better]
    assert [score <= 1.0 for score in scores] == met


def test_a_users_error_in_decibels_is_no_pass_at_any_number_below_zero() -> None:
    (item,) = parse_requirements(["own<=-100"], ["y"], {"own": lambda *_: 0.0}).items
    assert item.score_of(-62.0) == pytest.approx(1.38)
    assert item.score_of(-120.0) == pytest.approx(0.8)


def test_the_shape_of_an_output_that_nothing_looks_at_decides_nothing() -> None:
    """A list of boxes that is one longer made every requirement's score infinite."""
    exact = {"y": np.float32([1.0, 2.0]), "kept": np.int64([1, 2, 3])}
    longer = {"y": np.float32([1.0, 2.0]), "kept": np.int64([1, 2, 3, 4])}
    broken = {**longer, "y": np.float32([1.0, np.nan])}
    named = parse_requirements(["y:max_abs<=1e-3"], ["y", "kept"], {}, {})
    assert named.judge(exact, longer).score == 0.0
    assert named.judge(exact, broken).score == np.inf
    everything = parse_requirements(["max_abs<=1e-3"], ["y", "kept"], {}, {})
    assert everything.judge(exact, longer).score == np.inf
    own = parse_requirements(["m<=1"], ["y", "kept"], {"m": lambda *_: 0.0}, {})
    assert own.judge(exact, longer).score == np.inf, "a metric of the user's sees all"
    assert named.judge(exact, {**exact, "kept": np.float32([np.inf] * 3)}).score == np.inf


def test_conditions_are_told_on_the_inputs_that_count() -> None:
    """Each left out its own worst: what counts for the answer was worse than either."""
    both = parse_requirements(["y:max_abs<=1", "z:max_abs<=1"], ["y", "z"], {}, {})
    values = [(0.1, 0.7), (0.2, 0.3), (5.0, 0.1), (0.6, 0.2)]
    assert both.together(values, 0.75) == 0.7
    assert both.by_condition(values, 0.75) == (0.6, 0.7)
    assert both.by_condition(values) == (5.0, 0.7)


@pytest.mark.parametrize(
    "text", ["max_abs<=1e400", "rel_range<=1e400", "atol=1e400", "atol=1,rtol=1e400"]
)
def test_a_bound_beyond_all_numbers_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="too large"):
        parse_requirements([text], ["y"])


def test_errors_whose_squares_leave_float64_are_misses() -> None:
    found = tensor_error(np.float64([1e200, 1.0]), np.float64([2e200, 1.0]))
    assert found.max_abs == 1e200 and found.rmse == math.inf and found.snr_db == -math.inf
