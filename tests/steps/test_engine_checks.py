"""Equal rows of a batch, and the corners of a profile, on engines with a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.pipeline import compare
from bisect_trt.report.headline import headline
from bisect_trt.settings import Settings
from fixtures.encoders import encoder_layernorm
from fixtures.fixture import Fixture, waves
from tests.conftest import forbid_inferences
from tests.engines import Changed

Change = Callable[[PrecisionPlan, NDArray[Any]], NDArray[Any]]
ROWS = "tokens:1x12x32/1x12x32/4x12x32"
SIZES = "tokens:1x6x32/1x12x32/1x20x32"


Compared = Callable[..., tuple[bisect_trt.Result, Changed]]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compared:
    """The baselines alone: nothing is searched, and no copies are asked for."""

    def run(fixture: Fixture, change: Change, *profiles: str) -> tuple[bisect_trt.Result, Changed]:
        engine = Changed(fixture, change)
        monkeypatch.setattr("bisect_trt.steps.context.open_engine", lambda *_: engine)
        settings = Settings(
            fixture.model,
            [fixture.inputs],
            require=[fixture.require],
            profiles=profiles,
            out=tmp_path / "run",
            robust=0,
        )
        return compare(settings), engine

    return run


def right(_: PrecisionPlan, array: NDArray[Any]) -> NDArray[Any]:
    return array


def batched(rows: int = 3) -> Fixture:
    """A network that takes each row by itself."""
    return replace(encoder_layernorm(), inputs={"tokens": waves(2, rows, 12, 32)})


def second_row(off: float, base: Precision | None = None) -> Change:
    def change(plan: PrecisionPlan, array: NDArray[Any]) -> NDArray[Any]:
        if base in (None, plan.base) and len(array) > 1:
            array[1] += np.float32(off) * np.ptp(array)
        return array

    return change


def at(tokens: int, off: float, base: Precision | None = None) -> Change:
    """Wrong where there are so many tokens."""

    def change(plan: PrecisionPlan, array: NDArray[Any]) -> NDArray[Any]:
        return (
            array + np.float32(off)
            if array.shape[1:2] == (tokens,)
            and base
            in (
                None,
                plan.base,
            )
            else array
        )

    return change


def found(result: bisect_trt.Result, kind: str) -> list[Finding]:
    return [f for f in result.findings if f.kind == kind]


def test_a_row_that_is_off_is_named_with_its_output(compared: Compared) -> None:
    result, engine = compared(batched(), second_row(0.5, Precision.FP16))
    (row,) = found(result, "equal-rows")
    assert "But the FP16 engine gives equal rows" in headline(result)
    assert row.where == "logits" and row.weighty, "it is more than the requirement allows"
    assert "FP16 engine" in row.message and "row 1)" in row.message
    assert "3 copies" in row.message and "0.5 of the output's range" in row.message
    assert [p.base for p in engine.built[:3]] == ["fp32", "tf32", "fp16"], "nothing is built for it"


def test_fp32_is_held_to_its_own_last_bits(compared: Compared) -> None:
    """Where FP16 could be off by a rounding, strict FP32 could not; and the requirement is met."""
    fixture = replace(batched(), require="max_abs<=10")
    result, _ = compared(fixture, second_row(1e-5))
    (row,) = found(result, "equal-rows")
    assert "FP32 engine" in row.message and not row.weighty
    assert "more than" not in row.message


@pytest.mark.parametrize("off", [0.0, 2e-7])
def test_rows_that_are_equal_but_for_last_bits_say_nothing(compared: Compared, off: float) -> None:
    result, _ = compared(batched(), second_row(off))
    assert not found(result, "equal-rows")


def positional(rows: int = 3) -> Fixture:
    """Each row is given its own place's number: the first axis is no batch."""
    random = np.random.default_rng(3)
    stored = {
        "w": random.standard_normal((8, 8)).astype(np.float32),
        "place": random.standard_normal((rows, 8)).astype(np.float32),
    }
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"], "product"),
            helper.make_node("Add", ["h", "place"], ["y"], "place_of"),
        ],
        "positional",
        [info("x", TensorProto.FLOAT, [rows, 8])],
        [info("y", TensorProto.FLOAT, [rows, 8])],
        [numpy_helper.from_array(a, n) for n, a in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return Fixture("positional", model, {"x": waves(4, rows, 8)}, "fp16", "max_abs<=100", "none", 0)


def test_an_axis_along_which_the_reference_differs_is_no_batch(compared: Compared) -> None:
    fixture = positional()
    result, engine = compared(fixture, second_row(0.5))
    assert not found(result, "equal-rows")
    assert engine.asked == ["sample 0"] * 3, "nor is the engine asked"


def test_one_row_has_nothing_to_be_compared_with(compared: Compared) -> None:
    fixture = encoder_layernorm()
    result, engine = compared(fixture, second_row(0.5))
    assert not found(result, "equal-rows")
    assert engine.asked == ["sample 0"] * 3


def test_a_profile_that_allows_a_batch_is_tried_with_one(compared: Compared) -> None:
    fixture = encoder_layernorm()
    result, _ = compared(fixture, second_row(0.5), ROWS)
    assert {f.message[:8] for f in found(result, "equal-rows")} == {"the FP32", "the FP16"}
    assert "of 4 copies" in found(result, "equal-rows")[0].message


@pytest.mark.parametrize("base", [Precision.FP32, Precision.FP16])
def test_an_engine_that_is_wrong_at_its_largest_shape(compared: Compared, base: Precision) -> None:
    fixture = encoder_layernorm()
    result, _ = compared(fixture, at(20, 9.0, base), SIZES)
    (corner,) = found(result, "profile-corner")
    assert corner.where == "tokens" and corner.weighty
    assert f"{base.value.upper()} engine" in corner.message
    assert "largest shapes of --profile (tokens 1x20x32)" in corner.message
    assert "times the tolerance" in corner.message and "narrower" in corner.message


def test_a_right_engine_at_its_corners(compared: Compared) -> None:
    fixture = encoder_layernorm()
    result, engine = compared(fixture, right, SIZES)
    assert not found(result, "profile-corner")
    assert engine.asked.count("sample 0, largest shapes") == 2
    assert engine.asked.count("sample 0, smallest shapes") == 2


def test_a_corner_that_the_emulator_misses_too_is_not_the_engine_s(compared: Compared) -> None:
    """A requirement that FP16 meets on the given input, and by rounding alone not there."""
    fixture = replace(encoder_layernorm(), require="max_abs<=1e-6", cause="")
    result, engine = compared(fixture, at(20, 9.0, Precision.FP16), SIZES)
    assert not found(result, "profile-corner")
    assert "sample 0, largest shapes" in engine.asked


def test_without_a_profile_the_corners_are_the_samples(compared: Compared) -> None:
    fixture = encoder_layernorm()
    result, engine = compared(fixture, at(20, 9.0))
    assert not found(result, "profile-corner")
    assert engine.asked == ["sample 0"] * 3


def test_a_repeated_command_asks_nobody(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = ["tokens:1x6x32/3x12x32/3x20x32"]
    fixture = replace(batched(), require="max_abs<=10")

    def wrong(plan: PrecisionPlan, array: NDArray[Any]) -> NDArray[Any]:
        return at(20, 90.0)(plan, second_row(1e-5)(plan, array))

    first, _ = compared(fixture, wrong, *profiles)
    assert found(first, "equal-rows") and found(first, "profile-corner")
    forbid_inferences(monkeypatch)
    again, engine = compared(fixture, wrong, *profiles)
    assert not engine.asked and again.new_evaluations == 0
    assert again.findings == first.findings
