"""Noise is of the deviation asked for, and what it is depends on the seed alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bisect_trt.inputs.perturbations import moments, perturbed, perturbed_lookups, with_noise


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
