"""``verify``: does a plan still hold, for new weights or new inputs? One answer, made for release
gates.

The plan is executed by both emulators and, where one can run, by the engine; the typed model's
types are checked against it, by ONNX's own inference and by TensorRT's parser where that is
installed; and the forms in which older versions are told of the pins are read back.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from bisect_trt.core.errors import (
    BadInputError,
    RunnerFailedError,
    RunnerUnavailableError,
    one_line,
)
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.layers import Layer, list_layers, node_names
from bisect_trt.graph.load import load_model, loadable
from bisect_trt.graph.operator_rules import STORAGE_TYPE
from bisect_trt.graph.passes.typed import check_plan, to_typed
from bisect_trt.graph.tensor_types import infer_types
from bisect_trt.graph.weak_forms import polygraphy_script, trtexec_arguments
from bisect_trt.probe.prober import ProbeResult
from bisect_trt.runners.tensorrt.module import installed_module
from bisect_trt.runners.tensorrt.readback import dishonoured_after_parsing
from bisect_trt.runners.tensorrt.records import EngineRequest
from bisect_trt.runners.tensorrt.runner import profile_of, values_of
from bisect_trt.runners.workers.process import IsolatedWorker
from bisect_trt.stations.job import Job
from bisect_trt.stations.settings import Settings
from bisect_trt.stations.triage import times

PARSER = "bisect_trt.runners.tensorrt.parsing:ParsingWorker"


@dataclass(frozen=True)
class Check:
    """One way in which the plan was looked at. ``holds`` None means that it could not be looked at
    here, and ``detail`` why.
    """

    what: str
    holds: bool | None
    detail: str


@dataclass(frozen=True)
class Verification:
    """``passed`` if the runner that decides meets the requirements and nothing that was looked at
    contradicts the plan.
    """

    plan: PrecisionPlan
    checks: Sequence[Check]
    requirements: Sequence[str] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """No check failed."""
        return all(check.holds is not False for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The answer for machines."""
        return {
            "passed": self.passed,
            "plan": {"base": self.plan.base.value, "pinned": sorted(self.plan.pinned)},
            "requirements": list(self.requirements),
            "checks": [vars(c) for c in self.checks],
        }


@dataclass(frozen=True)
class SavedPlan:
    """A plan.json: the plan, the requirements and metrics it was found for, and the layers that a
    rewrite made before.
    """

    plan: PrecisionPlan
    path: Path
    requirements: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()

    @property
    def searched(self) -> Precision:
        """The precision of a run that looks at this plan; strict FP32 is the answer of one that
        found nothing lower.
        """
        return self.plan.base if self.plan.base is not Precision.FP32 else Precision.FP16

    def check_model(self, model: onnx.ModelProto) -> None:
        """Raise :class:`BadInputError` if the plan pins layers that ``model`` lacks, or is for a
        rewritten model and it is none.
        """
        absent = sorted(set(self.rewritten) - set(node_names(model.graph.node)))
        if absent:
            raise BadInputError(
                f"{self.path}: the plan is for a model rewritten with --rewrite, and this one has "
                f"no layer {absent[0]!r}; "
                "use model.rewritten.onnx of the run's folder, or pass --rewrite layernorm to "
                "verify"
            )
        check_plan(model, self.plan)


