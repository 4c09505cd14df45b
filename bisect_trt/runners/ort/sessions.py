"""ONNX Runtime sessions, made in one place with the settings the whole tool
relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.errors import (
    NO_THREADS,
    BadInputError,
    BisectError,
    MachineError,
    RunnerFailedError,
    is_gpu_failure,
    is_out_of_memory,
    is_out_of_threads,
    one_line,
)
from bisect_trt.core.machine.cores import thread_count
from bisect_trt.core.machine.session_habits import habits
from bisect_trt.runners.ort.devices import CPU, Device
from bisect_trt.runners.ort.weights import RoundedConstants, opened

_MAX_NODE_THREADS = 8
"""Every session owns a pool; a model has tens of different nodes, and none of them feeds more
threads than this.
"""

Arrays = dict[str, NDArray[Any]]


def session_options(threads: int = 0) -> ort.SessionOptions:
    """What every session begins with.

    Threads that wait sleep: spinning ones gain next to nothing when alone, and of several busy
    processes each spins away what the others could use (benchmarks/sizes/neighbours.py). Their
    number is said, not left to ONNX Runtime: it knows of no quota, would tie them to cores that
    others are tied to as well, and its sums of some convolutions follow the number. The rest
    follows this process' :func:`habits`.

    Args:
        threads: what one call may use, as far as the habits allow; 0 is as much as they do.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    asked = [most for most in (threads, habits().threads) if most]
    options.intra_op_num_threads = min(asked, default=thread_count())
    options.inter_op_num_threads = 1  # nodes run one after the other
    for pool in ("intra_op", "inter_op"):
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
    if habits().frees_activations:
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
) -> ort.InferenceSession:
    """A session over a whole model, with ONNX Runtime's default optimisations.

    Args:
        model: of any size; or what makes it, as :func:`opened` takes it.
        where: what an error names.
        quantised: whether it holds quantising nodes. Of another order of sums they make whole
            steps, so the convolutions of another memory layout are left out: PP-OCRv4 det,
            quantised, then gives bit for bit what its nodes as written give, and is off by 0.44 of
            an output of 0 to 1 with them.
        shares_weights: whether large weights are used where they are, and not put into another
            order first: no copy of them is made, and a product takes longer.
        constants: gives the rounded constants of an emulated model.
        without: optimisers that are left out, by their names.

    Raises:
        BadInputError: ONNX Runtime cannot load the model.
        MachineError: there is not enough memory.
    """
    options = session_options()
    _share_arena(options)
    # Its fusions of quantised operators change that model's output by 0.85.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if shares_weights:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if quantised or shares_weights:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    try:
        return opened(model, options, constants, shares_weights=shares_weights, without=without)
    except BisectError:
        raise
    # ONNX Runtime has an exception class for each status, all direct children of Exception.
    except Exception as error:
        if is_out_of_memory(error) or is_out_of_threads(error):
            raise failure_of_session(where, error) from error
        raise BadInputError(f"{where}: ONNX Runtime cannot load it ({one_line(error)})") from error


def _share_arena(options: ort.SessionOptions) -> None:
    """Let the session's activations lie where every other session's do: those of sessions that run
    in turn take the room of one. An OCR detector's run takes 344 MB so and 428 with an arena for
    the reference and for the second emulator each, in the same time. Small ones are taken singly.
    """
    options.enable_mem_pattern = False
    if habits().takes_singly:
        options.enable_cpu_mem_arena = False
    elif not habits().frees_activations:
        _register_shared_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")


@cache
def _register_shared_arena() -> None:
    """One arena for all sessions; nodes' outputs are freed in another order than a session would,
    and no node hoards. Where the host program registered its own, that is used.
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
    with suppress(RuntimeError):
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg(settings))


def giving_back() -> ort.RunOptions | None:
    """For a call at whose end the shared arena gives back what no tensor lies in: it is made of
    pieces as large as whoever asked first wanted them, which serve no other network's tensors. Of
    an OCR recogniser that is half of what all sessions take. None where there is no arena.
    """
    if habits().frees_activations or habits().takes_singly:
        return None
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def node_session(
    model: onnx.ModelProto, threads: int = 0, *, own_arena: bool = False
) -> ort.InferenceSession:
    """A session over a few nodes and their roundings, exactly as written.

    Args:
        model: the nodes.
        threads: as of :func:`session_options`.
        own_arena: for calls beside each other of many small steps, which would wait for the shared
            arena at each.
    """
    options = session_options(threads or min(thread_count(), _MAX_NODE_THREADS))
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not own_arena:
        _share_arena(options)
    return opened(model, options)


def switched_session(
    model: onnx.ModelProto, threads: int = 0, device: Device = CPU, profile: str | None = None
) -> ort.InferenceSession:
    """A session over a model with switches, or a segment of one, exactly as written. Those for the
    CPU run in turn and share an arena.

    Args:
        model: of any size.
        threads: as of :func:`session_options`.
        device: what computes.
        profile: what the name of a file begins with into which ONNX Runtime writes what ran where.

    Raises:
        RunnerFailedError: ONNX Runtime cannot load the model.
    """
    where = "the emulated model"
    return session_as_written(model, where, threads, device, profile, one_of_many=device == CPU)


def session_as_written(
    model: onnx.ModelProto,
    where: str,
    threads: int = 0,
    device: Device = CPU,
    profile: str | None = None,
    *,
    one_of_many: bool = False,
) -> ort.InferenceSession:
    """A session without any of ONNX Runtime's optimisations: what is marked as an output changes no
    number.

    Args:
        model: of any size.
        where: what an error names.
        threads: as of :func:`session_options`.
        device: what computes.
        profile: as of :func:`switched_session`.
        one_of_many: whether it shares an arena with others that run in turn.

    Raises:
        RunnerFailedError: ONNX Runtime cannot load the model.
        RunnerUnavailableError: the device does not start.
        MachineError: there is not enough memory.
    """
    options = session_options(threads)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if one_of_many:
        _share_arena(options)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile
    try:
        return opened(model, options, device=device)
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
