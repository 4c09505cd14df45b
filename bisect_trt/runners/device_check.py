"""Checks that a device computes strict FP32 and rounds bit for bit as NumPy does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bisect_trt.base.errors import BisectError, RunnerUnavailableError, one_line
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.rounding import rounded
from bisect_trt.model.emulated import rounding_model
from bisect_trt.runners.device import Device, cuda_device, why_no_provider
from bisect_trt.runners.ort_session import run_all, session_as_written
from bisect_trt.runners.process import IsolatedWorker

CHECKER = "bisect_trt.runners.device_check:DeviceChecker"
_STRICTNESS_FACTOR = 8.0
"""How much smaller than TF32's an error must be to be FP32's."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Strictness:
    """Largest relative errors of a matrix product and a convolution: the device's, and TF32's."""

    product: float
    product_tf32: float
    convolution: float
    convolution_tf32: float

    @property
    def is_strict(self) -> bool:
        """True if both operations are FP32."""
        # The FP32 error of a Winograd convolution is only about ten times smaller than TF32's.
        return (
            self.product < self.product_tf32 / _STRICTNESS_FACTOR
            and self.convolution < self.convolution_tf32 / _STRICTNESS_FACTOR
        )

    def __str__(self) -> str:
        return (
            f"matrix product off by {self.product:.1e} (TF32 {self.product_tf32:.1e}), "
            f"convolution by {self.convolution:.1e} ({self.convolution_tf32:.1e})"
        )


def why_not_on_cuda() -> str | None:
    """Says why the emulator cannot run on this process' first GPU; None where it can."""
    missing = why_no_provider()
    if missing is not None:
        return missing
    # In a child process, because a broken driver may end the process that asks it.
    with IsolatedWorker(CHECKER, {"device": cuda_device()}) as worker:
        try:
            worker.call("check", timeout_s=120.0)
        except BisectError as error:
            return one_line(error)
    return None


class DeviceChecker:
    """Checks a device, in the child process."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def check(self) -> Strictness:
        """Returns how strict the device's FP32 is.

        Raises:
            RunnerUnavailableError: FP32 is TF32, a rounding differs, or nothing runs.
        """
        for precision in (Precision.FP16, Precision.BF16, Precision.TF32):
            wrong = wrong_roundings(self._device, precision)
            if wrong:
                raise RunnerUnavailableError(
                    f"{self._device.name} rounds {wrong} of {awkward_numbers().size} numbers to "
                    f"{precision.value} otherwise than IEEE 754: please report it"
                )
        found = strictness(self._device)
        if not found.is_strict:
            raise RunnerUnavailableError(
                f"FP32 on {self._device.name} is no strict FP32: {found}; unset "
                "NVIDIA_TF32_OVERRIDE where it is set"
            )
        return found


def awkward_numbers() -> Float32:
    """Numbers at which roundings differ: ties, ends of ranges, subnormals, infinities and NaN."""
    formats = (np.float16, ml_dtypes.bfloat16)
    values = [np.arange(1 << 16, dtype=np.uint16).view(f).astype(np.float32) for f in formats]
    every = np.concatenate(values)
    every = np.sort(every[np.isfinite(every)])
    # Ties lie midway between neighbours; one FP32 step beside a tie the rounding is decided.
    middle = ((every[1:].astype(np.float64) + every[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(s * np.inf)) for s in (1, -1)]
    random = np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65520.0, 3.4e38], np.float32)
    return np.concatenate([every, middle, *beside, random, special])


def wrong_roundings(device: Device, precision: Precision) -> int:
    """Counts the :func:`awkward_numbers` that ``device`` rounds otherwise than NumPy."""
    numbers = awkward_numbers()
    if precision is Precision.TF32:
        # The emulated model rounds to TF32 by splitting, which makes NaN of the largest numbers;
        # NumPy's rounding keeps them. A device may flush FP32's own subnormals.
        size = np.abs(numbers)
        numbers = numbers[(size == 0.0) | ((size >= 2.0**-126) & (size < 1e34))]
    model = rounding_model(precision)
    session = session_as_written(model, "a rounding", device=device)
    got = run_all(session, {"x": numbers}, "a rounding")["y"]
    wanted = rounded(numbers, precision)
    same = (got.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(got) & np.isnan(wanted))
    return int(same.size - np.count_nonzero(same))


def strictness(device: Device) -> Strictness:
    """Measures the errors of ``device`` on seeded random numbers."""
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> Float32:
        return random.standard_normal(shape).astype(np.float32)

    product = _errors(device, "MatMul", numbers(64, 512), numbers(512, 96), np.matmul)
    convolution = _errors(
        device, "Conv", numbers(1, 64, 24, 24), numbers(32, 64, 3, 3), _convolution
    )
    return Strictness(*product, *convolution)


def _errors(
    device: Device,
    operator: str,
    a: Float32,
    b: Float32,
    exact: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
) -> tuple[float, float]:
    """The largest errors of ``operator`` on ``device`` and of TF32, over the largest result."""
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, shape)
        for n, shape in (("a", a.shape), ("b", b.shape), ("y", None))
    ]
    graph = helper.make_graph(
        [helper.make_node(operator, ["a", "b"], ["y"], "node")], operator, values[:2], values[2:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = session_as_written(model, operator, device=device)
    got = run_all(session, {"a": a, "b": b}, operator)["y"]
    right = exact(a.astype(np.float64), b.astype(np.float64))
    low = [rounded(x, Precision.TF32).astype(np.float64) for x in (a, b)]
    size = float(np.abs(right).max())
    return float(np.abs(got - right).max()) / size, float(np.abs(exact(*low) - right).max()) / size


def _convolution(x: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convolves (n, c, h, w) with (m, c, kh, kw): strides 1, no padding, in FP64."""
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    found: NDArray[np.float64] = np.einsum("nchwij,mcij->nmhw", windows, w, optimize=True)
    return found
