"""Whether a device computes strict FP32, and rounds bit for bit as NumPy does.

Asked in a child process, because a driver that is broken may take its process along.
"""

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
_CHECK_TIMEOUT_S = 120.0

_STRICTNESS_FACTOR = 8.0
"""How much smaller than TF32's an FP32 error must be; a Winograd convolution's is ten times."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Strictness:
    """The largest relative errors of a matrix product and a convolution, and those of TF32."""

    product: float
    product_tf32: float
    convolution: float
    convolution_tf32: float

    @property
    def is_strict(self) -> bool:
        """Whether both are FP32."""
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
    """Why the emulator cannot run on the GPU that a process sees first; None where it can."""
    missing = why_no_provider()
    if missing is not None:
        return missing
    with IsolatedWorker(CHECKER, {"device": cuda_device()}) as worker:
        try:
            worker.call("check", timeout_s=_CHECK_TIMEOUT_S)
        except BisectError as error:
            return one_line(error)
    return None


class DeviceChecker:
    """The child's side."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def check(self) -> Strictness:
        """How strict FP32 is.

        Raises:
            RunnerUnavailableError: it is TF32, a rounding is another one, or nothing runs.
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
    steps = [np.arange(1 << 16, dtype=np.uint16).view(f).astype(np.float32) for f in formats]
    every = np.concatenate(steps)
    every = np.sort(every[np.isfinite(every)])
    # Midway between neighbours, and one float beside that.
    ties = (every[1:].astype(np.float64) + every[:-1]) / 2
    middle = ties.astype(np.float32)
    beside = [np.nextafter(middle, np.float32(s * np.inf)) for s in (1, -1)]
    random = np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65520.0, 3.4e38], np.float32)
    return np.concatenate([every, middle, *beside, random, special])


def wrong_roundings(device: Device, precision: Precision) -> int:
    """How many of :func:`awkward_numbers` ``device`` rounds otherwise than NumPy."""
    numbers = awkward_numbers()
    if precision is Precision.TF32:
        # Splitting makes NaN of what is too large to be split, which NumPy's side leaves alone, and
        # whether floats that are subnormal themselves are kept is the device's own business.
        size = np.abs(numbers)
        numbers = numbers[(size == 0.0) | ((size >= 2.0**-126) & (size < 1e34))]
    model = rounding_model(precision)
    session = session_as_written(model, "a rounding", device=device)
    got = run_all(session, {"x": numbers}, "a rounding")["y"]
    wanted = rounded(numbers, precision)
    same = (got.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(got) & np.isnan(wanted))
    return int(same.size - np.count_nonzero(same))


def strictness(device: Device) -> Strictness:
    """The errors of ``device`` on seeded numbers."""
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
    """The largest error of ``operator`` on ``device``, and TF32's, over the largest result."""
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
    """Without padding, of strides 1: (1, c, h, w) and (m, c, kh, kw) to (1, m, h - kh + 1, ...)."""
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    found: NDArray[np.float64] = np.einsum("nchwij,mcij->nmhw", windows, w, optimize=True)
    return found
