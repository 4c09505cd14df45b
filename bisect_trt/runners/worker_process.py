"""The child's side of :mod:`bisect_trt.runners.process`: makes one object and serves calls
of its methods.

What native libraries print goes to the log: standard output belongs to the answers.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from typing import IO, Any

from bisect_trt.runners.process import HEADER, failure_of


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
        except Exception as error:
            answer = failure_of(error)
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
