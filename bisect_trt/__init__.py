"""bisect-trt: find the layers that must stay in FP32 for a TensorRT model to be right."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bisect_trt.version import __version__

if TYPE_CHECKING:
    from bisect_trt.api import bisect, cure, reduce, verify
    from bisect_trt.base.errors import (
        BadInputError,
        BisectError,
        MachineError,
        RunnerUnavailableError,
    )
    from bisect_trt.base.outcomes import Verdict
    from bisect_trt.base.plan import Precision, PrecisionPlan
    from bisect_trt.report.summarise import Result

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

# Imported on first use: the command must answer Ctrl-C before seconds of imports are over.
_MODULES = {
    "bisect": "api",
    "cure": "api",
    "reduce": "api",
    "verify": "api",
    "BadInputError": "base.errors",
    "BisectError": "base.errors",
    "MachineError": "base.errors",
    "RunnerUnavailableError": "base.errors",
    "Precision": "base.plan",
    "PrecisionPlan": "base.plan",
    "Verdict": "base.outcomes",
    "Result": "report.summarise",
}
_FOLDERS = (
    "base",
    "evaluate",
    "graph",
    "inputs",
    "metrics",
    "model",
    "report",
    "runners",
    "search",
    "steps",
)


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"bisect_trt.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'bisect_trt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bisect_trt.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
