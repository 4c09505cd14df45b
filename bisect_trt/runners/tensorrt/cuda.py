"""The few CUDA calls an engine needs, through cuda-python."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.core.verdict import Verdict


def import_cuda() -> Any:
    """cuda-python's runtime module.

    Raises:
        RunnerUnavailableError: it or a GPU is missing.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise RunnerUnavailableError(
            f"cuda-python cannot be imported ({error}): pip install cuda-python"
        ) from error
    code, count = runtime.cudaGetDeviceCount()
    if code != runtime.cudaError_t.cudaSuccess or count == 0:
        raise RunnerUnavailableError(
            f"no usable GPU ({code.name}): engines can be built here but not run; use --runner "
            "emulated"
        )
    return runtime


class Cuda:
    """A stream and what is done on it. Every failure raises :class:`RunnerFailedError` with CUDA's
    name for it: the process has lost its device then, for whatever comes next, or there was no
    memory.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.stream: int = int(self._checked(runtime.cudaStreamCreate()))

    def _checked(self, result: tuple[Any, ...]) -> Any:
        code, *values = result
        known = self._runtime.cudaError_t
        if code == known.cudaErrorMemoryAllocation:
            raise RunnerFailedError(
                f"the GPU's memory does not suffice ({code.name})", Verdict.CRASHED, machine=True
            )
        if code != known.cudaSuccess:
            raise RunnerFailedError(f"CUDA failed: {code.name}", Verdict.CRASHED, lost=True)
        return values[0] if len(values) == 1 else values

    def free_bytes(self) -> int:
        """What of the device's memory nobody has taken."""
        return int(self._checked(self._runtime.cudaMemGetInfo())[0])

    def allocate(self, size: int) -> int:
        """A device pointer to ``size`` bytes (at least one)."""
        return int(self._checked(self._runtime.cudaMalloc(max(1, size))))

    def free(self, pointer: int) -> None:
        """Give memory back."""
        self._checked(self._runtime.cudaFree(pointer))

    def with_own_stream(self) -> Cuda:
        """The same device with a stream of its own."""
        return Cuda(self._runtime)

    def close(self) -> None:
        """Give the stream back."""
        self._checked(self._runtime.cudaStreamDestroy(self.stream))

    def fill(self, pointer: int, byte: int, size: int) -> None:
        """Set memory to one byte's value, in the stream's order.

        Args:
            pointer: where on the device.
            byte: the value.
            size: how many bytes.
        """
        self._checked(self._runtime.cudaMemsetAsync(pointer, byte, size, self.stream))

    def upload(self, pointer: int, array: NDArray[Any]) -> None:
        """Copy a contiguous array to the device, in the stream's order."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._checked(
            self._runtime.cudaMemcpyAsync(
                pointer, array.ctypes.data, array.nbytes, kind, self.stream
            )
        )

    def download(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Copy an array from the device; complete when this returns.

        Args:
            pointer: the address on the device.
            shape: of the array.
            dtype: of its elements.
        """
        array = np.empty(shape, dtype)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        if array.nbytes:
            self._checked(
                self._runtime.cudaMemcpyAsync(
                    array.ctypes.data, pointer, array.nbytes, kind, self.stream
                )
            )
        self.synchronise()
        return array

    def synchronise(self) -> None:
        """Wait until the stream has done all it was given."""
        self._checked(self._runtime.cudaStreamSynchronize(self.stream))

    def event(self) -> Any:
        """A mark in time."""
        return self._checked(self._runtime.cudaEventCreate())

    def destroy(self, event: Any) -> None:
        """Give ``event`` back."""
        self._checked(self._runtime.cudaEventDestroy(event))

    def record(self, event: Any) -> None:
        """Put ``event`` into the stream."""
        self._checked(self._runtime.cudaEventRecord(event, self.stream))

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two recorded events, once the second has happened."""
        self._checked(self._runtime.cudaEventSynchronize(end))
        return float(self._checked(self._runtime.cudaEventElapsedTime(begin, end)))

    def device(self) -> dict[str, str]:
        """The GPU's name and compute capability, and the versions of driver and runtime."""
        number = self._checked(self._runtime.cudaGetDevice())
        properties = self._checked(self._runtime.cudaGetDeviceProperties(number))
        driver = self._checked(self._runtime.cudaDriverGetVersion())
        runtime = self._checked(self._runtime.cudaRuntimeGetVersion())
        return {
            "gpu": properties.name.decode()
            if isinstance(properties.name, bytes)
            else str(properties.name),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
            "cuda_runtime": f"{runtime // 1000}.{runtime % 1000 // 10}",
        }
