"""What "good enough" means: conditions on outputs, read from text, scored in multiples of the
tolerance.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError, one_line
from bisect_trt.numerics.tensor_error import TensorError, tensor_error

Arrays = Mapping[str, NDArray[Any]]
TaskMetric = Callable[[Arrays, Arrays], float]

METRICS = ("max_abs", "mean_abs", "median_abs", "rmse", "rel_range", "cosine", "snr_db", "psnr_db")
_AT_LEAST = ("cosine", "snr_db", "psnr_db")
DEFAULT_REQUIREMENTS = ("rel_range<=1e-2",)
"""No element of any output moves by more than 1 % of that output's range. Scale free, so it fits
most models.
"""

_UNBOUNDED = 1e9
"""The score of a finite error where none is allowed; infinity is kept for values that are not
finite.
"""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_CONDITION = re.compile(
    rf"^(?:(?P<output>.+):)?(?P<metric>[A-Za-z_]\w*)\s*(?P<op><=|>=)\s*(?P<value>{_NUMBER})$"
)
_TOLERANCE = re.compile(
    rf"^(?:(?P<output>.+):)?atol\s*=\s*(?P<atol>{_NUMBER})(?:\s*,\s*rtol\s*=\s*(?P<rtol>{_NUMBER}))?$"
    rf"|^(?:(?P<output2>.+):)?rtol\s*=\s*(?P<rtol2>{_NUMBER})(?:\s*,\s*atol\s*=\s*(?P<atol2>{_NUMBER}))?$"
)


@dataclass(frozen=True)
class Requirement:
    """One condition. ``output`` None means every output; ``metric`` is 'atol' for an elementwise
    tolerance.

    ``limit`` bounds the metric from above, or from below if ``at_least``; for a tolerance it is the
    absolute part and ``relative`` the part that scales with the reference.
    """

    text: str
    metric: str
    limit: float
    at_least: bool = False
    relative: float = 0.0
    output: str | None = None

    def score(self, reference: NDArray[Any], candidate: NDArray[Any], error: TensorError) -> float:
        """How much of the tolerance is used: at most 1 passes, 1.4 misses by 40 %, inf is not
        finite.
        """
        if not error.finite:
            return math.inf
        if self.metric == "atol":
            return _elementwise(reference, candidate, self.limit, self.relative)
        return self.score_of(float(getattr(error, self.metric)))

    def score_of(self, value: float) -> float:
        """The score of a metric's ``value``, on the scale of :meth:`score`."""
        if math.isnan(value):
            return math.inf
        if not self.at_least:
            return _fraction(value, self.limit)
        if self.metric == "cosine":
            return _fraction(1.0 - value, 1.0 - self.limit)
        if self.metric in ("snr_db", "psnr_db"):
            return float(10.0 ** ((self.limit - value) / 20.0))
        if self.limit > 0.0 and value > 0.0:
            return self.limit / value
        return (
            1.0
            if value >= self.limit
            else 1.0 + _fraction(self.limit - value, abs(self.limit) or 1.0)
        )


@dataclass(frozen=True)
class Judged:
    """One sample's outputs beside the reference: ``score`` in tolerances, errors by output."""

    score: float
    errors: Mapping[str, TensorError]


@dataclass(frozen=True)
class Requirements:
    """All conditions of a run; a plan passes if every one does on every sample."""

    items: tuple[Requirement, ...]
    metrics: Mapping[str, TaskMetric]

    def score(self, reference: Arrays, candidate: Arrays) -> float:
        """The score alone of :meth:`judge`."""
        return self.judge(reference, candidate).score

    def judge(self, reference: Arrays, candidate: Arrays) -> Judged:
        """One sample's outputs held against the reference.

        Args:
            reference: arrays by output name, any numeric or boolean dtype.
            candidate: the same outputs of a plan; a changed shape is an error without numbers.

        Returns:
            Each output's errors, and the largest score of any condition on them
            (see :meth:`Requirement.score`): at most 1 passes, infinite where a value is not finite.

        Raises:
            BadInputError: a task metric of the user's raised.
        """
        errors = {name: tensor_error(reference[name], candidate[name]) for name in reference}
        if not all(e.finite for e in errors.values()):
            return Judged(math.inf, errors)
        worst = 0.0
        for item in self.items:
            if item.metric in self.metrics:
                worst = max(worst, item.score_of(self._task(item.metric, reference, candidate)))
                continue
            for name in reference:
                if item.output not in (None, name):
                    continue
                worst = max(worst, item.score(reference[name], candidate[name], errors[name]))
        return Judged(worst, errors)

    def _task(self, name: str, reference: Arrays, candidate: Arrays) -> float:
        try:
            return float(self.metrics[name](reference, candidate))
        except Exception as error:  # the user's code may raise anything; say whose it was
            raise BadInputError(
                f"--metric {name}: {type(error).__name__}: {one_line(error)}"
            ) from error

    @property
    def texts(self) -> tuple[str, ...]:
        """The conditions as the user wrote them."""
        return tuple(item.text for item in self.items)


