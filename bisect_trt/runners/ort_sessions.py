"""ONNX Runtime sessions on the CPU provider, made in one place with the settings the whole tool
relies on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.cores import usable_cores
from bisect_trt.core.errors import (
    BadInputError,
    BisectError,
    MachineError,
    RunnerFailedError,
    is_out_of_memory,
    one_line,
)
from bisect_trt.core.memory import frees_activations
from bisect_trt.runners.ort_weights import RoundedConstants, opened

_MAX_NODE_THREADS = 8
"""Every session owns a pool; a model has tens of different nodes, and none of them feeds more
threads than this.
"""

Arrays = dict[str, NDArray[Any]]


def reference_session(
    model: onnx.ModelProto,
    where: str = "model",
    *,
    quantised: bool = False,
    shares_weights: bool = False,
    constants: RoundedConstants | None = None,
) -> ort.InferenceSession:
    """A session over a whole model, with ONNX Runtime's default optimisations.

    Args:
        model: of any size.
        where: what an error names.
        quantised: whether it holds quantising nodes. Of another order of sums they make whole
            steps, so the convolutions of another memory layout are left out: PP-OCRv4 det,
            quantised, then gives bit for bit what its nodes as written give, and is off by 0.44 of
            an output of 0 to 1 with them.

        shares_weights: whether large weights are used where they are, and not put into another
            order first: no copy of them is made, and a product takes longer.
        constants: gives the rounded constants of an emulated model.

    Raises:
        BadInputError: ONNX Runtime cannot load the model.
        MachineError: there is not enough memory.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # Its fusions of quantised operators change that model's output by 0.85.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    _spare_memory(options)
    if usable_cores() < (os.cpu_count() or 1):  # else its own choice: a thread a physical core
        options.intra_op_num_threads = usable_cores()
    if shares_weights:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if quantised or shares_weights:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    try:
        return opened(model, options, constants, shares_weights=shares_weights)
    except BisectError:
        raise
    # ONNX Runtime has an exception class for each status, all direct children of Exception.
    except Exception as error:
        if is_out_of_memory(error):
            raise failure_of_session(where, error) from error
        raise BadInputError(f"{where}: ONNX Runtime cannot load it ({one_line(error)})") from error


def _spare_memory(options: ort.SessionOptions) -> None:
    if frees_activations():
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False


def thread_count(threads: int) -> int:
    """How many threads 0 stands for: said, not left to ONNX Runtime, since its sums of some
    convolutions follow the number.
    """
    return threads or usable_cores()


@cache
def _register_shared_arena() -> bool:
    """One arena for all nodes: their outputs are freed in another order than a session would, and
    no node hoards.
    """
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    settings = {
        "max_mem": 0,
        "arena_extend_strategy": 1,
        "initial_chunk_size_bytes": -1,
        "max_dead_bytes_per_chunk": -1,
    }
    try:
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg(settings))
    except RuntimeError:
        return False  # the host program registered its own: use that
    return True


def node_session(model: onnx.ModelProto, threads: int = 0) -> ort.InferenceSession:
    """A session over a few nodes and their roundings, exactly as written.

    ``threads`` is what one call may use; 0 leaves it to the machine.
    """
    _register_shared_arena()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False
    options.intra_op_num_threads = threads or min(thread_count(0), _MAX_NODE_THREADS)
    if not frees_activations():
        options.add_session_config_entry("session.use_env_allocators", "1")
    _spare_memory(options)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return opened(model, options)


def switched_session(model: onnx.ModelProto, threads: int = 0) -> ort.InferenceSession:
    """A session over a whole model with switches, exactly as written; ``threads`` as above. Raises
    :class:`RunnerFailedError`.
    """
    return session_as_written(model, "the emulated model", threads)


def session_as_written(
    model: onnx.ModelProto, where: str, threads: int = 0
) -> ort.InferenceSession:
    """A session without any of ONNX Runtime's optimisations: what is marked as an output changes no
    number.

    Args:
        model: of any size.
        where: what an error names.
        threads: what one call may use; 0 leaves it to the machine.

    Raises:
        RunnerFailedError: ONNX Runtime cannot load the model.
        MachineError: there is not enough memory.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = thread_count(threads)
    _spare_memory(options)
    try:
        return opened(model, options)
    except BisectError:
        raise
    except Exception as error:
        raise failure_of_session(where, error) from error


def failure_of_session(where: str, error: Exception) -> BisectError:
    """What a session's ``error`` means: of whatever was run, or of the machine's memory.

    Args:
        where: what the message names.
        error: ONNX Runtime's.
    """
    if is_out_of_memory(error):
        return MachineError(
            f"{where}: out of memory ({one_line(error, 120)}); use fewer --workers, smaller inputs "
            "or a machine with more memory"
        )
    return RunnerFailedError(f"{where}: ONNX Runtime failed ({one_line(error)})")


def run_all(session: ort.InferenceSession, feed: Mapping[str, NDArray[Any]], where: str) -> Arrays:
    """The outputs of a session by name.

    Args:
        session: any.
        feed: inputs by name, of the model's dtypes and shapes.
        where: what an error names.

    Raises:
        RunnerFailedError: it cannot be run.
        MachineError: there is not enough memory.
    """
    names = [o.name for o in session.get_outputs()]
    try:
        values = session.run(names, dict(feed))
    except Exception as error:
        raise failure_of_session(where, error) from error
    return {name: np.asarray(value) for name, value in zip(names, values, strict=True)}
