"""bisect-trt: find the smallest proved set of layers that must stay in FP32 for a TensorRT model to
be right.
"""

from bisect_trt.api import bisect, verify
from bisect_trt.core.errors import BadInputError, BisectError, RunnerUnavailableError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.verdict import Verdict
from bisect_trt.report.result import Result
from bisect_trt.version import __version__

__all__ = [
    "BadInputError",
    "BisectError",
    "Precision",
    "PrecisionPlan",
    "Result",
    "RunnerUnavailableError",
    "Verdict",
    "__version__",
    "bisect",
    "verify",
]
