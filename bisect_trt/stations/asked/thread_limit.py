"""A job that keeps to the threads its settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from threadpoolctl import threadpool_limits

from bisect_trt.core.machine.cores import at_most, thread_count
from bisect_trt.stations.asked.settings import Settings

More = ParamSpec("More")
Answer = TypeVar("Answer")


def within_threads(
    job: Callable[Concatenate[Settings, More], Answer],
) -> Callable[Concatenate[Settings, More], Answer]:
    """``job`` with ONNX Runtime's and NumPy's pools no larger than ``--threads``, and without it no
    larger than what the process may use: BLAS knows of no quota.
    """

    @wraps(job)
    def limited(settings: Settings, /, *rest: More.args, **named: More.kwargs) -> Answer:
        with at_most(settings.threads), threadpool_limits(thread_count(), "blas"):
            return job(settings, *rest, **named)

    return limited
