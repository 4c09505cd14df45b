"""The forms in which runtimes are told of a plan, read back: the typed model's types by ONNX and by
TensorRT's parser, and the pins that the forms of older versions name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto

from bisect_trt.core.errors import (
    BadInputError,
    RunnerFailedError,
    RunnerUnavailableError,
    one_line,
)
from bisect_trt.core.names import counted
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.graph.files.aside import values_aside
from bisect_trt.graph.files.runtime_forms import file_form
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.graph.passes.weak_forms import (
    OF_FUNCTIONS,
    names_in_tensorrt,
    pins_of_script,
    pins_of_trtexec,
    polygraphy_script,
    trtexec_arguments,
)
from bisect_trt.graph.tensors.operator_rules import STORAGE_TYPE
from bisect_trt.graph.tensors.tensor_types import infer_types
from bisect_trt.runners.tensorrt.module import installed_module
from bisect_trt.runners.tensorrt.profile import profile_of, values_of
from bisect_trt.runners.tensorrt.readback import dishonoured_after_parsing
from bisect_trt.runners.tensorrt.records import EngineRequest
from bisect_trt.runners.workers.process import IsolatedWorker
from bisect_trt.stations.case.case import Case

_NO_SHAPE = "Field 'shape' of 'type' is required"
PARSER = "bisect_trt.runners.tensorrt.parser_worker:ParsingWorker"


@dataclass(frozen=True)
class Check:
    """One way in which the plan was looked at. ``holds`` None means that it could not be looked at
    here, and ``detail`` why.
    """

    what: str
    holds: bool | None
    detail: str


def check_forms(case: Case, plan: PrecisionPlan) -> list[Check]:
    """Whether each form in which a runtime is told of ``plan`` says what it says."""
    return [_typed(case.graph, plan), _parsed(case, plan), *_written(case, plan)]


def _typed(graph: Graph, plan: PrecisionPlan) -> Check:
    """The typed ONNX by ONNX's own type inference: pinned layers FLOAT, lowered ones reduced."""
    what = "typed ONNX"
    if not plan.base.is_storage:
        return Check(what, None, f"{plan.base.value.upper()} is no type but a switch of the engine")
    typed = to_typed(graph, plan)
    complaint = _complaint(typed)
    if complaint and not _complaint(graph.proto):
        return Check(what, False, f"ONNX's own check refuses it: {complaint}")
    scope = infer_types(typed)
    made_by = {node.name: node for node in typed.graph.node}
    wrong, counts = [], {TensorProto.FLOAT: 0, STORAGE_TYPE[plan.base]: 0}
    for layer in graph.layers_at(plan.base):
        if layer.name not in made_by:
            continue
        wanted = TensorProto.FLOAT if layer.name in plan.pinned else STORAGE_TYPE[plan.base]
        made, role = made_by[layer.name], graph.role(layer.index, plan.base)
        found = [scope.type_of(made.output[slot]) for slot in role.reduced_out]
        if any(t in counts and t != wanted for t in found):
            wrong.append(layer.name)
        counts[wanted] += 1
    if wrong:
        return Check(what, False, f"layer {wrong[0]!r} has another type than the plan says")
    kept, lowered = counts[TensorProto.FLOAT], counts[STORAGE_TYPE[plan.base]]
    said = f"{counted(kept, 'layer')} FLOAT, {lowered} {plan.base.value.upper()}"
    if complaint:
        said += f"; ONNX's own check refuses it as it does the source model ({complaint})"
    return Check(what, True, said)


def _complaint(model: onnx.ModelProto) -> str:
    """What ONNX's own check, with its type inference, says against ``model``; empty for nothing.

    An output without a declared shape is legal for every runtime, and no complaint.
    """
    model = values_aside(model)
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # the library has its own classes for each of its checks
        if _NO_SHAPE not in str(error):
            return one_line(error, 160)
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:
        return one_line(error, 160)
    return ""


def _parsed(case: Case, plan: PrecisionPlan) -> Check:
    """The types that TensorRT's own parser gives the layers; needs no GPU."""
    what, graph, settings = "TensorRT's parser", case.graph, case.settings
    module = installed_module(settings.trt_module)
    if module is None:
        return Check(what, None, "TensorRT is not installed here")
    if not plan.base.is_storage:
        return Check(what, None, f"{plan.base.value.upper()} is no type")
    layers = graph.layers
    producers = {tensor: layer.name for layer in layers for tensor in layer.outputs}
    profile = profile_of(graph.proto, case.samples, settings.profiles)
    values = values_of(case.samples)

    def types_of(worker: IsolatedWorker, model: onnx.ModelProto) -> dict[str, Sequence[str]]:
        with file_form(model) as form:
            request = EngineRequest(
                form.source, profile, False, producers=producers, values=values, key=form.key
            )
            found: dict[str, Sequence[str]] = worker.call(
                "types", request, timeout_s=settings.probe_timeout_s
            )
            return found

    with IsolatedWorker(PARSER, {"module": module}) as worker:
        try:
            types = types_of(worker, to_typed(graph, plan))
        except RunnerUnavailableError as error:
            return Check(what, None, one_line(error, 120))
        except RunnerFailedError as error:
            said = one_line(error, 200)
            try:
                types_of(worker, graph.proto)
            except RunnerFailedError:  # the fault is not the plan's
                return Check(what, None, f"it does not take the source model either: {said}")
            return Check(what, False, said)
    wrong = dishonoured_after_parsing(layers, plan, types)
    if wrong:
        return Check(what, False, wrong[0].message)
    seen = sum(layer.name in types for layer in layers)
    return Check(what, True, f"{seen} of {len(layers)} layers seen, each of the plan's type")


def _written(case: Case, plan: PrecisionPlan) -> list[Check]:
    """The two forms of weak typing, read back: the pins they name are the plan's, as TensorRT's
    parser calls them.
    """
    checks, graph = [], case.graph
    if case.lifted:
        said = "the source is reduced already: weak typing cannot keep its layers in FP32"
        return [Check(what, None, said) for what in ("trtexec arguments", "polygraphy script")]
    pins = plan.pinned if plan.base.is_storage else frozenset[str]()
    for what, write, read in (
        ("trtexec arguments", trtexec_arguments, pins_of_trtexec),
        ("polygraphy script", polygraphy_script, pins_of_script),
    ):
        if pins and case.model.written_out:
            checks.append(Check(what, None, OF_FUNCTIONS))
            continue
        try:
            found = read(write(graph, replace(plan, pinned=pins, held=frozenset())))
            expected = frozenset(names_in_tensorrt(graph, pins).values())
        except BadInputError as error:
            checks.append(Check(what, None, one_line(error, 160)))
            continue
        holds = found == expected
        said = f"names {counted(len(found), 'pin')}"
        detail = said if holds else f"{said}, the plan has {len(pins)}"
        checks.append(Check(what, holds, detail))
    return checks
