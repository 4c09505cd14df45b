"""The rows that a user chooses among: from as it is to FP32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import FP32, MIXED, PLAN, REPAIRED, Validation, ValidationVerdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.metrics.time_limits import PlanSpeed


class Passes(StrEnum):
    """What a choice meets the requirement on."""

    VALIDATED = "validated"
    GIVEN = "given"
    NO = "no"

    @staticmethod
    def of(passed: bool, validation: Validation | None) -> Passes:
        """For a plan that ``passed`` on the given inputs, and its validation."""
        if not passed:
            return Passes.NO
        word = validation.word if validation is not None else None
        return Passes.VALIDATED if word is ValidationVerdict.VALIDATED else Passes.GIVEN


@dataclass(frozen=True)
class Choice:
    """One row.

    ``plan`` is for the judged part of the ``repaired`` or the original graph, ``pinned`` its layers
    in FP32 in network order. ``worst_score`` is that on the given inputs. ``fitted`` says that its
    weights are rounded to fit. ``latency_ms`` is None where no engine was timed. ``saving_kept`` is
    the share that it keeps of the time that the row "as it is" saves, which may be estimated.
    """

    name: str
    plan: PrecisionPlan
    pinned: tuple[str, ...]
    repaired: bool
    worst_score: float
    passes: Passes
    recommended: bool = False
    fitted: bool = False
    latency_ms: float | None = None
    saving_kept: float | None = None
    is_estimated: bool = True

    def in_words(self, rules: Sequence[str]) -> str:
        """The row's name, such as "repaired (fold-bn)"; ``rules`` are those of the repair."""
        return f"{self.name} ({', '.join(rules)})" if self.repaired else self.name

    @property
    def is_mixed(self) -> bool:
        """Whether it is another tool's mixed model, whose file is its own."""
        return self.name.startswith(MIXED)

    def as_json(self) -> dict[str, Any]:
        """The row as run.json has it."""
        return {
            "name": self.name,
            "precision": self.plan.base.value,
            "graph": "repaired" if self.repaired else "original",
            "weights": "fit" if self.fitted else "nearest",
            "pinned": list(self.pinned),
            "kept_fp32": len(self.pinned),
            "worst_score": self.worst_score,
            "latency_ms": self.latency_ms,
            "estimated_latency": self.is_estimated,
            "saving_kept": self.saving_kept,
            "passes": self.passes.value,
            "recommended": self.recommended,
        }


CHOICE_COLUMNS = (
    *("name", "precision", "graph", "weights", "pinned", "kept_fp32", "worst_score", "latency_ms"),
    *("estimated_latency", "saving_kept", "passes", "recommended"),
)
"""The keys of :meth:`Choice.as_json`."""


def choice_from_json(data: Mapping[str, Any]) -> Choice:
    """Reads what :meth:`Choice.as_json` wrote.

    Raises:
        KeyError, ValueError, TypeError: it is none.
    """
    pinned = tuple(str(name) for name in data["pinned"])
    score = data["worst_score"]
    return Choice(
        name=str(data["name"]),
        plan=PrecisionPlan(Precision(data["precision"]), frozenset(pinned)),
        pinned=pinned,
        repaired=data["graph"] == "repaired",
        worst_score=math.nan if score is None else float(score),
        passes=Passes(data["passes"]),
        recommended=bool(data["recommended"]),
        fitted=data["weights"] == "fit",
        latency_ms=_number(data["latency_ms"]),
        saving_kept=_number(data["saving_kept"]),
        is_estimated=bool(data["estimated_latency"]),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def saved_by_repair(choices: Sequence[Choice]) -> str:
    """The layers in FP32 without the repair and with it, and the times where both are known.

    Empty where no repaired row is there.
    """
    rows = {choice.name: choice for choice in choices}
    new, old = rows.get(REPAIRED), rows.get(PLAN) or rows.get(FP32)
    if new is None or old is None:
        return ""
    said = f"without the repair {counted(len(old.pinned), 'layer')} in FP32, with it "
    said += f"{len(new.pinned)}"
    if old.latency_ms is not None and new.latency_ms is not None:
        said += f"; {old.latency_ms:.3f} ms and {new.latency_ms:.3f} ms"
    return said


def recommended(choices: Sequence[Choice]) -> Choice | None:
    """The recommended row; None where nothing passes."""
    return next((choice for choice in choices if choice.recommended), None)


def recommended_speed(choices: Sequence[Choice]) -> PlanSpeed:
    """How fast the recommended row is; nothing is known where none is."""
    chosen = recommended(choices)
    if chosen is None:
        return PlanSpeed()
    # An estimate says nothing beside engines that were timed.
    is_hidden = chosen.is_estimated and any(row.latency_ms is not None for row in choices)
    share = None if is_hidden else chosen.saving_kept
    return PlanSpeed(chosen.latency_ms, share, is_estimated=chosen.is_estimated)
