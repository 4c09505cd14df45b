"""The emulator on another device. There is no GPU here: a planted device computes on the CPU
provider, by every way that a GPU takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt.base.errors import (
    MachineError,
    RunnerUnavailableError,
    is_gpu_failure,
)
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.cli import main
from bisect_trt.graph import list_layers
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.model.tensor_values import place_of
from bisect_trt.runners import device as ort_devices
from bisect_trt.runners import device_check
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.device import CPU, CUDA_PROVIDER, Device, cuda_device
from bisect_trt.runners.device_check import (
    DeviceChecker,
    Strictness,
    awkward_numbers,
    strictness,
    wrong_roundings,
)
from bisect_trt.runners.doctor import examine
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.emulator_workers import (
    EmulationServer,
    server_arguments,
)
from bisect_trt.runners.ort_rtx import OrtRtxRunner
from bisect_trt.runners.ort_session import failure_of_session, session_as_written
from bisect_trt.settings import Settings
from bisect_trt.steps import open_runners
from bisect_trt.steps.context import open_context
from bisect_trt.steps.open_runners import (
    emulator_device,
    gpus_in_turn,
    open_emulator,
    open_emulator_pool,
)
from bisect_trt.steps.problem import Problem, load
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import healthy, residual
from fixtures.subgraphs import branch

PLANTED = Device(name="planted")
REDUCED = (Precision.FP16, Precision.BF16, Precision.TF32)


def case_of(fixture: Fixture, tmp_path: Path, **options: Any) -> Problem:
    options = {"require": (fixture.require,), "out": tmp_path, "robust": 0.0, **options}
    return load(Settings(fixture.model, [fixture.inputs], **options), Observer())


@pytest.mark.parametrize("make", [residual, encoder_decomposed], ids=lambda f: f.__name__)
def test_a_device_gives_what_the_cpu_gives(make: Callable[[], Fixture]) -> None:
    fixture = make()
    sample = Sample("s", fixture.inputs)
    layers = [layer.name for layer in list_layers(fixture.model)]
    for base in REDUCED:
        here = EmulatedRunner(fixture.model, base)
        there = EmulatedRunner(fixture.model, base, device=PLANTED)
        for plan in (
            PrecisionPlan(base),
            PrecisionPlan(base, layers[::2]),
            PrecisionPlan(base, layers[::3], Precision.TF32),
            PrecisionPlan("fp32"),
        ):
            one, other = (next(r.outputs(plan, [sample])) for r in (here, there))
            assert all(np.array_equal(one[n], other[n], equal_nan=True) for n in one)
        wanted = layers[::29]
        one_by_one, others = (dict(r.sensitivities(sample, base, wanted)) for r in (here, there))
        assert set(one_by_one) == set(others) == set(wanted)
        for name in wanted:
            a, b = one_by_one[name], others[name]
            assert a is not None and b is not None
            assert all(np.array_equal(a[n], b[n], equal_nan=True) for n in a)
    assert "emulated on" not in here.versions and there.versions["emulated on"] == "planted"


def test_a_device_maps_weights_that_lie_in_a_file(tmp_path: Path) -> None:
    fixture = residual()
    weights = np.random.default_rng(0).standard_normal((8, 64, 64)).astype(np.float32)
    model = fixture.model
    model.graph.initializer.append(numpy_helper.from_array(weights, "large"))
    model.graph.node.append(helper.make_node("ReduceMax", ["large"], ["most"], "most", keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("most", TensorProto.FLOAT, []))
    apart = onnx.ModelProto()
    apart.CopyFrom(model)
    onnx.save_model(apart, tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    proto, sample = load_model(tmp_path / "m.onnx").proto, Sample("s", fixture.inputs)
    assert any(place_of(t) for t in proto.graph.initializer)
    for plan in (PrecisionPlan("fp16"), PrecisionPlan("fp32")):
        runners = (EmulatedRunner(model), EmulatedRunner(proto, device=PLANTED))
        one, other = (next(r.outputs(plan, [sample])) for r in runners)
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[n], other[n], equal_nan=True) for n in one)


def test_a_weight_is_held_exact_and_rounded_once() -> None:
    graph = Graph(residual().model)
    constants = ConstantStore(graph, PLANTED)
    name = next(n for n, a in graph.float_constants.items() if a.size > 8)
    exact = constants.owner(name)
    low = constants.owner(name, Precision.FP16)
    assert constants.owner(name) is exact and constants.owner(name, Precision.FP16) is low
    array = graph.float_constants[name]
    assert np.array_equal(low.numpy(), array.astype(np.float16).astype(np.float32))
    tf32 = constants.owner(name, Precision.TF32)
    assert constants.owner(name, Precision.TF32) is tf32
    assert constants.owner(name, Precision.FP16) is not low, "one rounded version is kept"


def test_cuda_is_told_to_be_strict() -> None:
    ((provider, options), fallback) = cuda_device("H", 1, 5_000).providers
    assert provider == CUDA_PROVIDER and fallback == "CPUExecutionProvider"
    assert options == {
        "device_id": "1",
        "use_tf32": "0",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": "5000",
    }
    assert "gpu_mem_limit" not in dict(cuda_device().options)
    assert CPU.providers == ["CPUExecutionProvider"]


@pytest.mark.parametrize("precision", REDUCED)
def test_the_check_finds_a_rounding_that_is_another(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong_roundings(CPU, precision) == 0
    run = device_check.run_all

    def one_wrong(session: Any, feed: Mapping[str, Any], where: str) -> dict[str, Any]:
        found = run(session, feed, where)
        return {n: np.where(np.arange(a.size) == 7, np.float32(1e-3), a) for n, a in found.items()}

    monkeypatch.setattr(device_check, "run_all", one_wrong)
    assert wrong_roundings(CPU, precision) == 1
    with pytest.raises(RunnerUnavailableError, match=r"^cpu rounds 1 of \d+ numbers to fp16"):
        DeviceChecker(CPU).check()


def test_awkward_numbers_hold_every_kind() -> None:
    numbers = awkward_numbers()
    assert numbers.dtype == np.float32 and np.isnan(numbers).any() and np.isinf(numbers).any()
    with np.errstate(over="ignore"):
        half = numbers.astype(np.float16).astype(np.float32)
    finite = np.isfinite(numbers)
    assert (np.isinf(half) & finite).any() and ((half == 0) & (numbers != 0)).any()
    assert np.signbit(numbers[numbers == 0]).any()
    size = np.abs(half)
    assert ((size > 0) & (size < 2.0**-14) & (half != numbers)).any(), "subnormal ties"


def test_strict_fp32_is_told_from_tf32() -> None:
    found = strictness(CPU)
    assert found.is_strict and found.product < 1e-6 and found.convolution < 1e-6
    assert 1e-5 < found.product_tf32 < 1e-2 and 1e-5 < found.convolution_tf32 < 1e-2
    as_tf32 = replace(found, convolution=found.convolution_tf32)
    assert not as_tf32.is_strict and not replace(found, product=found.product_tf32).is_strict


def test_a_device_without_strict_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loose = Strictness(3e-4, 3e-4, 1e-7, 3e-4)
    monkeypatch.setattr(device_check, "strictness", lambda _: loose)
    with pytest.raises(RunnerUnavailableError, match=r"no strict FP32.*NVIDIA_TF32_OVERRIDE"):
        DeviceChecker(CPU).check()


@pytest.mark.parametrize(
    "message",
    ["CUDA failure 2: out of memory ; GPU=0", "CUBLAS failure 3: the library", "CUDNN failure 4"],
)
def test_a_gpu_that_gives_out_says_nothing_of_a_plan(message: str) -> None:
    error = RuntimeError(f"Non-zero status code while running Conv node. {message}")
    assert is_gpu_failure(error) and not is_gpu_failure(RuntimeError("Conv: bad shape"))
    told = failure_of_session("the emulated model", error)
    assert isinstance(told, MachineError) and "--emulate-on cpu" in str(told)


def test_cuda_without_its_provider(tmp_path: Path) -> None:
    if CUDA_PROVIDER in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    fixture = healthy()
    model, inputs, out = tmp_path / "m.onnx", tmp_path / "x.npz", tmp_path / "out"
    model.write_bytes(fixture.model.SerializeToString())
    np.savez(inputs, **fixture.inputs)
    asked = ["--out", str(out), "--emulate-on", "cuda"]
    for command in ("run", "compare"):
        said = CliRunner().invoke(
            main,
            [command, str(model), "--input", str(inputs), *asked],
        )
        assert said.exit_code == 3
        assert "--emulate-on cuda: this ONNX Runtime has no CUDA provider: pip " in said.output
        assert said.output.count("\n") == 1 and not out.exists()
    check = next(c for c in examine() if c.name == "emulator on cuda")
    assert check.works is False and "onnxruntime-gpu" in check.detail
    # A build without the provider ignores its name: the session then says so.
    with pytest.warns(UserWarning, match="CUDA"), pytest.raises(RunnerUnavailableError):
        session_as_written(fixture.model, "m", device=cuda_device())


class Bed:
    """What ``--emulate-on`` asks of the machine, planted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reason: str | None = None
        set_ = monkeypatch.setattr
        set_(open_runners, "why_not_on_cuda", lambda: self.reason)
        set_(open_runners, "visible_gpus", lambda: ["4", "6"])
        set_(open_runners, "gpu_facts", lambda gpu: (f"gpu {gpu}", 1_000_000))
        set_(open_runners, "cuda_device", self.device)

    def device(self, name: str, number: int = 0, memory_bytes: int = 0) -> Device:
        self.asked = (name, number, memory_bytes)
        return PLANTED


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


