"""Opens and runs ONNX Runtime's sessions, without copying weights where possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.errors import (
    NO_THREADS,
    BadInputError,
    BisectError,
    MachineError,
    RunnerFailedError,
    RunnerUnavailableError,
    is_gpu_failure,
    is_out_of_memory,
    is_out_of_threads,
    one_line,
)
from bisect_trt.base.limits import thread_count
from bisect_trt.base.plan import Precision
from bisect_trt.model.save import session_form
from bisect_trt.model.tensor_values import array_of, place_of
from bisect_trt.runners.device import CPU, Device, load_cuda_libraries
from bisect_trt.runners.values import attach, owned

RoundedConstants = Callable[[str, Precision], ort.OrtValue]
"""Gives a constant by name, rounded."""

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""The session option for the folder of external weights."""

INEXACT = ("DoubleQDQPairsRemover",)
"""Optimisations that change numbers by more than rounding: one quantisation instead of two."""


def opened(
    model: onnx.ModelProto | Callable[[], onnx.ModelProto],
    options: ort.SessionOptions,
    constants: RoundedConstants | None = None,
    *,
    shares_weights: bool = False,
    device: Device = CPU,
    without: Sequence[str] = (),
) -> ort.InferenceSession:
    """Opens a session over ``model``; ``without`` names optimisations to leave out.

    Raises:
        RunnerUnavailableError: the device does not start.
        Exception: ONNX Runtime's own, where it cannot load the model.
    """
    # CUDA's kernels may give another answer at each run otherwise.
    options.use_deterministic_compute = device != CPU
    if device != CPU:
        load_cuda_libraries()
    with session_form(model() if callable(model) else model) as form:
        if form.folder:
            options.add_session_config_entry(WEIGHTS_FOLDER, form.folder)
        shared = form.mapped if shares_weights else ()
        values = [owned(array_of(tensor)) for tensor in shared]
        for tensor, value in zip(shared, values, strict=True):
            options.add_initializer(tensor.name, value)
        rounded = [_rounded(tensor, constants) for tensor in form.rounded]
        if rounded:
            # These are copied: of a shared one, optimisations would read the unrounded file.
            options.add_external_initializers([t.name for t in form.rounded], rounded)
        # No fallback: it prints, and computes on another device.
        session = ort.InferenceSession(
            form.content,
            options,
            providers=device.providers,
            enable_fallback=0,
            disabled_optimizers=[*INEXACT, *without],
        )
    check_provider(session, device.provider)
    attach(session, values)
    return session


def check_provider(session: ort.InferenceSession, provider: str) -> None:
    """Raises RunnerUnavailableError if ``session`` runs without ``provider``."""
    if provider not in session.get_providers():
        raise RunnerUnavailableError(
            "ONNX Runtime's CUDA provider does not start here: no usable GPU, or CUDA libraries "
            "are missing"
        )


def _rounded(tensor: onnx.TensorProto, constants: RoundedConstants | None) -> ort.OrtValue:
    place = place_of(tensor)
    assert place is not None and place.rounding is not None
    if constants is None:
        return owned(array_of(tensor))
    return constants(place.source, place.rounding)


Arrays = dict[str, NDArray[Any]]


def session_options(threads: int = 0) -> ort.SessionOptions:
    """The options of every session; a call may use ``threads``, 0 for all cores."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # The default ignores CPU quotas, and pins threads to cores that other processes use.
    options.intra_op_num_threads = thread_count(threads)
    options.inter_op_num_threads = 1  # nodes run one after the other
    # Spinning threads would take the time of other busy processes.
    for pool in ("intra_op", "inter_op"):
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
    # Each session of a model would keep the memory of freed activations.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    return options


def reference_session(
    model: onnx.ModelProto | Callable[[], onnx.ModelProto],
    where: str = "model",
    *,
    quantised: bool = False,
    shares_weights: bool = False,
    constants: RoundedConstants | None = None,
    without: Sequence[str] = (),
    threads: int = 0,
) -> ort.InferenceSession:
    """Opens a session over a whole model, with ONNX Runtime's default optimisations.

    Raises:
        BadInputError: ONNX Runtime cannot load the model.
        MachineError: there is not enough memory.
    """
    options = session_options(threads)
    # Fusions of quantised operators change the outputs by far more than FP32 rounding.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if shares_weights:  # prepacking copies weights too
        options.add_session_config_entry("session.disable_prepacking", "1")
    # Above EXTENDED weights are copied into other layouts, and quantised operators change results.
    if quantised or shares_weights:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    try:
        return opened(model, options, constants, shares_weights=shares_weights, without=without)
    except BisectError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        if is_out_of_memory(error) or is_out_of_threads(error):
            raise failure_of_session(where, error) from error
        raise BadInputError(f"{where}: ONNX Runtime cannot load it ({one_line(error)})") from error


def node_session(model: onnx.ModelProto, threads: int = 0) -> ort.InferenceSession:
    """Opens a session over one node and its roundings, exactly as written."""
    # Each session owns its threads, there may be thousands, and one node feeds 8 at most.
    options = session_options(min(thread_count(threads), 8))
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return opened(model, options)


def session_as_written(
    model: onnx.ModelProto,
    where: str,
    threads: int = 0,
    device: Device = CPU,
) -> ort.InferenceSession:
    """Opens a session without optimisations: marking a tensor as an output changes no number.

    Raises:
        RunnerFailedError: ONNX Runtime cannot load the model.
        RunnerUnavailableError: the device does not start.
        MachineError: there is not enough memory.
    """
    options = session_options(threads)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return opened(model, options, device=device)
    except BisectError:
        raise
    except Exception as error:
        raise failure_of_session(where, error) from error


def failure_of_session(where: str, error: Exception) -> BisectError:
    """Translates an error of ONNX Runtime: GPU, threads or memory ran out, or the model failed."""
    if is_gpu_failure(error):
        return MachineError(
            f"{where}: the GPU failed ({one_line(error, 160)}); nothing is concluded from it. Use "
            "--emulate-on cpu, or a GPU with more free memory"
        )
    if is_out_of_threads(error):
        return MachineError(f"{where}: {NO_THREADS}")
    if is_out_of_memory(error):
        return MachineError(
            f"{where}: out of memory ({one_line(error, 120)}); use fewer --workers, smaller inputs "
            "or a machine with more memory"
        )
    return RunnerFailedError(f"{where}: ONNX Runtime failed ({one_line(error)})")


def run_all(session: ort.InferenceSession, feed: Mapping[str, NDArray[Any]], where: str) -> Arrays:
    """Returns the outputs of a session by name.

    Raises:
        RunnerFailedError: the session cannot run.
        MachineError: there is not enough memory.
    """
    names = [o.name for o in session.get_outputs()]
    try:
        values = session.run(names, dict(feed))
    except Exception as error:
        raise failure_of_session(where, error) from error
    return {name: np.asarray(value) for name, value in zip(names, values, strict=True)}
