"""ONNX Runtime sessions on the CPU provider, made in one place with the settings the whole tool
relies on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
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

_MAX_NODE_THREADS = 8
"""Every session owns a pool; a model has tens of different nodes, and none of them feeds more
threads than this.
"""

Arrays = dict[str, NDArray[Any]]


def reference_session(source: str | bytes, *, quantised: bool = False) -> ort.InferenceSession:
    """A session over a whole model, with ONNX Runtime's default optimisations.

    Args:
        source: a path, or the model's bytes.
        quantised: whether it holds quantising nodes. Of another order of sums they make whole
            steps, so the convolutions of another memory layout are left out: PP-OCRv4 det,
            quantised, then gives bit for bit what its nodes as written give, and is off by 0.44 of
            an output of 0 to 1 with them.

    Raises:
        BadInputError: ONNX Runtime cannot load the model.
        MachineError: there is not enough memory.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # Its fusions of quantised operators change that model's output by 0.85.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if usable_cores() < (os.cpu_count() or 1):  # else its own choice: a thread a physical core
        options.intra_op_num_threads = usable_cores()
    if quantised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    # ONNX Runtime has an exception class for each status, all direct children of Exception.
    except Exception as error:
        where = source if isinstance(source, str) else "model"
        if is_out_of_memory(error):
            raise failure_of_session(where, error) from error
        raise BadInputError(f"{where}: ONNX Runtime cannot load it ({one_line(error)})") from error


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


def node_session(model: bytes, threads: int = 0) -> ort.InferenceSession:
    """A session over a few nodes and their roundings, exactly as written.

    ``threads`` is what one call may use; 0 leaves it to the machine.
    """
    _register_shared_arena()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False
    options.intra_op_num_threads = threads or min(thread_count(0), _MAX_NODE_THREADS)
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def switched_session(source: str | bytes, threads: int = 0) -> ort.InferenceSession:
    """A session over a segment of a model with switches, exactly as written.

    Args:
        source: a path, or the model's bytes.
        threads: what one call may use; 0 leaves it to the machine.

    Raises:
        RunnerFailedError: ONNX Runtime cannot load it.
    """
    return session_as_written(source, "the emulated model", threads, one_of_many=True)


def session_as_written(
    source: str | bytes, where: str, threads: int = 0, *, one_of_many: bool = False
) -> ort.InferenceSession:
    """A session without any of ONNX Runtime's optimisations: what is marked as an output changes no
    number.

    Args:
        source: a path, or the model's bytes.
        where: what an error names.
        threads: what one call may use; 0 leaves it to the machine.
        one_of_many: whether others run in turn with it: they share an arena, and none spins while
            the next one computes.

    Raises:
        RunnerFailedError: ONNX Runtime cannot load the model.
        MachineError: there is not enough memory.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = thread_count(threads)
    if one_of_many:
        _register_shared_arena()
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
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