def parse_requirements(
    texts: Sequence[str], outputs: Sequence[str], metrics: Mapping[str, TaskMetric] | None = None
) -> Requirements:
    """Read conditions such as ``max_abs<=1e-2``, ``logits:cosine>=0.999`` or
    ``atol=1e-3,rtol=1e-2``.

    Raises :class:`BadInputError` for an unknown form, metric or output, or a limit that nothing can
    meet.
    """
    metrics = dict(metrics or {})
    items = tuple(
        _parse(text.strip(), outputs, metrics) for text in (texts or DEFAULT_REQUIREMENTS)
    )
    unused = sorted(set(metrics) - {item.metric for item in items})
    if unused:
        raise BadInputError(
            f"--metric {unused[0]}: no --requirement uses it; add one such as {unused[0]}<=0.1"
        )
    return Requirements(items, metrics)


def _parse(text: str, outputs: Sequence[str], metrics: Mapping[str, TaskMetric]) -> Requirement:
    tolerance = _TOLERANCE.match(text)
    condition = _CONDITION.match(text)
    if tolerance is not None:
        group = tolerance.groupdict()
        item = Requirement(
            text,
            "atol",
            float(group["atol"] or group["atol2"] or 0.0),
            relative=float(group["rtol"] or group["rtol2"] or 0.0),
            output=group["output"] or group["output2"],
        )
        if item.limit < 0 or item.relative < 0 or item.limit + item.relative == 0:
            raise BadInputError(f"--requirement {text!r}: tolerances must be positive")
    elif condition is not None:
        item = Requirement(
            text,
            condition["metric"],
            float(condition["value"]),
            at_least=condition["op"] == ">=",
            output=condition["output"],
        )
        _check_metric(item, metrics)
    else:
        raise BadInputError(
            f"--requirement {text!r}: not understood; write METRIC<=VALUE, OUTPUT:METRIC>=VALUE or "
            "atol=A,rtol=R"
        )
    if item.output is not None and item.output not in outputs:
        raise BadInputError(
            f"--requirement {text!r}: the model has no output {item.output!r}; it has "
            f"{', '.join(outputs)}"
        )
    return item


def _check_metric(item: Requirement, metrics: Mapping[str, TaskMetric]) -> None:
    known = (*METRICS, *metrics)
    if item.metric not in known:
        raise BadInputError(
            f"--requirement {item.text!r}: unknown metric {item.metric!r}; known are "
            f"{', '.join(known)}"
        )
    if item.metric in METRICS and item.at_least != (item.metric in _AT_LEAST):
        right = ">=" if item.metric in _AT_LEAST else "<="
        raise BadInputError(f"--requirement {item.text!r}: {item.metric} is bounded with {right}")
    if item.metric == "cosine" and item.limit > 1.0:
        raise BadInputError(f"--requirement {item.text!r}: a cosine is at most 1")
    if item.metric in METRICS and not item.at_least and item.limit < 0.0:
        raise BadInputError(f"--requirement {item.text!r}: an error is never negative")


def load_metric(text: str) -> tuple[str, TaskMetric]:
    """Import ``module:function``, looking in the current folder too; the function's name becomes
    the metric's.

    The function takes two mappings of output name to array, the reference's and the candidate's,
    and gives a float.
    """
    module_name, _, function_name = text.partition(":")
    if not module_name or not function_name:
        raise BadInputError(f"--metric {text!r}: write MODULE:FUNCTION")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # importing the user's module may raise anything
        raise BadInputError(
            f"--metric {text!r}: {type(error).__name__}: {one_line(error)}"
        ) from error
    finally:
        sys.path.remove(here)
    if not callable(function):
        raise BadInputError(f"--metric {text!r}: {function_name} is not a function")
    return function_name, function


def times(score: float) -> str:
    """A score in words."""
    if math.isnan(score):
        return "not measured"
    if math.isinf(score):
        return "NaN or infinite values"
    # A miss by a hair must not read as "1 times".
    near = abs(score - 1.0) < 5e-3
    return f"{score:.6g} times the tolerance" if near else f"{score:.3g} times the tolerance"


def _elementwise(
    reference: NDArray[Any], candidate: NDArray[Any], absolute: float, relative: float
) -> float:
    ref = np.asarray(reference).astype(np.float64).ravel()
    got = np.asarray(candidate).astype(np.float64).ravel()
    usable = np.isfinite(ref)
    if ref.size == 0 or not usable.any():
        return 0.0
    error = np.abs(got[usable] - ref[usable])
    allowed = absolute + relative * np.abs(ref[usable])
    with np.errstate(divide="ignore", invalid="ignore"):
        used = np.where(error == 0.0, 0.0, error / allowed)
    return float(np.minimum(used, _UNBOUNDED).max())


def _fraction(value: float, limit: float) -> float:
    if value <= 0.0:
        return 0.0
    return value / limit if limit > 0.0 else _UNBOUNDED