def read_plan(path: Path) -> SavedPlan:
    """What a plan.json holds. Raises :class:`BadInputError` if it cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error, 80)})") from error
    plan, more = PrecisionPlan.from_json(text, str(path)), json.loads(text)
    lists = (
        tuple(str(entry) for entry in more.get(key, ()))
        for key in ("requirements", "metrics", "rewritten")
    )
    return SavedPlan(plan, path, *lists)


def verify(settings: Settings, saved: SavedPlan, observer: Observer | None = None) -> Verification:
    """Check a plan on the settings' model and inputs, by its own requirements where the settings
    name none.

    Raises :class:`BadInputError` if it is no plan of this model.
    """
    plan = saved.plan
    if not settings.require and saved.requirements:
        settings = replace(
            settings, require=saved.requirements, metrics=settings.metrics or saved.metrics
        )
    if settings.rewrite is None:  # refused before a folder is made
        saved.check_model(load_model(settings.model).proto)
    job = Job(settings, observer or Observer(), "-verify")
    try:
        model = job.material.model.proto
        saved.check_model(model)
        layers = list_layers(model)
        job.observer.station("verify")
        # The engine decides where there is one; the emulators' word is then shown, but an engine
        # may do better than they say.
        judges = [job.engine] if job.engine is not None else [job.prober, job.second]
        checks = [_judged(prober.probe(plan), counts=True) for prober in judges]
        if job.engine is not None:
            checks += [
                _judged(prober.probe(plan), counts=False) for prober in (job.prober, job.second)
            ]
        checks += [
            _typed(model, plan, layers),
            _parsed(job, model, plan, layers),
            *_written(model, plan),
        ]
        return Verification(plan, checks, job.material.requirements.texts)
    finally:
        job.close()


def _judged(result: ProbeResult, *, counts: bool) -> Check:
    what = f"requirements on {result.runner}"
    detail = f"{result.verdict.value}: {times(result.score)}" + (
        f" ({result.note})" if result.note else ""
    )
    return Check(
        what,
        result.verdict.passed if counts else None,
        detail if counts else f"{detail}; the engine decides",
    )


def _typed(model: onnx.ModelProto, plan: PrecisionPlan, layers: Sequence[Layer]) -> Check:
    """The typed ONNX by ONNX's own type inference: pinned layers FLOAT, lowered ones reduced."""
    what = "typed ONNX"
    if not plan.base.is_storage:
        return Check(what, None, f"{plan.base.value.upper()} is no type but a switch of the engine")
    typed = to_typed(model, plan)
    onnx.checker.check_model(typed, full_check=True)
    scope = infer_types(typed)
    made_by = {node.name: node for node in typed.graph.node}
    wrong, counts = [], {TensorProto.FLOAT: 0, STORAGE_TYPE[plan.base]: 0}
    for layer in layers:
        if plan.base not in layer.precisions or layer.name not in made_by:
            continue
        wanted = TensorProto.FLOAT if layer.name in plan.pinned else STORAGE_TYPE[plan.base]
        found = [scope.type_of(o) for o in made_by[layer.name].output if o]
        if any(t in counts and t != wanted for t in found):
            wrong.append(layer.name)
        counts[wanted] += 1
    said = f"{counts[TensorProto.FLOAT]} layers FLOAT, {counts[STORAGE_TYPE[plan.base]]} {plan.base.value.upper()}"
    return Check(
        what,
        not wrong,
        f"layer {wrong[0]!r} has another type than the plan says" if wrong else said,
    )


def _parsed(
    job: Job, model: onnx.ModelProto, plan: PrecisionPlan, layers: Sequence[Layer]
) -> Check:
    """The types that TensorRT's own parser gives the layers; needs no GPU."""
    what = "TensorRT's parser"
    module = installed_module(job.settings.trt_module)
    if module is None or not plan.base.is_storage:
        return Check(
            what,
            None,
            "TensorRT is not installed here"
            if module is None
            else f"{plan.base.value.upper()} is no type",
        )
    samples = job.material.samples
    producers = {tensor: layer.name for layer in layers for tensor in layer.outputs}
    profile = profile_of(model, samples, job.settings.profiles)
    with (
        IsolatedWorker(PARSER, {"module": module}) as worker,
        loadable(to_typed(model, plan)) as source,
    ):
        request = EngineRequest(
            source, profile, False, producers=producers, values=values_of(samples)
        )
        try:
            types: dict[str, Sequence[str]] = worker.call(
                "types", request, timeout_s=job.settings.probe_timeout_s
            )
        except RunnerUnavailableError as error:
            return Check(what, None, one_line(error, 120))
        except RunnerFailedError as error:
            return Check(what, False, one_line(error, 200))
    wrong = dishonoured_after_parsing(layers, plan, types)
    seen = sum(layer.name in types for layer in layers)
    return Check(
        what,
        not wrong,
        wrong[0].message
        if wrong
        else f"{seen} of {len(layers)} layers seen, each of the plan's type",
    )


def _written(model: onnx.ModelProto, plan: PrecisionPlan) -> list[Check]:
    """The two forms of weak typing, read back: the pins they name are the plan's."""
    checks = []
    for what, write, read in (
        ("trtexec arguments", trtexec_arguments, _pins_of_trtexec),
        ("polygraphy script", polygraphy_script, _pins_of_script),
    ):
        try:
            found = read(write(model, plan))
        except BadInputError as error:
            checks.append(Check(what, None, one_line(error, 160)))
            continue
        pins = plan.pinned if plan.base.is_storage else frozenset[str]()
        holds = found == pins
        checks.append(
            Check(
                what,
                holds,
                f"names {len(found)} pins"
                if holds
                else f"names {len(found)} pins, the plan has {len(pins)}",
            )
        )
    return checks


def _pins_of_trtexec(text: str) -> frozenset[str]:
    """As trtexec reads them: split on commas, then at the last colon."""
    _, marked, rest = text.partition("'--layerPrecisions=")
    entries = rest.partition("'")[0].split(",") if marked else []
    return frozenset(entry.rpartition(":")[0] for entry in entries)


def _pins_of_script(text: str) -> frozenset[str]:
    """The set that the script defines; only that part is evaluated, as a literal."""
    for statement in ast.parse(text).body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and statement.targets[0].id == "PINNED"
        ):
            return (
                frozenset(ast.literal_eval(statement.value))
                if isinstance(statement.value, ast.Set)
                else frozenset()
            )
    return frozenset()
