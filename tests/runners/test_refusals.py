"""What is blamed on a plan and what on the machine where a GPU or TensorRT fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bisect_trt.base.errors import MachineError, RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.runners.tensorrt.buffers import Buffers, Cuda
from bisect_trt.runners.tensorrt.build import refusal


class Code(SimpleNamespace):
    """One of CUDA's."""


SUCCESS, NO_MEMORY, ILLEGAL = (
    Code(name=f"cuda{name}") for name in ("Success", "ErrorMemoryAllocation", "ErrorIllegalAddress")
)


class Runtime:
    """CUDA's, whose next answer is ``code``."""

    cudaError_t = SimpleNamespace(  # noqa: N815 (CUDA's name)
        cudaSuccess=SUCCESS, cudaErrorMemoryAllocation=NO_MEMORY
    )

    def __init__(self) -> None:
        self.code, self.free = SUCCESS, 0

    def cudaMemGetInfo(self) -> tuple[Code, int, int]:  # noqa: N802 (CUDA's name)
        return self.code, self.free, 80 << 30

    def cudaStreamCreate(self) -> tuple[Code, int]:  # noqa: N802 (CUDA's name)
        return SUCCESS, 1

    def cudaMalloc(self, size: int) -> tuple[Code, int]:  # noqa: N802 (CUDA's name)
        return self.code, 4096


@pytest.mark.parametrize(("code", "machine"), [(NO_MEMORY, True), (ILLEGAL, False)])
def test_what_cuda_says(code: Code, machine: bool) -> None:
    runtime = Runtime()
    cuda = Cuda(runtime)
    runtime.code = code
    with pytest.raises(RunnerFailedError, match=code.name) as caught:
        cuda.allocate(1)
    assert caught.value.lost and caught.value.machine is machine
    if machine:
        with pytest.raises(MachineError, match=r"memory does not suffice .*; nothing is concluded"):
            caught.value.blamed_on_model()
    else:
        assert caught.value.blamed_on_model() is caught.value


@pytest.mark.parametrize(
    ("severity", "said", "machine"),
    [
        # Words of TensorRT for RTX 1.6.1.120 on an H100 that others had filled.
        ("ERROR", "Cuda Runtime (In allocate at x.cpp:62 (cudaError 2: out of memory))", True),
        ("ERROR", "Error Code 2: OutOfMemory (Requested size was 142409728 bytes.)", True),
        ("ERROR", "Error Code 1: Cuda Runtime (an illegal memory access was encountered)", False),
        ("WARNING", "a tactic was left out: out of memory", False),
    ],
)
@pytest.mark.parametrize("verdict", [Verdict.CRASHED, Verdict.BUILD_FAILED])
def test_what_tensorrt_says(verdict: Verdict, severity: str, said: str, machine: bool) -> None:
    logger = SimpleNamespace(messages=[(severity, said)])
    error = refusal("the engine could not be executed", verdict, logger)
    assert error.verdict is verdict and error.log == (f"[{severity}] {said}",)
    assert error.machine is machine
    assert error.lost is (machine or verdict is Verdict.CRASHED)


@pytest.mark.parametrize(
    ("code", "free", "machine"),
    [(SUCCESS, 9 << 20, True), (SUCCESS, 9 << 30, False), (ILLEGAL, 9 << 20, False)],
)
def test_a_library_that_has_no_memory_may_say_something_else(
    code: Code, free: int, machine: bool
) -> None:
    logger = SimpleNamespace(messages=[("ERROR", "Myelin: CUDNN_STATUS_INTERNAL_ERROR")])
    runtime = Runtime()
    cuda = Cuda(runtime)
    runtime.code, runtime.free = code, free
    assert refusal("no context", Verdict.CRASHED, logger, cuda).machine is machine


def test_an_output_without_memory_is_no_exception_inside_tensorrt() -> None:
    class Scarce:
        def allocate(self, size: int) -> int:
            if size > 2048:
                raise RunnerFailedError("no memory", machine=True)
            return 4096

        def fill(self, *_: object) -> None:
            pass

        def free(self, *_: object) -> None:
            pass

    class Context:
        engine = SimpleNamespace(
            num_io_tensors=1,
            get_tensor_name=lambda _: "y",
            get_tensor_mode=lambda _: 1,
        )

        def set_output_allocator(self, name: str, allocator: Any) -> None:
            self.allocator = allocator

    class Base:
        def __init__(self) -> None:
            pass

    trt = SimpleNamespace(TensorIOMode=SimpleNamespace(INPUT=0), IOutputAllocator=Base)
    context = Context()
    with Buffers(trt, Scarce(), context, {}) as buffers:  # type: ignore[arg-type]
        assert context.allocator.reallocate_output("y", 0, 16, 1) and buffers.failure is None
        assert context.allocator.reallocate_output("y", 0, 1 << 20, 1) == 0
        assert buffers.failure is not None and buffers.failure.machine
