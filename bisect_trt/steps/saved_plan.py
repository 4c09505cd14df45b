"""Reads plan.json, and the layers that options name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_trt.base.display import counted
from bisect_trt.base.errors import BadInputError, one_line
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.metrics.scales import Scale
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Layer
from bisect_trt.model.outputs import select_tensors
from bisect_trt.settings import Settings


def marked_layers(
    settings: Settings, graph: Graph, layers: Sequence[Layer]
) -> frozenset[str] | None:
    """The layers that ``--mark`` names; None where it is not given.

    Raises:
        BadInputError: a selector names no layer that can run at the precision.
    """
    if not settings.mark:
        return None
    marked: set[str] = set()
    for selector in settings.mark:
        tensors = set(select_tensors(graph, [selector]))
        found = {x.name for x in layers if not tensors.isdisjoint(x.outputs)}
        if not found:
            raise BadInputError(
                f"--mark {selector!r}: names no layer that can run in {settings.precision.value}"
            )
        marked |= found
    return frozenset(marked)


def compiled(flag: str, text: str) -> re.Pattern[str]:
    """The regular expression ``text`` of the option ``flag``.

    Raises:
        BadInputError: it is none.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise BadInputError(f"{flag} {text!r}: no regular expression ({error})") from error


def held_layers(
    settings: Settings, layers: Sequence[Layer]
) -> tuple[frozenset[str], frozenset[str]]:
    """The layers that ``--keep-fp32`` and ``--keep-reduced`` name.

    Raises:
        BadInputError: an expression is wrong or names no layer, or both name the same layer.
    """
    kept_fp32 = _named("--keep-fp32", settings.keep_fp32, layers)
    kept_reduced = _named("--keep-reduced", settings.keep_reduced, layers)
    if both := kept_fp32 & kept_reduced:
        raise BadInputError(f"--keep-fp32 and --keep-reduced: both name layer {min(both)!r}")
    return kept_fp32, kept_reduced


def _named(flag: str, texts: Sequence[str], layers: Sequence[Layer]) -> frozenset[str]:
    """The layers whose names one of ``texts`` matches."""
    named = set[str]()
    for text in texts:
        expression = compiled(flag, text)
        matched = {x.name for x in layers if expression.search(x.name)}
        if not matched:
            raise BadInputError(f"{flag} {text!r}: names no layer; `bisect-trt inspect` lists them")
        named |= matched
    return frozenset(named)


@dataclass(frozen=True)
class SavedPlan:
    """A plan.json: the plan and what it was found for.

    ``given_share`` and ``robust`` are the shares of the given and of unseen inputs that must pass.
    ``fitted`` says that the search used the given inputs alone. ``inputs`` are the digests of the
    search's inputs, and ``chance`` seeded its copies. ``rewritten`` are the layers that a rewrite
    made, ``scales`` the outputs' scales in the default requirement. ``outputs`` are the tensors
    that were judged instead of the model's outputs.
    """

    plan: PrecisionPlan
    path: Path
    requirements: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    given_share: float = 1.0
    robust: float | None = None
    fitted: bool = False
    inputs: frozenset[str] = frozenset()
    chance: str = ""
    scales: Mapping[str, Scale] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    @property
    def searched(self) -> Precision:
        """The precision to verify this plan at: FP16 where it keeps everything in FP32."""
        return self.plan.base if self.plan.base is not Precision.FP32 else Precision.FP16

    def check_model(self, graph: Graph) -> None:
        """Refuse another model.

        Raises:
            BadInputError: the plan pins layers that the model lacks, or is for a rewritten model.
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
    """The plan in the file ``path``.

    Raises:
        BadInputError: it cannot be read, or is no plan.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error, 80)})") from error
    # Older plans lack the later keys, and people edit plan.json by hand.
    plan, data = PrecisionPlan.from_json(text, str(path)), json.loads(text)
    try:
        share = _share("holds_on", data)
        searched = data.get("searched", {})
        if not isinstance(searched, dict) or not all(
            isinstance(searched.get(key, ""), str) for key in ("inputs", "chance")
        ):
            raise TypeError("'searched' must say with what")
        return SavedPlan(
            plan=plan,
            path=path,
            requirements=_texts("requirements", data),
            metrics=_texts("metrics", data),
            rewritten=_texts("rewritten", data),
            given_share=1.0 if share is None else share,
            robust=_share("robust", data),
            fitted=data.get("fitted") is True,
            inputs=frozenset(searched.get("inputs", "").split()),
            chance=searched.get("chance", ""),
            scales=_scales(data),
            outputs=_texts("outputs", data),
        )
    except TypeError as error:
        raise BadInputError(
            f"{path}: not a plan that bisect-trt wrote ({error}); run `bisect-trt run` to make one"
        ) from error


def _share(key: str, data: Mapping[str, Any]) -> float | None:
    value = data.get(key)
    if value is None:
        return None
    # In Python True is an int.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise TypeError(f"{key!r} must be a share")
    return float(value)


def _scales(data: Mapping[str, Any]) -> dict[str, Scale]:
    try:
        return {str(name): Scale.from_json(s) for name, s in (data.get("scales") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TypeError("'scales' must say what each output is held to") from error


def _texts(key: str, data: Mapping[str, Any]) -> tuple[str, ...]:
    value = data.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise TypeError(f"{key!r} must be a list of text")
    return tuple(value)


def begun_at(
    older: SavedPlan | None, names: Sequence[str]
) -> tuple[frozenset[str], tuple[Finding, ...]]:
    """The pins of an older plan that a search can begin with, and a finding on the others.

    Raises:
        BadInputError: the plan pins layers and none of these.
    """
    if older is None:
        return frozenset(), ()
    path, pinned = older.path, older.plan.pinned
    usable = pinned.intersection(names)
    absent = sorted(pinned - usable)
    if absent and not usable:
        raise BadInputError(
            f"--start-from {path}: pins {absent[0]!r}, and none of its pins is a layer that is "
            "searched here; leave the option out"
        )
    if not absent:
        return usable, ()
    message = (
        f"of the {counted(len(pinned), 'pin')} of {path} {len(absent)} cannot be searched here: "
        f"{', '.join(absent[:4])}{' ...' if len(absent) > 4 else ''}"
    )
    return usable, (Finding("start-from", absent[0], message),)
