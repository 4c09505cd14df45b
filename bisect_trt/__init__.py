"""bisect-trt: find a small set of layers that must stay in FP32 for a TensorRT model to be right,
and on what it holds.

What the package offers is imported when it is first asked for: the command must be able to answer
Ctrl-C before seconds of imports are over.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bisect_trt.version import __version__

if TYPE_CHECKING:
    from bisect_trt.api import bisect, cure, reduce, verify
    from bisect_trt.core.errors import (
        BadInputError,
        BisectError,
        MachineError,
        RunnerUnavailableError,
    )
    from bisect_trt.core.precision import Precision, PrecisionPlan
    from bisect_trt.core.verdict import Verdict
    from bisect_trt.report.result import Result

__all__ = [
    "BadInputError",
    "BisectError",
    "MachineError",
    "Precision",
    "PrecisionPlan",
    "Result",
    "RunnerUnavailableError",
    "Verdict",
    "__version__",
    "bisect",
    "cure",
    "reduce",
    "verify",
]

_WHERE = {
    "bisect": "api",
    "cure": "api",
    "reduce": "api",
    "verify": "api",
    "BadInputError": "core.errors",
    "BisectError": "core.errors",
    "MachineError": "core.errors",
    "RunnerUnavailableError": "core.errors",
    "Precision": "core.precision",
    "PrecisionPlan": "core.precision",
    "Verdict": "core.verdict",
    "Result": "report.result",
}
_ROOMS = ("core", "graph", "numerics", "probe", "report", "runners", "search", "stations")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"bisect_trt.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'bisect_trt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bisect_trt.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
