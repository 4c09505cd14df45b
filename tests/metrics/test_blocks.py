"""Large tensors are walked over block by block, and the numbers are those of all at once."""

from __future__ import annotations

from dataclasses import astuple

import ml_dtypes
import numpy as np
import pytest

from bisect_trt.base.plan import Precision
from bisect_trt.inputs.augmentations import augmented_input
from bisect_trt.inputs.perturbations import perturbed
from bisect_trt.metrics import arrays, errors
from bisect_trt.metrics.arrays import slices
from bisect_trt.metrics.error_sample import ErrorSample
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.metrics.rounding import rounded, to_storage
from bisect_trt.model.tensor_values import rounded_values

SHAPE = (7, 31, 5)


def pairs() -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    exact = random.standard_normal(SHAPE).astype(np.float32)
    near = (exact + random.standard_normal(SHAPE) * 1e-3).astype(np.float32)
    broken, masked = near.copy(), exact.copy()
    broken.flat[[3, 500, 1000]] = np.nan, np.inf, -np.inf
    masked.flat[[3, 9]] = -np.inf
    lost = np.full(SHAPE, np.nan, np.float32)
    zero = np.zeros(SHAPE, np.float32)
    whole = random.integers(-9, 9, SHAPE)
    return [
        (exact, near),
        (exact, exact),
        (exact, broken),
        (masked, np.where(np.isinf(masked), masked, near)),
        (masked, near),
        (exact, lost),
        (lost, lost),
        (zero, zero),
        (zero, near),
        (whole.astype(np.int16), (whole + 1).astype(np.int16)),
        (whole > 0, whole > 1),
        (exact.astype(np.float16), near.astype(np.float16)),
        (exact[::2], near[::2]),
    ]


@pytest.mark.parametrize("number", range(len(pairs())))
def test_errors(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, given = pairs()[number]
    at_once = tensor_error(exact, given)
    monkeypatch.setattr(errors, "slices", lambda size, *_: slices(size, 100))
    np.testing.assert_allclose(astuple(tensor_error(exact, given)), astuple(at_once), rtol=1e-6)


def test_errors_beyond_float32_stay_finite() -> None:
    far = np.full(1000, 3e38, np.float32)
    error = tensor_error(far, -far)
    assert error.max_abs == 2.0 * float(far[0]) and np.isfinite(error.median_abs)


def test_the_worst_elements() -> None:
    exact, given = pairs()[0]
    for text in ("atol=1e-3,rtol=1e-2", "max_abs<=1e-2", "cosine>=0.99", "psnr_db>=40"):
        requirements = parse_requirements([text], ["y"], {}, {})
        at_once = ErrorSample(requirements, {"y": exact}, {"y": given}, 20)
        by_blocks = ErrorSample(requirements, {"y": exact}, {"y": given}, 20, block=1)
        assert by_blocks.size == at_once.size
        np.testing.assert_array_equal(by_blocks.errors({"y": given}), at_once.errors({"y": given}))


def test_draws_and_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"x": pairs()[0][0]}
    tf32, stored = Precision.TF32, np.dtype(ml_dtypes.bfloat16)

    def made() -> list[np.ndarray]:
        given = [
            perturbed(arrays, np.random.default_rng(1))["x"],
            augmented_input("mix", arrays, [], np.random.default_rng(2))["x"],
        ]
        return [
            *given,
            rounded_values(arrays["x"], tf32, np.dtype(np.float32)),
            rounded_values(arrays["x"], Precision.BF16, stored).view(np.uint16),
        ]

    at_once = made()
    for module in ("bisect_trt.inputs.augmentations", "bisect_trt.model.tensor_values"):
        monkeypatch.setattr(f"{module}.slices", lambda size, *_: slices(size, 100))
    for one, other in zip(made(), at_once, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(at_once[2], rounded(arrays["x"], tf32))
    kept = to_storage(arrays["x"], Precision.BF16).view(np.uint16)
    np.testing.assert_array_equal(at_once[3], kept)


def test_what_is_told_of_all_elements() -> None:
    values = np.zeros(arrays.BLOCK + 5, np.float32)
    assert arrays.all_finite(values)
    assert arrays.largest_finite(values) == 0.0
    values[-1], values[0] = np.inf, -3.0
    assert not arrays.all_finite(values)
    assert arrays.largest_finite(values) == 3.0


def test_an_output_of_another_shape_has_no_errors() -> None:
    """It was compared place by place where it had grown."""
    exact = np.arange(12, dtype=np.float32).reshape(3, 4)
    requirements = parse_requirements(["max_abs<=1"], ["y"])
    sample = ErrorSample(requirements, {"y": exact}, {"y": exact})
    assert not sample.errors({"y": exact}).any()
    assert np.isnan(sample.errors({"y": np.zeros((4, 4), np.float32)})).all()
