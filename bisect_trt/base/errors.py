"""The errors users see, and their exit codes."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from bisect_trt.base.display import printable
from bisect_trt.base.outcomes import Verdict

EXIT_OK = 0
EXIT_NOT_MET = 1
EXIT_BAD_INPUT = 2
EXIT_NO_RUNNER = 3
EXIT_MACHINE = 4
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130


class BisectError(Exception):
    """Base of the errors that are reported as one line."""

    exit_code = EXIT_BAD_INPUT


class BadInputError(BisectError):
    """A model, input, requirement or option that cannot be used."""


class RunnerUnavailableError(BisectError):
    """The requested runner cannot work on this machine."""

    exit_code = EXIT_NO_RUNNER


class MachineError(BisectError):
    """The machine ran out of memory, disk or processes; nothing is concluded or cached."""

    exit_code = EXIT_MACHINE


class RunnerFailedError(BisectError):
    """A runner failed on a model that was expected to run.

    ``verdict`` is the outcome, ``log`` the runner's last lines, ``node`` the node that it names.
    ``lost``: the process died or fell silent. ``machine``: memory ran out.
    """

    def __init__(
        self,
        message: str,
        verdict: Verdict = Verdict.CRASHED,
        log: Sequence[str] = (),
        *,
        lost: bool = False,
        machine: bool = False,
        node: str = "",
    ) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.log = tuple(log)
        self.lost = lost or machine
        self.machine = machine
        self.node = node

    def blamed_on_model(self) -> RunnerFailedError:
        """This error, if the model or the plan is to blame.

        Raises:
            MachineError: the machine is to blame.
        """
        if not self.machine:
            return self
        raise MachineError(
            f"{self}; nothing is concluded from it. End what else uses the memory, or take smaller "
            "or fewer inputs, and run the same command again to go on from here"
        ) from self


_NO_MEMORY = (
    "Failed to allocate memory",
    "bad_alloc",
    "bad allocation",
    "Available memory of",
    "CUDA failure 2: out of memory",
    "_STATUS_ALLOC_FAILED",  # cuBLAS and cuDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out."""
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    # ONNX Runtime and CUDA have no class of error for it, only words.
    return any(words in str(error) for words in _NO_MEMORY)


_NO_THREADS = ("can't start new thread", "pthread_create failed")
NO_THREADS = (
    "the system starts no more threads for this process: use --threads 1, or raise its limits "
    "(ulimit -u, ulimit -v, a container's pids.max)"
)


def is_out_of_threads(error: BaseException) -> bool:
    """Whether ``error`` says that the system starts no more threads."""
    return any(words in str(error) for words in _NO_THREADS)


_GPU_FAILURES = ("CUDA failure", "CUDNN failure", "CUDNN_FE failure", "CUBLAS failure")


def is_gpu_failure(error: BaseException) -> bool:
    """Whether ONNX Runtime says that a GPU failed."""
    return any(words in str(error) for words in _GPU_FAILURES)


def is_disk_full(error: BaseException) -> bool:
    """Whether ``error`` says that a disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def not_written(where: str, error: Exception, advice: str = "") -> BisectError:
    """The error to raise where ``where`` cannot be written."""
    if is_disk_full(error):
        return MachineError(
            f"{where}: the disk is full; free some space and run the same command again"
        )
    reason = getattr(error, "strerror", None) or error
    return BadInputError(f"{where}: cannot be written ({reason}){advice}")


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The message of ``error`` on one printable line of at most ``limit`` characters."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    if len(text) <= limit:
        return text
    # Libraries begin with where they are and end with what is wrong: the middle goes.
    begin = limit // 3
    return f"{text[:begin]}…{text[begin + 1 - limit :]}"
