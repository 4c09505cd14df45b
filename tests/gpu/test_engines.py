"""Real engines on a real GPU. Run with `make gpu-test`; skipped, with the reason, where no engine
can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import bisect_trt
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.device import visible_gpus
from bisect_trt.runners.doctor import examine
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from fixtures import cases
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import ALL, healthy, residual, unsavable
from tests.copies import EIGHT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    check = next(c for c in examine() if c.name == "runner tensorrt")
    if not check.works:
        pytest.skip(f"no engine can run here: {check.detail}")


@pytest.fixture
def closing() -> Iterator[Callable[..., TensorRTRunner]]:
    made: list[TensorRTRunner] = []

    def make(model: onnx.ModelProto, samples: list[Sample], **options: object) -> TensorRTRunner:
        made.append(TensorRTRunner(model, samples, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def test_every_input_is_run_several_times_and_in_another_process_again(
    closing: Callable[..., TensorRTRunner],
) -> None:
    """Between margins that nobody wrote to, in outputs that were NaN before."""
    fixture = encoder_decomposed()
    samples = [
        Sample("s", fixture.inputs),
        Sample("t", {n: a / 2 for n, a in fixture.inputs.items()}),
    ]
    runner = closing(fixture.model, samples)
    first = list(runner.outputs(PrecisionPlan("fp32"), samples))
    runner.start_afresh()
    second = list(runner.outputs(PrecisionPlan("fp32"), samples))
    for one, other in zip(first, second, strict=True):
        assert isinstance(one, Repeated) and (one.runs, one.others) == (3, ())
        for name, array in one.items():
            assert np.isfinite(array).all()
            np.testing.assert_allclose(array, other[name], rtol=1e-3, atol=1e-3)


# `unsavable` is chaotic: no two runtimes agree on it by design, and TensorRT for RTX 1.6.1 was seen
# to crash on it.
@pytest.mark.parametrize("make", [f for f in ALL if f is not unsavable], ids=lambda f: f.__name__)
def test_fixture_s_errors_are_near_the_emulated_ones(
    make: Callable[[], Fixture], closing: Callable[..., TensorRTRunner]
) -> None:
    fixture = make()
    sample = Sample("s", fixture.inputs)
    engine, emulator = closing(fixture.model, [sample]), EmulatedRunner(fixture.model)
    exact = next(emulator.outputs(PrecisionPlan("fp32"), [sample]))
    for plan in (PrecisionPlan("fp32"), PrecisionPlan("fp16"), PrecisionPlan("bf16")):
        got, emulated = next(engine.outputs(plan, [sample])), next(emulator.outputs(plan, [sample]))
        reference = (
            next(emulator.outputs(PrecisionPlan("tf32"), [sample]))
            if plan.base.value == "fp32"
            else emulated
        )
        for name, value in exact.items():
            finite = np.isfinite(emulated[name]) & np.isfinite(value)
            allowed = 4.0 * np.abs(reference[name] - value)[finite].max(
                initial=0.0
            ) + 1e-4 * np.abs(value)[finite].max(initial=0.0)
            assert (
                np.abs(got[name] - value)[finite & np.isfinite(got[name])].max(initial=0.0)
                <= allowed
            ), (plan.base, name)
        facts = engine.facts(plan)
        assert (
            facts["latency_ms"] > 0
            and facts["engine_bytes"] > 0
            and facts["read_back"] >= 0.5 * len(list_layers(fixture.model))
        )
        assert [f for f in facts["findings"] if f["kind"] == "pin-not-honoured"] == []


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
def test_run_decides_on_the_engine(make: Callable[[], Fixture], tmp_path: Path) -> None:
    fixture = make()
    result = bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        precision=fixture.precision,
        require=fixture.require,
        runner="tensorrt",
        out=tmp_path / "run",
        robust=0,
    )
    assert result.runner == "tensorrt"
    assert result.exit_code == fixture.exit_code or (
        result.cause.value == "tf32" and result.engine.fp32_is == "tf32"
    ), result.sentence
    assert (tmp_path / "run" / "report.html").exists()
    again = bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        precision=fixture.precision,
        require=fixture.require,
        runner="tensorrt",
        out=tmp_path / "run",
        robust=0,
    )
    assert again.new_evaluations == 0 and again.pinned == result.pinned


def test_certified_pins_are_proved_by_builds(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    result = bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        require=fixture.require,
        runner="tensorrt",
        certify="engine",
        out=tmp_path / "run",
        robust=0,
    )
    assert result.passed and result.complete and set(result.pins["proved_on"]) == {"tensorrt"}


def test_out_of_builds_gives_the_closest_plan(tmp_path: Path) -> None:
    fixture = residual()
    result = bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        require=fixture.require,
        runner="tensorrt",
        max_builds=0,
        out=tmp_path / "run",
        robust=0,
    )
    assert result.engine.out_of_builds and result.engine.builds_beyond_baselines <= 1


def test_several_samples_integer_inputs_and_outputs_whose_shape_depends_on_values(
    closing: Callable[..., TensorRTRunner],
) -> None:
    nodes = [
        helper.make_node("Gather", ["x", "pick"], ["rows"], name="gather", axis=0),
        helper.make_node("Slice", ["rows", "zero", "length", "zero"], ["cut"], name="slice"),
        helper.make_node("Relu", ["cut"], ["y"], name="relu"),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]),
        helper.make_tensor_value_info("pick", TensorProto.INT64, ["k"]),
        helper.make_tensor_value_info("length", TensorProto.INT64, [1]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", 4])]
    graph = helper.make_graph(
        nodes, "g", inputs, outputs, [helper.make_tensor("zero", TensorProto.INT64, [1], [0])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    samples = []
    for n, picks, length in ((3, [0, 2], 1), (6, [5, 5, 1, 0], 3)):
        x = np.linspace(-1.0, 1.0, n * 4, dtype=np.float32).reshape(n, 4)
        samples.append(
            Sample(
                f"s{n}",
                {"x": x, "pick": np.array(picks, np.int64), "length": np.array([length], np.int64)},
            )
        )
    got = list(closing(model, samples).outputs(PrecisionPlan("fp32"), samples))
    for sample, outputs_of_one in zip(samples, got, strict=True):
        length = int(sample.arrays["length"][0])
        expected = np.maximum(sample.arrays["x"][sample.arrays["pick"]][:length], 0.0)
        np.testing.assert_array_equal(outputs_of_one["y"], expected)


def test_a_scalar_input_is_one(closing: Callable[..., TensorRTRunner]) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 4] x, float scale) => (float[n, 4] y) { [scaled] y = Mul (x, scale) }"""
    x = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(2, 4)
    sample = Sample("s", {"x": x, "scale": np.array(0.5, np.float32)})
    runner = closing(onnx.parser.parse_model(text), [sample])
    (outputs,) = runner.outputs(PrecisionPlan("fp32"), [sample])
    np.testing.assert_array_equal(outputs["y"], x * np.float32(0.5))


