"""The process that runs engines, over a CUDA and a TensorRT made of host memory: what engines are
given, how often they run, and what is noticed of one that writes beside its buffers.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.runners.tensorrt import inspecting, timing, worker
from bisect_trt.runners.tensorrt.records import Built, EngineRequest

SUCCESS = SimpleNamespace(name="cudaSuccess")


class HostMemory:
    """CUDA's runtime, whose device memory is this process's own."""

    cudaError_t = SimpleNamespace(  # noqa: N815 (CUDA's name)
        cudaSuccess=SUCCESS, cudaErrorMemoryAllocation=None
    )
    cudaMemcpyKind = SimpleNamespace(  # noqa: N815 (CUDA's name)
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2
    )
    cudaStreamCaptureMode = SimpleNamespace(  # noqa: N815 (CUDA's name)
        cudaStreamCaptureModeThreadLocal=1
    )
    answers: dict[str, tuple[Any, ...]] = {  # noqa: RUF012 (never changed)
        "cudaStreamCreate": (7,),
        "cudaMemGetInfo": (1 << 33, 1 << 34),
        "cudaEventCreate": (0,),
        "cudaStreamEndCapture": (0,),
        "cudaGraphInstantiate": (0,),
        "cudaEventElapsedTime": (0.5,),
        "cudaGetDevice": (0,),
        "cudaGetDeviceProperties": (SimpleNamespace(name=b"Host", major=9, minor=0),),
        "cudaDriverGetVersion": (12080,),
        "cudaRuntimeGetVersion": (13000,),
    }

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        return lambda *_: (SUCCESS, *self.answers.get(name, ()))

    def cudaMalloc(self, size: int) -> tuple[Any, int]:  # noqa: N802 (CUDA's name)
        block = ctypes.create_string_buffer(size)
        self.blocks[ctypes.addressof(block)] = block
        return SUCCESS, ctypes.addressof(block)

    def cudaFree(self, pointer: int) -> tuple[Any]:  # noqa: N802 (CUDA's name)
        del self.blocks[pointer]
        return (SUCCESS,)

    def cudaMemsetAsync(self, pointer: int, byte: int, size: int, _: int) -> tuple[Any]:  # noqa: N802
        ctypes.memset(pointer, byte, size)
        return (SUCCESS,)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, *_: int) -> tuple[Any]:  # noqa: N802
        ctypes.memmove(to, source, size)
        return (SUCCESS,)


class Engine:
    """Gives its input twice over, and runs in contexts that it makes."""

    num_io_tensors = 2

    def __init__(self) -> None:
        self.runs = self.written_beside = 0
        self.shapes: list[tuple[int, ...]] = []

    def get_tensor_name(self, number: int) -> str:
        return "xy"[number]

    def get_tensor_mode(self, name: str) -> str:
        return name

    def get_tensor_location(self, name: str) -> str:
        return "device"

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="FLOAT")

    def create_execution_context(self) -> Context:
        return Context(self)

    def create_engine_inspector(self) -> Any:
        layers = {"Layers": [{"Name": "fused", "Metadata": "[ONNX Layer: double]"}]}
        return SimpleNamespace(get_engine_information=lambda _: json.dumps(layers))


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.addresses: dict[str, int] = {}
        self.shape: tuple[int, ...] = ()
        self.allocator: Any = None

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = tuple(shape)
        self.engine.shapes.append(self.shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def set_output_allocator(self, name: str, allocator: Any) -> None:
        self.allocator = allocator

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def execute_async_v3(self, stream: int) -> bool:
        count = int(np.prod(self.shape))
        given = ctypes.cast(self.addresses["x"], ctypes.POINTER(ctypes.c_float))
        result = 2 * np.ctypeslib.as_array(given, shape=(count,))
        if self.allocator is not None:
            size = result.nbytes
            self.addresses["y"] = self.allocator.reallocate_output_async("y", 0, size, 256, stream)
            self.allocator.notify_shape("y", self.shape)
        ctypes.memmove(self.addresses["y"], result.ctypes.data, result.nbytes)
        ctypes.memset(self.addresses["y"] + result.nbytes, 0, self.engine.written_beside)
        self.engine.runs += 1
        return True


class Profiled(Context):
    """A context that tells its profiler of two kernels of one layer."""

    profiler: Any = None

    def execute_async_v3(self, stream: int) -> bool:
        for _ in range(2 if self.profiler is not None else 0):
            self.profiler.report_layer_time("fused", 0.25)
        return super().execute_async_v3(stream)


class Base:
    """Of what TensorRT lets one derive from."""


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def engine(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    trt = SimpleNamespace(
        __name__="tensorrt",
        __version__="10.0",
        ILogger=Base,
        IOutputAllocator=Base,
        IProfiler=Base,
        TensorIOMode=SimpleNamespace(INPUT="x"),
        TensorLocation=SimpleNamespace(HOST="host"),
        LayerInformationFormat=SimpleNamespace(JSON=0),
        NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1),
        BuilderFlag=SimpleNamespace(),
        Runtime=lambda _: SimpleNamespace(deserialize_cuda_engine=lambda _: made),
        nptype=lambda _: np.float32,
    )
    built = Built(b"123", {"build": 2.0}, {"double": ("FLOAT",)}, [("WARNING", "slow")])
    for module in (worker, timing, inspecting):
        monkeypatch.setattr(module, "import_tensorrt", lambda _: trt)
        monkeypatch.setattr(module, "import_cuda", lambda: memory)
    for module in (worker, timing):
        monkeypatch.setattr(module, "build_engine", lambda *_: built)
    return made


REQUEST = EngineRequest(b"", {}, False, key="this one", measure_latency=False)
SAMPLES = [{"x": np.array(0.5, np.float32)}, {"x": np.ones((3, 2), np.float32).T}]


@pytest.mark.usefixtures("engine")
def test_it_says_what_it_runs_on() -> None:
    assert worker.EngineWorker(None).describe() == {
        "tensorrt": "10.0",
        "gpu": "Host",
        "compute_capability": "9.0",
        "cuda_driver": "12.8",
        "cuda_runtime": "13.0",
    }


def test_samples_are_run_repeatedly_and_the_engine_is_kept(
    engine: Engine, memory: HostMemory, tmp_path: Path
) -> None:
    asked = worker.EngineWorker(None, str(tmp_path / "caches"))
    answer = asked.evaluate(REQUEST, SAMPLES, 3)
    assert engine.runs == 6 and [[count for _, count in a] for a in answer.answers] == [[3], [3]]
    for sample, ((outputs, _),) in zip(SAMPLES, answer.answers, strict=True):
        np.testing.assert_array_equal(outputs["y"], 2 * sample["x"])
    # A scalar stays one, and rows lie behind each other.
    assert set(engine.shapes) == {(), (2, 3)}
    assert answer.engine_bytes == 3 and answer.layers[0].nodes == ("double",)
    assert answer.messages == [("WARNING", "slow")] and np.isnan(answer.latency_ms)
    again = asked.again("this one", SAMPLES[:1], 1)
    assert again is not None and engine.runs == 7 and len(again.answers) == 1
    assert asked.again("another", SAMPLES, 1) is None
    assert not memory.blocks, "all memory was given back"


def test_latency_is_the_device_s(engine: Engine) -> None:
    request = EngineRequest(b"", {}, False, key="timed")
    answer = worker.EngineWorker(None).evaluate(request, SAMPLES[:1], 1)
    assert answer.latency_ms == 0.5 and answer.seconds["latency"] > 0.3 and engine.runs > 10


def test_an_engine_that_writes_beside_its_buffers_is_not_believed(
    engine: Engine, memory: HostMemory
) -> None:
    engine.written_beside = 4
    with pytest.raises(RunnerFailedError, match=r"outside .* beside tensor 'y'") as caught:
        worker.EngineWorker(None).evaluate(REQUEST, SAMPLES, 1)
    assert caught.value.lost and not memory.blocks


def test_engines_are_stored_and_take_turns(
    engine: Engine, memory: HostMemory, tmp_path: Path
) -> None:
    file = tmp_path / "engine"
    stored = timing.StoringWorker(None).store(REQUEST, str(file), SAMPLES[1])
    assert file.read_bytes() == b"123" and engine.runs == 1
    timed = timing.TimingWorker(None).time({"a": stored, "b": stored}, SAMPLES[1], 3)
    assert list(timed.times) == ["a", "b"] and timed.condition is None
    for found in timed.times.values():
        assert found == timing.RoundTimes((0.5,) * 3, (0.5,) * 3)
    assert not memory.blocks, "all memory was given back"


def test_an_engine_that_no_graph_captures_is_timed_plainly(
    engine: Engine, memory: HostMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SimpleNamespace(name="cudaErrorStreamCaptureInvalidated")
    monkeypatch.setattr(memory, "cudaStreamEndCapture", lambda _: (failed, 0), raising=False)
    stored = timing.StoringWorker(None).store(REQUEST, str(tmp_path / "engine"), None)
    assert engine.runs == 0, "without a sample nothing runs"
    found = timing.TimingWorker(None).time({"a": stored}, SAMPLES[1], 2).times["a"]
    assert found.plain_ms == (0.5, 0.5) and np.isnan(found.graph_ms).all()


def test_an_engine_that_cannot_run_leaves_the_others_their_turns(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = timing.StoringWorker(None).store(REQUEST, str(tmp_path / "engine"), None)
    full = RunnerFailedError("no memory", Verdict.CRASHED, lost=True, machine=True)
    failures = [full]

    def make_context() -> Context:
        if failures:
            raise failures.pop()
        return Context(engine)

    monkeypatch.setattr(engine, "create_execution_context", make_context)
    times = timing.TimingWorker(None).time({"a": stored, "b": stored}, SAMPLES[1], 2).times
    assert times["a"].failure == "no memory" and times["b"].plain_ms == (0.5, 0.5)


def test_a_stored_engine_is_read_back_and_runs_only_where_asked(
    engine: Engine, memory: HostMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engine"
    file.write_bytes(b"123")
    tuned: dict[str, Any] = {
        "create_execution_context": lambda: Profiled(engine),
        "get_tensor_shape": lambda _: (-1, 3),
        "get_tensor_profile_shape": lambda _, index: [(1, 3), (4, 3), (8, 3)],
        "is_shape_inference_io": lambda _: False,
    }
    for name, method in tuned.items():
        monkeypatch.setattr(engine, name, method, raising=False)
    asked = inspecting.InspectingWorker("tensorrt")
    found = asked.inspect(str(file), run=False)
    assert json.loads(found.information)["Layers"][0]["Name"] == "fused"
    assert engine.runs == 0 and found.times_ms == {}
    assert asked.inspect(str(file), run=True).times_ms == {"fused": 0.5}
    assert engine.runs > inspecting.TIMED_RUNS and set(engine.shapes) == {(4, 3)}
    assert not memory.blocks, "all memory was given back"
