"""Roundings: our arrays, NumPy's, and the nodes in ONNX Runtime must agree to the bit."""

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bisect_trt.base.plan import Precision
from bisect_trt.metrics.rounding import LARGEST, SMALLEST_SUBNORMAL, rounded
from bisect_trt.model.emulated import rounding_model
from tests.conftest import run_model

FLOATS = hnp.arrays(
    np.float32, 32, elements=st.floats(width=32, allow_nan=False, allow_infinity=True)
)
EDGES = np.array(
    [
        0.0,
        -0.0,
        65504.0,
        65519.996,
        65520.0,
        1e30,
        -3.4028235e38,
        2.0**-24,
        2.0**-25,
        2.0**-25 * 1.0001,
        6e-8,
        1.0009765625,
        3e38,
    ],
    np.float32,
)


@given(FLOATS)
def test_fp16_is_numpys(values: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    assert rounded(values, Precision.FP16).tobytes() == expected.tobytes()


@given(FLOATS)
def test_bf16_is_ml_dtypes(values: np.ndarray) -> None:
    expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert rounded(values, Precision.BF16).tobytes() == expected.tobytes()


@given(
    hnp.arrays(
        np.float32,
        32,
        elements=st.floats(-(2.0**100), 2.0**100, width=32).filter(
            lambda v: v == 0 or abs(v) > 1e-30
        ),
    )
)
def test_tf32_keeps_ten_explicit_bits_to_nearest(values: np.ndarray) -> None:
    got = rounded(values, Precision.TF32).astype(np.float64)
    mantissa, exponent = np.frexp(values.astype(np.float64))
    scaled = np.ldexp(mantissa, 11)
    nearest = np.ldexp(np.rint(scaled), exponent - 11)
    tie = np.abs(scaled - np.floor(scaled)) == 0.5
    assert np.all((got == nearest) | tie)
    assert np.all(np.abs(got - values) <= np.ldexp(0.5, exponent - 11))


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16, Precision.TF32])
@pytest.mark.parametrize(
    "level",
    [
        ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    ],
)
def test_onnx_runtime_keeps_every_rounding(
    precision: Precision, level: ort.GraphOptimizationLevel
) -> None:
    """The guard of the whole emulation: an upgrade that folded the roundings away would fail
    here.
    """
    random = np.random.default_rng(0)
    values = (random.normal(size=4096) * 10.0 ** random.integers(-7, 5, 4096)).astype(np.float32)
    if precision is not Precision.TF32:
        values = np.concatenate([values, EDGES])
    got = run_model(rounding_model(precision), {"x": values}, level)[0]
    assert got.tobytes() == rounded(values, precision).tobytes()
    assert (got != values).mean() > 0.5


def test_ranges_are_the_formats() -> None:
    assert LARGEST[Precision.FP16] == np.finfo(np.float16).max
    assert LARGEST[Precision.BF16] == float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    assert SMALLEST_SUBNORMAL[Precision.FP16] == float(np.finfo(np.float16).smallest_subnormal)
    assert SMALLEST_SUBNORMAL[Precision.BF16] == float(
        ml_dtypes.finfo(ml_dtypes.bfloat16).smallest_subnormal
    )