def test_the_emulator_is_on_the_first_gpu(bed: Bed, tmp_path: Path) -> None:
    problem = case_of(healthy(), tmp_path, emulate_on="cuda")
    device = emulator_device(problem.settings)
    assert device == PLANTED and bed.asked == ("gpu 4", 0, 500_000)
    assert open_emulator(problem, device).device == PLANTED


def test_a_gpu_that_does_not_work_is_told_of(bed: Bed) -> None:
    bed.reason = "no usable GPU"
    asked = Settings("m.onnx", [], emulate_on="cuda")
    with pytest.raises(RunnerUnavailableError, match=r"^--emulate-on cuda: no usable GPU$"):
        emulator_device(asked)
    assert emulator_device(Settings("m.onnx", [])) == CPU, "it is asked for"


def test_workers_take_the_gpus_in_turn(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpus_in_turn(["4", "6"], 3) == [{"CUDA_VISIBLE_DEVICES": d} for d in "464"]
    assert gpus_in_turn([], 2) == [{}, {}]
    problem = case_of(healthy(), tmp_path, workers=3, emulate_on="cuda")
    device = emulator_device(problem.settings)
    # This process and two of the three workers share the first GPU, beside an engine maybe.
    assert bed.asked[2] == 500_000 // 3
    monkeypatch.setattr(open_runners, "thread_count", lambda *_: 6)
    local = EmulatedRunner(problem.graph, device=device)
    emulator_pool = open_emulator_pool(problem, local, device, "tests.runners.breaking:Seer")
    assert emulator_pool is not None
    try:
        wanted = ["layer"] * (3 * 12)
        sample = problem.samples[0]
        answers = list(emulator_pool.sensitivities(sample, Precision.FP16, wanted))
        assert sorted(answers) == [("4", "planted"), ("4", "planted"), ("6", "planted")]
        assert emulator_pool.versions["emulated on"] == "planted"
    finally:
        emulator_pool.close()


def test_a_server_checks_its_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = healthy()
    arguments = server_arguments(fixture.model, Precision.FP16, 1, PLANTED)
    monkeypatch.setattr(device_check, "strictness", lambda _: Strictness(1.0, 1.0, 1.0, 1.0))
    with pytest.raises(RunnerUnavailableError, match="planted is no strict FP32"):
        EmulationServer(**arguments)
    EmulationServer(**{**arguments, "device": CPU})


def test_actors_on_ray_take_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, Device]] = []

    def actors(
        address: str, target: str, arguments: Any, count: int, gpus: float, cpus: int
    ) -> list[Any]:
        asked.append((gpus, arguments["device"]))
        return []

    monkeypatch.setattr(open_runners, "ray_actors", actors)
    for runner, emulate_on, gpus in (
        ("emulated", "cuda", 1.0),
        ("auto", "cuda", 0.5),  # an engine may take the other half
        ("emulated", "cpu", 0.0),
    ):
        options = {"ray": "local", "runner": runner, "emulate_on": emulate_on}
        problem = case_of(healthy(), tmp_path, **options)
        device = emulator_device(problem.settings)
        local = open_emulator(problem, device)
        assert local.device == CPU
        emulator_pool = open_emulator_pool(problem, local, device)
        assert emulator_pool is not None and asked[-1] == (gpus, device)
        assert (device.provider == CUDA_PROVIDER) is (emulate_on == "cuda")
        assert ("emulated on" in emulator_pool.versions) is (emulate_on == "cuda")


