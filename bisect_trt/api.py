"""The commands as functions; their options are those of :class:`Settings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.limits import Limits
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.pipeline import cure as try_cures
from bisect_trt.pipeline import reduce as run_reduction
from bisect_trt.pipeline import run
from bisect_trt.reduction.cures import Cures
from bisect_trt.reduction.oracle import Observation
from bisect_trt.reduction.reduce import Reduced
from bisect_trt.report.files import write_verification
from bisect_trt.report.summarise import Result
from bisect_trt.settings import Settings, Source, options
from bisect_trt.steps.saved_plan import SavedPlan, read_plan
from bisect_trt.steps.verify import Verification
from bisect_trt.steps.verify import verify as check_plan_validates


def _with_options(command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of ``command`` to a function's signature and documentation."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        fields = {f.name: f for f in inspect.signature(Settings).parameters.values()}
        taken = {n: o for n, o in options().items() if command in o.commands}
        own = inspect.signature(call)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        kept = [p for p in kept if p.name not in taken]
        more = [fields[n].replace(kind=inspect.Parameter.KEYWORD_ONLY) for n in taken]
        observer = [p for p in kept if p.kind is p.KEYWORD_ONLY]
        positional = [p for p in kept if p.kind is not p.KEYWORD_ONLY]
        signature = own.replace(parameters=[*positional, *more, *observer])
        call.__signature__ = signature  # type: ignore[attr-defined]
        lines = [f"    {name}: {o.help} (``{o.flag}``)" for name, o in taken.items()]
        call.__doc__ = "\n".join([inspect.getdoc(call) or "", "", "Options:", *lines])
        return call

    return decorate


@_with_options("run")
def bisect(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    *,
    observer: Observer | None = None,
    limits: Limits = Limits(),
    **chosen: Any,
) -> Result:
    """Find the layers of ``model`` that must stay in FP32; write the run's folder.

    Args:
        model: an FP32 model, its path or its proto.
        inputs: one sample or several: a mapping of input name to array, or a file, folder, glob or
            ``module:function``; or a function or generator that gives such mappings.
        observer: receives the progress.
        limits: what the steps may take.
        chosen: the options below.

    Returns:
        The content of the run's folder as one record.

    Raises:
        BadInputError: the caller can correct it.
        RunnerUnavailableError: the runner does not work on this machine.
        MachineError: memory, disk or workers gave out. All three are a ``BisectError``.
    """
    return run(_settings("bisect", "run", model, inputs, chosen, limits), observer)


@_with_options("verify")
def verify(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    plan: PrecisionPlan | str | Path,
    *,
    observer: Observer | None = None,
    limits: Limits = Limits(),
    **chosen: Any,
) -> Verification:
    """Check that ``plan`` still meets the requirements, as ``bisect-trt verify`` does.

    Args:
        model: an FP32 model, its path or its proto.
        inputs: as for :func:`bisect`.
        plan: a plan, or the path of a plan.json.
        observer: receives the progress.
        limits: what the steps may take.
        chosen: the options below.

    Raises:
        BadInputError: it is no plan of this model.
        RunnerUnavailableError: the runner cannot work here, or a time limit cannot be judged.
    """
    if isinstance(plan, PrecisionPlan):
        saved = SavedPlan(plan, Path("plan"))
    elif isinstance(plan, (str, Path)):
        saved = read_plan(Path(plan))
    else:
        raise BadInputError(f"plan: a {type(plan).__name__}; pass a PrecisionPlan or a plan's path")
    chosen = {"precision": saved.searched, **chosen}
    settings = _settings("verify", "verify", model, inputs, chosen, limits)
    if settings.precision is not saved.searched:
        given, planned = settings.precision.value, saved.searched.value
        raise BadInputError(f"precision={given!r}: this is a plan for {planned}")
    verification = check_plan_validates(settings, saved, observer or Observer())
    write_verification(verification)
    return verification


@_with_options("reduce")
def reduce(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    *,
    precision: Precision | str = Precision.FP32,
    check: str | None = None,
    observer: Observer | None = None,
    **chosen: Any,
) -> Reduced | Observation:
    """Find the smallest part of ``model`` that an engine gets wrong; write its reproducer.

    Args:
        model: an FP32 model, its path or its proto.
        inputs: as for :func:`bisect`.
        precision: what the engine runs in.
        check: a command that judges the candidates instead of an engine.
        observer: receives the progress.
        chosen: the options below.

    Returns:
        The subgraph, or the observation on the whole model if that is not bad.

    Raises:
        BadInputError: the caller can correct it.
        RunnerUnavailableError: the engine cannot work on this machine.
    """
    settings = _settings("reduce", "reduce", model, inputs, chosen)
    made_by = "bisect_trt.reduce(...)"
    return run_reduction(settings, _precision(precision), check, made_by, observer)


@_with_options("cure")
def cure(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    *,
    precision: Precision | str = Precision.FP32,
    subgraph: str | Path | None = None,
    observer: Observer | None = None,
    **chosen: Any,
) -> Cures:
    """Try what makes a wrong engine right and reproducible, as ``bisect-trt cure`` does.

    Args:
        model: an FP32 model, its path or its proto.
        inputs: as for :func:`bisect`.
        precision: what the engine runs in.
        subgraph: a reproducer's folder, whose nodes are marked first.
        observer: receives the progress.
        chosen: the options below.

    Raises:
        BadInputError: the caller can correct it.
        RunnerUnavailableError: no engine can run on this machine.
    """
    settings = _settings("cure", "cure", model, inputs, chosen)
    where = Path(subgraph) if subgraph is not None else None
    return try_cures(settings, _precision(precision), where, observer)


def _settings(
    call: str,
    command: str,
    model: Any,
    inputs: Source | Sequence[Source],
    chosen: dict[str, Any],
    limits: Limits = Limits(),
) -> Settings:
    taken = [name for name, option in options().items() if command in option.commands]
    unknown = [name for name in chosen if name not in taken]
    if unknown:
        near = get_close_matches(unknown[0], taken, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{call}() got an unexpected keyword argument {unknown[0]!r}{hint}")
    return Settings(model=model, inputs=_several(inputs), limits=limits, **chosen)


def _precision(name: Precision | str) -> Precision:
    try:
        return Precision(name)
    except ValueError as error:
        names = ", ".join(p.value for p in Precision)
        raise BadInputError(f"precision={name!r}: it is one of {names}") from error


def _several(inputs: Source | Sequence[Source]) -> list[Source]:
    """The samples one by one; refuses an array, which does not name its input."""
    if isinstance(inputs, np.ndarray):
        raise BadInputError("inputs: an array without a name; pass {'input name': array}")
    if inputs is None:
        raise BadInputError("inputs: None; pass {'input name': array}, or files")
    if isinstance(inputs, Sequence) and not isinstance(inputs, (str, Path)):
        return list(inputs)
    return [inputs]
