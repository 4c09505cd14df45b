"""Reads plan.json, and the layers that options name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from bisect_trt.base.atomic_files import FITTED_MODEL, PLAN, REPAIRED_MODEL
from bisect_trt.base.display import counted
from bisect_trt.base.errors import BadInputError, one_line
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.imports.mapping import ImportedList
from bisect_trt.metrics.scales import Scale
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Layer
from bisect_trt.model.lifted import SourceModel, load_source
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
class Form:
    """What was done to the model that a plan is for."""

    repaired: bool = False
    fitted: bool = False


@dataclass(frozen=True)
class SavedPlan:
    """A plan.json: the plan and what it was found for.

    ``given_share`` and ``robust`` are the shares of the given and of unseen inputs that must pass.
    ``fitted`` says that the search used the given inputs alone. ``inputs`` are the digests of the
    search's inputs, and ``chance`` seeded its copies. ``scales`` are the outputs' scales in the
    default requirement. ``outputs`` are the tensors that were judged instead of the model's
    outputs. ``form`` says of which model the plan is: the original, model.repaired.onnx or
    model.fitted.onnx, whose SHA-256 are ``model_sha256``, ``repaired_sha256``, ``fitted_sha256``.
    ``rewritten`` are layers that 0.4.0's ``--rewrite`` made. ``imported`` is the list of another
    tool that it was read from; None for a plan.json.
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
    form: Form = Form()
    model_sha256: str = ""
    repaired_sha256: str = ""
    fitted_sha256: str = ""
    choices: Mapping[str, tuple[PrecisionPlan, Form]] = field(default_factory=dict)
    imported: ImportedList | None = None

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
                f"no layer {absent[0]!r}; use model.rewritten.onnx of the run's folder"
            )
        graph.check_plan(self.plan)

    def source_of(self, model: str | Path | onnx.ModelProto) -> SourceModel:
        """The model that the plan is for: ``model``, or another form of it beside the plan.

        Raises:
            BadInputError: it cannot be read, or is another one.
        """
        source = load_source(model)
        path = self._form_beside(source.model.digest, source.model.name)
        if path is None:
            return source
        source = load_source(path)
        if source.model.digest != self._wanted[0]:
            raise BadInputError(f"{path}: has changed since {self.path} was written; run again")
        return source

    @property
    def _wanted(self) -> tuple[str, str]:
        """The SHA-256 and the name of the model that the plan is for; empty for the original."""
        if self.form.fitted:
            return self.fitted_sha256, FITTED_MODEL
        return (self.repaired_sha256, REPAIRED_MODEL) if self.form.repaired else ("", "")

    def _form_beside(self, digest: str, name: str) -> Path | None:
        """The model beside the plan, where the one with ``digest`` is an earlier form of it.

        None where the plan is for the model itself.
        """
        wanted, file = self._wanted
        if not file:
            if digest and digest in (self.repaired_sha256, self.fitted_sha256):
                raise BadInputError(
                    f"{name}: {self.path} is for the model as it was before its repair; use that"
                )
            return None
        if digest == wanted:
            return None
        earlier = {self.model_sha256, self.repaired_sha256 if self.form.fitted else ""} - {""}
        if digest not in earlier:
            raise BadInputError(
                f"{name}: {self.path} is for a repaired model, and this is neither that nor its "
                f"original; use {file} of the run's folder, or run again"
            )
        path = self.path.with_name(file)
        if not path.is_file():
            raise BadInputError(
                f"{name}: {self.path} is for its repaired form, and {path} is not there; copy it "
                "from the run's folder"
            )
        return path

    def choice(self, name: str) -> SavedPlan:
        """The plan of another row of the choices.

        Raises:
            BadInputError: there is no such row.
        """
        wanted = name.casefold().replace("-", " ").replace("_", " ").strip()
        wanted = _SHORT.get(wanted, wanted)
        for known, (plan, form) in self.choices.items():
            if known.casefold() == wanted:
                return replace(self, plan=plan, form=form)
        rows = ", ".join(self.choices)
        has = f"it has {rows}" if rows else "it has none; run again"
        raise BadInputError(f"--choice {name}: {self.path} has no such row; {has}")


_SHORT = {"as is": "as it is"}
"""Other names of the choices' rows."""


def read_plan(path: Path) -> SavedPlan:
    """The plan in the file ``path``, or in plan.json of the folder ``path``.

    Raises:
        BadInputError: it cannot be read, or is no plan.
    """
    if path.is_dir():
        path = path / PLAN
        if not path.exists():
            raise BadInputError(f"{path.parent}: no {PLAN} in this folder; give a run's folder")
    try:
        text = path.read_text(encoding="utf-8-sig")
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
            form=_form(data),
            model_sha256=_text("model_sha256", data),
            repaired_sha256=_text("repaired_sha256", data),
            fitted_sha256=_text("fitted_sha256", data),
            choices=_choices(data),
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


def _choices(data: Mapping[str, Any]) -> dict[str, tuple[PrecisionPlan, Form]]:
    try:
        return {
            row["name"].strip(): (
                PrecisionPlan(Precision(row["precision"]), frozenset(_listed("pinned", row))),
                _form(row),
            )
            for row in data.get("choices", [])
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TypeError("'choices' must be rows with a plan each") from error


def _form(data: Mapping[str, Any]) -> Form:
    graph, weights = data.get("graph", "original"), data.get("weights", "nearest")
    if graph not in ("original", "repaired") or weights not in ("nearest", "fit"):
        raise TypeError("'graph' must be original or repaired, and 'weights' nearest or fit")
    return Form(graph == "repaired", weights == "fit")


def _text(key: str, data: Mapping[str, Any]) -> str:
    value = data.get(key, "")
    if not isinstance(value, str):
        raise TypeError(f"{key!r} must be text")
    return value


def _texts(key: str, data: Mapping[str, Any]) -> tuple[str, ...]:
    return () if data.get(key) is None else _listed(key, data)


def _listed(key: str, data: Mapping[str, Any]) -> tuple[str, ...]:
    value = data[key]
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
    # The pins of a repaired graph need not be layers of the original, where the search begins.
    if absent and not usable and older.form == Form():
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
