"""Parses what a gate holds a plan's time to, such as ``latency_ms<=4.5``, and judges by it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bisect_trt.base.errors import BadInputError, RunnerUnavailableError
from bisect_trt.settings import Settings

LATENCY, SAVING = "latency_ms", "saving_kept"
_SIGNS = {LATENCY: "<=", SAVING: ">="}
FORMS: Mapping[str, str] = {LATENCY: "latency_ms<=MS", SAVING: "saving_kept>=SHARE"}
"""The limits that there are, and how each is written."""

_LIMIT = re.compile(r"(?P<name>.*?)\s*(?P<sign>[<>=]+)\s*(?P<bound>.*)")
_LEAST_SAVING = 0.01
"""The share of FP32's time from which on a saving is more than the spread of engines."""


@dataclass(frozen=True)
class PlanSpeed:
    """How fast a plan is; None is what is not known.

    ``latency_ms`` is the measured time of one inference. ``saving_kept`` is the share of the
    reduced precision's saving that the plan keeps. ``is_estimated`` says that no engine was timed,
    so that the share is predicted.
    """

    latency_ms: float | None = None
    saving_kept: float | None = None
    is_estimated: bool = False


@dataclass(frozen=True)
class JudgedLimit:
    """A time limit and what was found; ``met`` and ``value`` are None where it cannot be judged."""

    text: str
    value: float | None
    met: bool | None
    is_estimated: bool = False

    @property
    def found(self) -> str:
        """The value in words, or why there is none."""
        is_latency = self.text.startswith(LATENCY)
        if self.value is None:
            nothing = "what the reduced precision saves was not timed, or is nothing"
            return "its engine was not timed" if is_latency else nothing
        value = f"{self.value:.5g}"
        return f"{value} ms" if is_latency else f"{value}{', estimated' * self.is_estimated}"

    @property
    def outcome(self) -> str:
        """``met``, ``missed`` or ``not judged``."""
        return {True: "met", False: "missed", None: "not judged"}[self.met]

    def as_json(self) -> dict[str, Any]:
        """The limit for machines."""
        return {
            "limit": self.text,
            "met": self.met,
            "value": self.value,
            "estimated": self.is_estimated,
        }


def judged_from_json(data: Mapping[str, Any]) -> JudgedLimit:
    """Reads what :meth:`JudgedLimit.as_json` wrote.

    Raises:
        KeyError, TypeError: it is none.
    """
    return JudgedLimit(data["limit"], data["value"], data["met"], data["estimated"])


@dataclass(frozen=True)
class TimeLimit:
    """A bound in ms or, for ``saving_kept``, a share."""

    name: str
    bound: float

    @property
    def text(self) -> str:
        """The limit as it is written."""
        return f"{self.name}{_SIGNS[self.name]}{self.bound:.12g}"

    def judged(self, speed: PlanSpeed) -> JudgedLimit:
        """Whether a plan of this speed meets it."""
        if self.name == LATENCY:
            value = speed.latency_ms
            return JudgedLimit(self.text, value, None if value is None else value <= self.bound)
        value = speed.saving_kept
        met = None if value is None else value >= self.bound
        return JudgedLimit(self.text, value, met, speed.is_estimated)


def parse_time_limits(texts: Sequence[str]) -> tuple[TimeLimit, ...]:
    """Parses limits such as ``latency_ms<=4.5`` and ``saving_kept>=0.9``.

    Raises:
        BadInputError: an unknown name, a wrong direction, or a bound that is none.
    """
    return tuple(_parsed(text) for text in texts)


def _parsed(text: str) -> TimeLimit:
    where, forms = f"--hold {text!r}", " or ".join(FORMS.values())
    found = _LIMIT.fullmatch(text.strip())
    if found is None:
        raise BadInputError(f"{where}: has no bound; write {forms}, in quotes on a command line")
    name = found["name"]
    if name not in FORMS:
        raise BadInputError(f"{where}: unknown {name!r}; write {forms}")
    if found["sign"] != _SIGNS[name]:
        raise BadInputError(f"{where}: {name} is bounded with {_SIGNS[name]}")
    try:
        bound = float(found["bound"])
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise BadInputError(f"{where}: {found['bound']!r} is no number; write {FORMS[name]}")
    if bound <= 0.0:
        raise BadInputError(f"{where}: must be more than 0")
    if name == SAVING and bound > 1.0:
        raise BadInputError(f"{where}: a share is at most 1; 90 % is written 0.9")
    return TimeLimit(name, bound)


def with_timed_engine(settings: Settings) -> Settings:
    """``settings`` with a runner that can judge their limits: a latency needs TensorRT.

    Raises:
        BadInputError: a limit is wrong, or the runner that was asked for times no engine.
    """
    limits = parse_time_limits(settings.hold)
    latency = next((limit for limit in limits if limit.name == LATENCY), None)
    if latency is None or settings.runner == "tensorrt":
        return settings
    if settings.runner != "auto":
        raise BadInputError(
            f"--hold {latency.text}: --runner {settings.runner} times no engine; take tensorrt"
        )
    return replace(settings, runner="tensorrt")


@contextmanager
def saying_what_is_held(settings: Settings) -> Iterator[None]:
    """Adds to an error on a missing engine which limits need it."""
    try:
        yield
    except RunnerUnavailableError as error:
        if not settings.hold:
            raise
        held = ", ".join(settings.hold)
        raise RunnerUnavailableError(f"{held}: cannot be judged; {error}") from error


def saving_kept(ms: float, reduced_ms: float, fp32_ms: float) -> float | None:
    """The share that a plan of ``ms`` keeps of what reducing saves; None if that saves nothing."""
    whole = fp32_ms - reduced_ms
    return (fp32_ms - ms) / whole if whole > _LEAST_SAVING * fp32_ms else None