def test_a_hang_is_a_verdict(closing: Callable[..., TensorRTRunner]) -> None:
    fixture = healthy()
    runner = closing(fixture.model, [Sample("s", fixture.inputs)])
    runner.timeout_s = 1e-3
    with pytest.raises(RunnerFailedError) as caught:
        next(runner.outputs(PrecisionPlan("fp16"), [Sample("s", fixture.inputs)]))
    assert caught.value.verdict is Verdict.TIMED_OUT
    runner.timeout_s = 200.0
    assert next(runner.outputs(PrecisionPlan("fp16"), [Sample("s", fixture.inputs)]))


def test_several_gpus_certify_the_same_set(tmp_path: Path) -> None:
    """One worker a GPU: the removals of a round are built side by side, and the answer is the one
    worker's.
    """
    if len(visible_gpus()) < 2:
        pytest.skip(f"{len(visible_gpus())} GPU visible; several workers need two")
    fixture = encoder_decomposed()
    found = [
        bisect_trt.bisect(
            fixture.model,
            fixture.inputs,
            require=fixture.require,
            runner="tensorrt",
            certify="engine",
            workers=workers,
            out=tmp_path / str(workers),
            robust=0,
        )
        for workers in (1, 2)
    ]
    assert found[0].pinned == found[1].pinned and all(r.passed and r.complete for r in found)
    print(f"certified on one GPU in {found[0].seconds:.1f} s, on two in {found[1].seconds:.1f} s")


# TensorRT for RTX runs FP32 as TF32, so what TF32 alone breaks has no plan there; the run must say
# exactly that.
@pytest.mark.parametrize("make", cases.AUGMENTED.values(), ids=cases.AUGMENTED)
def test_the_cases_are_told_apart_on_the_engine(
    make: Callable[[], Fixture], tmp_path: Path
) -> None:
    fixture = make()
    try:
        result = bisect_trt.bisect(
            fixture.model,
            fixture.inputs,
            precision=fixture.precision,
            require=fixture.require,
            metric=fixture.metrics,
            runner="tensorrt",
            out=tmp_path / "run",
            robust=0,
        )
    except RunnerFailedError as error:
        pytest.skip(f"this runtime cannot build it: {error}")
    if result.engine.fp32_is == "tf32" and not result.passed:
        assert result.cause.value == "tf32", result.sentence
    else:
        assert result.passed, result.sentence
        assert result.cause.value in (fixture.cause, "none")


def test_what_an_engine_s_plan_holds_on_is_measured_on_it(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    result = bisect_trt.bisect(
        fixture.model, fixture.inputs, require=fixture.require, runner="tensorrt", out=tmp_path
    )
    assert result.passed and result.validation is not None
    print(result.validation, len(result.pinned), result.seconds)
    assert result.validation.perturbed.tested >= 59 and result.validation.given.passed == 1


def test_the_engine_kept_for_further_samples_gives_what_a_new_one_gives(
    closing: Callable[..., TensorRTRunner],
) -> None:
    fixture = residual()
    one = Sample("one", fixture.inputs)
    other = Sample("other", {n: a * np.float32(0.5) for n, a in fixture.inputs.items()})
    plan = PrecisionPlan("fp16")
    runner = closing(fixture.model, [one])
    apart = [next(runner.outputs(plan, [s])) for s in (one, other, one)]
    together = list(closing(fixture.model, [one]).outputs(plan, [one, other, one]))
    for first, second in zip(apart, together, strict=True):
        for name, array in first.items():
            np.testing.assert_allclose(array, second[name], rtol=2e-2, atol=1e-3)
    np.testing.assert_array_equal(apart[0]["y"], apart[2]["y"])


def test_candidates_and_choices_are_timed_beside_each_other(tmp_path: Path) -> None:
    fixture = residual()
    result = bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        require=fixture.require,
        runner="tensorrt",
        repair="none",
        weights="nearest",
        limits=EIGHT,
        out=tmp_path / "run",
    )
    assert result.engine is not None
    times = {one.name: one for one in result.engine.times}
    assert {"as it is", "FP32"} <= times.keys()
    assert all(0.0 < (one.graph_ms or one.plain_ms) <= one.plain_ms for one in times.values())
    rows = {choice.name: choice for choice in result.choice_rows}
    assert rows["FP32"].latency_ms == pytest.approx(times["FP32"].graph_ms)
    assert [one for one in result.choice_rows if one.recommended]
