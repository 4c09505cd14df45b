"""A plan as a run saved it, with what it was found for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bisect_trt.core.errors import BadInputError, one_line
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.graph import Graph

_LISTS = ("requirements", "metrics", "rewritten")


@dataclass(frozen=True)
class SavedPlan:
    """A plan.json: the plan, the requirements and metrics it was found for, on which share of the
    inputs it has to meet them, and the layers that a rewrite made before.
    """

    plan: PrecisionPlan
    path: Path
    requirements: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    holds_on: float = 1.0

    @property
    def searched(self) -> Precision:
        """The precision of a run that looks at this plan; strict FP32 is the answer of one that
        found nothing lower.
        """
        return self.plan.base if self.plan.base is not Precision.FP32 else Precision.FP16

    def check_model(self, graph: Graph) -> None:
        """Refuse another model.

        Raises:
            BadInputError: the plan pins layers that the model lacks, or is for a rewritten model
                and it is none.
        """
        absent = sorted(set(self.rewritten).difference(graph.names))
        if absent:
            raise BadInputError(
                f"{self.path}: the plan is for a model rewritten with --rewrite, and this one has "
                f"no layer {absent[0]!r}; use model.rewritten.onnx of the run's folder, or pass "
                "--rewrite layernorm to verify"
            )
        graph.check_plan(self.plan)


def read_plan(path: Path) -> SavedPlan:
    """What a plan.json holds.

    Raises:
        BadInputError: it cannot be read, or is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error, 80)})") from error
    plan, more = PrecisionPlan.from_json(text, str(path)), json.loads(text)
    requirements, metrics, rewritten = (_list_of_text(path, k, more.get(k)) for k in _LISTS)
    share = more.get("holds_on", 1.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
        raise BadInputError(
            f"{path}: not a plan that bisect-trt wrote ('holds_on' must be a share); run "
            "`bisect-trt run` to make one"
        )
    return SavedPlan(plan, path, requirements, metrics, rewritten, float(share))


def _list_of_text(path: Path, key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise BadInputError(
            f"{path}: not a plan that bisect-trt wrote ({key!r} must be a list of text); run "
            "`bisect-trt run` to make one"
        )
    return tuple(value)
