"""Every block builds alike, is right in FP32 and wrong in FP16 on most inputs, given and unseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from bisect_trt import PrecisionPlan
from bisect_trt.base.plan import Precision
from bisect_trt.graph import to_emulated
from fixtures.blocks import ARCHITECTURES, BLOCKS, GIVEN, THREADS, UNSEEN, Block
from tests.conftest import session_of, slow_where

SLOW = {"rife_grid"}
LARGEST = 2_000_000


def outputs(model: onnx.ModelProto, inputs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    session = session_of(model, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    return [session.run(None, dict(feed)) for feed in inputs]


def snr_db(right: NDArray[Any], tested: NDArray[Any]) -> float:
    """The ratio in decibels; minus infinity where a value is not finite."""
    if not np.isfinite(tested).all():
        return -np.inf
    error = np.square(right.astype(np.float64) - tested).mean()
    return float(10 * np.log10(np.square(right.astype(np.float64)).mean() / max(error, 1e-30)))


each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)


def test_there_are_twelve_architectures_and_eight_threads() -> None:
    assert (len(ARCHITECTURES), len(THREADS)) == (12, 8)
    assert len({block.name for block in BLOCKS}) == len(BLOCKS)


@each_block
def test_a_block_builds_identically_twice(block: Block) -> None:
    first, second = block.model(), block.model()
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(
        deterministic=True
    )
    assert first.ByteSize() <= LARGEST
    for one, other in zip(block.given(), block.given(), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


@each_block
def test_a_block_passes_the_checker_and_names_what_goes_wrong(block: Block) -> None:
    onnx.checker.check_model(block.model(), full_check=True)
    assert len(block.wrong.split()) <= 25 and block.wrong.endswith(".")
    assert block.source


@each_block
def test_the_inputs_are_many_and_unlike(block: Block) -> None:
    inputs = [*block.given(), *block.unseen()]
    assert len(inputs) == GIVEN + UNSEEN and GIVEN >= 3 and UNSEEN >= 8
    seen = {b"".join(array.tobytes() for array in feed.values()) for feed in inputs}
    assert len(seen) == len(inputs)


@pytest.mark.parametrize(
    "block", slow_where(lambda block: block.name in SLOW, BLOCKS), ids=lambda block: block.name
)
def test_a_block_is_finite_in_fp32_and_misses_in_fp16(block: Block) -> None:
    model = block.model()
    reduced = to_emulated(model, PrecisionPlan(Precision.FP16, frozenset()))
    for inputs in (block.given(), block.unseen()):
        missed = 0
        for right, tested in zip(outputs(model, inputs), outputs(reduced, inputs), strict=True):
            assert all(np.isfinite(array).all() for array in right)
            missed += any(snr_db(a, b) < 40 for a, b in zip(right, tested, strict=True))
        assert missed > 0.8 * len(inputs)
