"""Copies keep shapes, types and the given arrays; the same seed gives the same copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.inputs.augmentations import KINDS, augmented_input, check_kinds, kinds_for
from bisect_trt.inputs.perturbations import (
    can_be_perturbed,
    can_perturb_lookups,
    moments,
    perturbed,
    perturbed_lookups,
    with_noise,
)
from bisect_trt.metrics.rounding import STEPS, rounded

IMAGE = np.sin(np.arange(3 * 16 * 24, dtype=np.float32)).reshape(1, 3, 16, 24)
IDS = np.arange(12, dtype=np.int64).reshape(1, 12)
MASK = (IDS < 9).astype(np.int64)


def test_half_precision_inputs_are_moved_too() -> None:
    """Their sum leaves float16's range: of an image of 60,000 pixels and more NumPy says that they
    deviate by infinity, and none was perturbed, or noisy.
    """
    image = np.random.default_rng(0).normal(0.5, 0.3, (3, 224, 224)).astype(np.float16)
    assert can_be_perturbed({"x": image}) and "noise" in kinds_for({"x": image})
    moved = perturbed({"x": image}, np.random.default_rng(1), 0.1)["x"].astype(np.float64) - image
    assert moved.std() == pytest.approx(0.03, rel=0.02)
    lowest = np.where(image > 0.5, np.finfo(np.float16).min, np.float16(0.0))
    assert perturbed({"x": lowest}, np.random.default_rng(1))["x"] is lowest


def test_a_redrawn_copy_is_near_and_not_the_same() -> None:
    arrays = {"x": IMAGE, "ids": IDS, "zero": np.zeros((1, 4), np.float32)}
    copy = perturbed(arrays, np.random.default_rng(1))
    moved = copy["x"] - IMAGE
    assert 0.5e-3 < moved.std() / IMAGE.std() < 2e-3 and copy["x"].dtype == np.float32
    assert np.array_equal(copy["ids"], IDS) and np.array_equal(copy["zero"], arrays["zero"])
    again = perturbed(arrays, np.random.default_rng(1))
    assert np.array_equal(copy["x"], again["x"])
    assert can_be_perturbed(arrays) and not can_be_perturbed({"ids": IDS})


@pytest.mark.parametrize("kind", list(KINDS))
def test_variants_keep_shapes_and_types_and_change_something(kind: str) -> None:
    arrays = {"x": IMAGE, "ids": IDS, "mask": MASK}
    before = {name: array.copy() for name, array in arrays.items()}
    made = augmented_input(
        kind, arrays, [{**arrays, "x": IMAGE[..., ::-1]}], np.random.default_rng(3)
    )
    for name, array in made.items():
        assert array.shape == arrays[name].shape and array.dtype == arrays[name].dtype
        assert np.array_equal(arrays[name], before[name]), "the given arrays are not touched"
    assert any(not np.array_equal(made[n], arrays[n]) for n in arrays)
    if kind in ("rotate", "swap"):
        assert sorted(made["ids"].ravel()) == sorted(IDS.ravel())
        # Inputs of one shape go together: a mask still belongs to its ids.
        assert np.array_equal(made["mask"], (made["ids"] < 9).astype(np.int64))


def test_what_fits_what() -> None:
    assert kinds_for({"x": IMAGE}) == ("shift", "flip", "scale", "noise", "mix")
    assert kinds_for({"x": np.float32([[1.0, 2.0]])}) == ("scale", "noise")
    assert kinds_for({"ids": IDS}) == ("rotate", "swap")
    assert kinds_for({"size": np.int64([480, 640])}) == ()
    check_kinds("shift,mix")
    with pytest.raises(BadInputError, match="--augmented turn: unknown; choose of shift, flip"):
        check_kinds("shift,turn")


@pytest.mark.parametrize("kind", ["perturbed", "noise", "scale", "mix"])
@pytest.mark.parametrize("low", [0.0, -1e4, -1e9])
def test_a_mask_beside_values_or_ids_stays_what_it_is(kind: str, low: float) -> None:
    mask = np.where(np.arange(24) < 17, np.float32(1.0 if low == 0.0 else 0.0), np.float32(low))
    arrays = {"x": IMAGE, "mask": np.broadcast_to(mask, IMAGE.shape).copy()}
    random = np.random.default_rng(1)
    made = (
        perturbed(arrays, random)
        if kind == "perturbed"
        else augmented_input(kind, arrays, [], random)
    )
    assert np.array_equal(made["mask"], arrays["mask"])
    assert not np.array_equal(made["x"], IMAGE)
    beside_ids = {"ids": IDS, "mask": mask[:12].reshape(1, 12)}
    beside_ids["mask"][0, -1] = low
    assert not can_be_perturbed(beside_ids)
    assert kinds_for(beside_ids) == ("rotate", "swap")


@pytest.mark.parametrize("kind", ["perturbed", "noise", "flip", "scale"])
@pytest.mark.parametrize("asked", [True, False])
def test_padding_that_the_model_asks_for_stays_zero(kind: str, asked: bool) -> None:
    """``Equal(x, 0)`` is the mask of a padded sequence of features."""
    padded = np.where(np.arange(24) < 17, IMAGE, np.float32(0.0))
    random, discrete = np.random.default_rng(1), frozenset("x" * asked)
    if kind == "perturbed":
        made = perturbed({"x": padded}, random, discrete=discrete)["x"]
    else:
        made = augmented_input(kind, {"x": padded}, [], random, discrete)["x"]
    same = kind == "scale" or asked
    assert (np.count_nonzero(made) == np.count_nonzero(padded)) == same
    assert not np.array_equal(made, padded) and made.dtype == np.float32


def test_a_shift_takes_the_mask_along() -> None:
    mask = (IMAGE > 0.0).astype(np.float32)
    made = augmented_input("shift", {"x": IMAGE, "mask": mask}, [], np.random.default_rng(1))
    assert np.array_equal(made["mask"], (made["x"] > 0.0).astype(np.float32))
    assert not np.array_equal(made["mask"], mask)


def test_a_line_drawing_alone_is_moved() -> None:
    copying = {"x": (IMAGE > 0.0).astype(np.float32)}
    assert can_be_perturbed(copying) and "mix" in kinds_for(copying)
    assert not can_be_perturbed(copying, discrete={"x"}), "unless it is asked for equality"
    size = np.float32([480.0, 640.0])
    assert np.array_equal(perturbed({"x": IMAGE, "s": size}, np.random.default_rng(1))["s"], size)


def test_whole_numbers_are_ids_where_the_model_makes_them_integers() -> None:
    ids = {"ids": IDS.astype(np.float32)}
    assert can_be_perturbed(ids) and not can_be_perturbed(ids, discrete={"ids"})
    assert can_be_perturbed({"ids": ids["ids"] + np.float32(0.5)}, discrete={"ids"})


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("mean", [0.0, 10.0, 300.0])
def test_roundings_of_values_far_from_zero_are_redrawn_too(
    precision: Precision, mean: float
) -> None:
    values = np.random.default_rng(0).normal(mean, 1.0, 20_000).astype(np.float32)
    copy = perturbed({"x": values}, np.random.default_rng(1), step=STEPS[precision])["x"]
    plain = perturbed({"x": values}, np.random.default_rng(1))["x"]
    moved = float((copy - values).std())
    assert moved <= 0.11, "it stays the same input"
    if mean == 0.0:
        assert np.array_equal(copy, plain), "which moved enough as it was"
    elif precision is Precision.BF16 and mean == 300.0:
        same = [
            float((rounded(x, precision) == rounded(values, precision)).mean())
            for x in (plain, copy)
        ]
        assert same[0] > 0.999 and same[1] < 0.97


def test_what_is_looked_up_moves_by_a_thousandth_of_each_value() -> None:
    rows = np.float32([[0.0, 1e-3, -2.0], [600.0, 0.5, 0.0]])
    kept = {"mask": np.float32([0, 1, 1]), "steps": np.zeros(3, np.float32)}
    copy = perturbed_lookups({"rows": rows, **kept}, np.random.default_rng(2))
    assert np.array_equal(copy["rows"] == 0.0, rows == 0.0), "a padding stays one"
    moved = np.abs(copy["rows"] / np.where(rows == 0.0, 1.0, rows) - (rows != 0.0))
    assert moved.max() < 5e-3 and np.count_nonzero(moved) == 4
    assert copy["rows"].dtype == np.float32 and copy["rows"].shape == rows.shape
    assert all(np.array_equal(copy[n], a) for n, a in kept.items())
    assert can_perturb_lookups({"rows": rows}) and not can_perturb_lookups(kept)


@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min])
def test_a_mask_of_infinities_stays_and_spoils_nothing(low: float) -> None:
    mask = np.where(np.arange(12) < 9, 0.0, low).astype(np.float32)
    arrays = {"x": IMAGE, "mask": mask}
    copy = perturbed(arrays, np.random.default_rng(1))
    assert np.array_equal(copy["mask"], mask) and np.isfinite(copy["x"]).all()
    assert not can_be_perturbed({"mask": mask})
    for kind in ("scale", "mix", "noise"):
        made = augmented_input(kind, arrays, [], np.random.default_rng(3))
        assert np.array_equal(made["mask"], mask) and not np.array_equal(made["x"], IMAGE)


@pytest.mark.parametrize("kind", ["perturbed", "noise", "flip"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_is_nowhere_negative_stays_so(kind: str, dtype: type) -> None:
    """Counts, and images of black, are taken the logarithm or a root of: copies were NaN."""
    counts = np.maximum(IMAGE, 0.0).astype(dtype)
    random = np.random.default_rng(1)
    one = perturbed if kind == "perturbed" else (lambda a, r: augmented_input(kind, a, [], r))
    made = one({"x": counts}, random)["x"]
    assert made.min() == 0.0 and not np.array_equal(made, counts)
    assert np.count_nonzero(made) == np.count_nonzero(counts)
    assert np.isfinite(np.log(made + dtype(1e-7))).all() and made.dtype == dtype


def plus(block: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
    return block + numbers


def test_noise_has_mean_0_and_deviation_1_and_no_block_is_another() -> None:
    size = (4 << 20) + 70_001
    found = with_noise(np.zeros(size, np.float32), np.random.default_rng(3), plus)
    assert abs(found.mean(dtype=np.float64)) < 5.0 / np.sqrt(size)
    assert found.std(dtype=np.float64) == pytest.approx(1.0, abs=0.003)
    blocks = [found[start : start + 1000] for start in range(0, size - 1000, 1 << 20)]
    assert len({block.tobytes() for block in blocks}) == len(blocks)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_noise_follows_from_the_seed(dtype: type) -> None:
    array = np.random.default_rng(0).normal(3.0, 0.5, (3, 1 << 20)).astype(dtype)
    before = array.copy()
    copy, same = (perturbed({"x": array}, np.random.default_rng(1), 0.1)["x"] for _ in range(2))
    np.testing.assert_array_equal(copy, same)
    assert copy.dtype == dtype and copy.shape == array.shape
    np.testing.assert_array_equal(array, before)
    assert (copy.astype(np.float64) - array).std() == pytest.approx(0.05, rel=0.01)
    other = perturbed({"x": array}, np.random.default_rng(2), 0.1)["x"]
    assert (other != copy).mean() > 0.9


def test_moments_of_halves_are_those_of_their_values() -> None:
    array = np.random.default_rng(0).normal(3.0, 0.5, 60_000).astype(np.float16)
    assert moments(array) == pytest.approx((3.0, 0.5), rel=0.01)


def test_tables_are_moved_by_parts_of_each_value_and_masks_are_not() -> None:
    table = np.float32(np.random.default_rng(0).normal(0.0, 1.0, (1 << 10, 1 << 11)))
    table[0] = 0.0
    mask = np.zeros((1 << 10, 1 << 11), np.float32)
    mask[-1, -1] = 1.0
    late = mask.copy()
    late[-1, -2] = 2.0  # a third value, at the end
    found = perturbed_lookups({"t": table, "m": mask, "l": late}, np.random.default_rng(1))
    assert not found["t"][0].any() and found["m"] is mask and (found["l"] != late).sum() == 2
    parts = found["t"][1:] / table[1:] - 1.0
    assert parts.std() == pytest.approx(1e-3, rel=0.01)


def test_what_is_too_large_to_be_squared_stays_as_it_is() -> None:
    """A mask of the lowest number."""
    low = np.zeros(2000, np.float32)
    low[::2] = np.finfo(np.float32).min
    infinite = np.where(low < 0.0, -np.inf, 0.0).astype(np.float32)
    found = perturbed({"low": low, "infinite": infinite}, np.random.default_rng(1))
    assert found["low"] is low and found["infinite"] is infinite
