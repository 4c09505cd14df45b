"""The child's side of :mod:`bisect_trt.runners.isolation`: makes one object and serves calls of its methods.

What native libraries print goes to the log: standard output belongs to the answers.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from typing import IO, Any

from bisect_trt.errors import BisectError, RunnerFailedError, RunnerUnavailableError, one_line
from bisect_trt.runners.isolation import HEADER
from bisect_trt.verdict import Verdict


def serve() -> None:
    """Answer calls until the parent closes the pipe."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    target, arguments = _receive(requests)
    worker: Any = None
    while True:
        try:
            method, values = _receive(requests)
        except EOFError:
            return
        try:
            if worker is None:
                module, _, name = target.partition(":")
                worker = getattr(importlib.import_module(module), name)(**arguments)
            answer: tuple[str, Any] = ("result", getattr(worker, method)(*values))
        except RunnerUnavailableError as error:
            answer = ("unavailable", str(error))
        except RunnerFailedError as error:
            answer = ("failed", (str(error), error.verdict, error.log))
        except BisectError as error:
            answer = ("failed", (str(error), Verdict.BUILD_FAILED, ()))
        except Exception as error:  # whatever a native library's binding raises
            answer = ("failed", (f"{type(error).__name__}: {one_line(error)}", Verdict.CRASHED, ()))
        data = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        answers.write(HEADER.pack(len(data)) + data)
        answers.flush()


def _receive(stream: IO[bytes]) -> Any:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


if __name__ == "__main__":
    serve()