def test_a_whole_run_on_a_device(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answer as on the CPU, under keys of its own; a repeated command runs nothing."""
    fixture = branch()

    def run(out: str, emulate_on: str) -> Any:
        return bisect_trt.bisect(
            fixture.model,
            fixture.inputs,
            require=fixture.require,
            runner="emulated",
            out=tmp_path / out,
            robust=0,
            emulate_on=emulate_on,
        )

    here, there = run("cpu", "cpu"), run("cuda", "cuda")
    assert there.pinned == here.pinned and there.passed and here.passed
    written = json.loads((tmp_path / "cuda" / "run.json").read_text())
    assert written["versions"]["emulated on"] == "planted"
    assert "emulated on" not in here.versions
    assert run("cuda", "cuda").new_evaluations == 0
    assert run("cuda", "cpu").new_evaluations > 0


def test_draws_are_referred_to_fp32_on_the_device(bed: Bed, tmp_path: Path) -> None:
    """The given inputs to ONNX Runtime on the CPU, as always; more copies fit into the same
    time."""
    fixture = healthy()
    (name,) = fixture.inputs
    copied = Sample("drawn", {name: 1.5 * fixture.inputs[name]}, True)
    usual, asked = [], []
    for emulate_on in ("cpu", "cuda"):
        problem = case_of(fixture, tmp_path / emulate_on, emulate_on=emulate_on)
        with open_context(problem, Observer()) as context:
            usual.append(context.pace.usual_seconds)
            on_device = context.emulator.device == PLANTED
            asked.clear()
            context.emulator.outputs = lambda plan, samples: asked.append(plan) or iter([{}])
            exact = context.references.of(problem.samples[0])
            other = context.references.of(copied)
        assert exact and bool(other) is not on_device
        assert [p.base for p in asked] == ([Precision.FP32] if on_device else [])
    assert usual[1] < usual[0]


def test_the_driver_s_tool_is_asked_for_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 1000'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ort_devices.gpu_facts("0") == ("NVIDIA H200", 1000 << 20)
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1'\n")
    assert ort_devices.gpu_versions("0") == {"gpu": "NVIDIA H200", "driver": "580.1"}
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert ort_devices.gpu_versions("0") == {}
    assert ort_devices.gpu_facts("0") == ("cuda", 0)
    tool.unlink()
    assert ort_devices.gpu_facts("0") == ("cuda", 0) and ort_devices.visible_gpus() == []


def test_clocks_and_processes_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    answers = '*compute-apps*) printf "%b" "$APPS" ;; *clocks*) echo "$CLOCKS" ;;'
    tool.write_text(f'#!/bin/sh\ncase "$*" in {answers} esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CLOCKS", "1755, 1980")
    monkeypatch.setenv("APPS", "4711\\n4712\\n")
    assert ort_devices.gpu_condition() == ort_devices.GpuCondition(1755, 1980, 2)
    monkeypatch.setenv("APPS", "")
    assert ort_devices.gpu_condition() == ort_devices.GpuCondition(1755, 1980, None)
    monkeypatch.setenv("CLOCKS", "[N/A], 1980")
    assert ort_devices.gpu_condition() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ort_devices.gpu_condition() is None


def test_the_plugin_for_tensorrt_rtx_is_named_where_it_is_missing(tmp_path: Path) -> None:
    if OrtRtxRunner.why_not() is None:
        pytest.skip("the plugin is installed")
    fixture = healthy()
    model, inputs, out = tmp_path / "m.onnx", tmp_path / "x.npz", tmp_path / "out"
    model.write_bytes(fixture.model.SerializeToString())
    np.savez(inputs, **fixture.inputs)
    for command in ("run", "compare", "reduce"):
        asked = ["--input", str(inputs), "--runner", "onnxruntime-rtx", "--out", str(out)]
        said = CliRunner().invoke(main, [command, str(model), *asked])
        assert said.exit_code == 3, said.output
        assert "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13" in said.output
        assert said.output.count("\n") == 1 and not out.exists()
    check = next(c for c in examine() if c.name == "runner onnxruntime-rtx")
    assert check.works is False and "[ort-rtx]" in check.detail
