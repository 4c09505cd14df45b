"""The commands as functions; their options are those of :class:`Settings`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import onnx

from bisect_trt.base.errors import BadInputError, BisectError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.limits import Limits
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.lifted import load_source
from bisect_trt.pipeline import cure as try_cures
from bisect_trt.pipeline import reduce as run_reduction
from bisect_trt.pipeline import run
from bisect_trt.reduction.cures import Cures
from bisect_trt.reduction.oracle import Observation
from bisect_trt.reduction.reduce import Reduced
from bisect_trt.report.files import write_verification
from bisect_trt.report.summarise import Result
from bisect_trt.settings import Feed, Settings, Source, options
from bisect_trt.steps.import_plan import older_plan
from bisect_trt.steps.saved_plan import SavedPlan
from bisect_trt.steps.verify import Verification
from bisect_trt.steps.verify import verify as check_plan_validates

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

_FORMER = {
    "metrics": "metric",
    "profiles": "profile",
    "evaluation_timeout_s": "evaluation_timeout",
}
"""Arguments of version 0.4.0: today's name."""

_GIVEN = ContextVar[frozenset[str]]("_GIVEN", default=frozenset())
"""The arguments that the current call was given, whose defaults say nothing."""


def _from_python(
    command: str,
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """Documents the arguments of ``command``; its errors then name arguments, not flags."""

    def decorate(call: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        own = inspect.signature(call)
        parameters = own.parameters
        taken = {n: o for n, o in options().items() if command in o.commands}
        flags = {"--input": "inputs", **{f"--{n}": n for n in parameters}}
        flags |= {option.flag: name for name, option in taken.items()}

        @wraps(call)
        def called(*given: Arguments.args, **named: Arguments.kwargs) -> Answer:
            for former in _FORMER.keys() & named.keys():
                named[_FORMER[former]] = named.pop(former)
            for name in named.keys() - parameters.keys():
                near = get_close_matches(name, parameters, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                said = f"{call.__name__}() got an unexpected keyword argument {name!r}{hint}"
                raise TypeError(said)
            token = _GIVEN.set(frozenset(n for n, value in named.items() if value is not None))
            try:
                return call(*given, **named)
            except BisectError as error:
                error.args = (_with_arguments(str(error), flags),)
                raise
            finally:
                _GIVEN.reset(token)

        lines = [inspect.getdoc(call) or "", "", "Options:"]
        for name, option in taken.items():
            parameter = parameters[name]
            shown = f"{name}: {parameter.annotation} = {parameter.default!r}"
            said = _with_arguments(option.help_of.get(command, option.help), flags)
            lines += [_wrapped(shown, 4, 8), _wrapped(said, 8, 8)]
        called.__doc__ = "\n".join(lines)
        called.__signature__ = _Signature(  # type: ignore[attr-defined]
            list(parameters.values()), return_annotation=own.return_annotation
        )
        return called

    return decorate


class _Signature(inspect.Signature):
    """A signature whose text is names and defaults, in lines of 80 columns."""

    def __str__(self) -> str:
        # Before Python 3.13 help() writes a signature on one line, of this size 3,000 characters.
        plain = [p.replace(annotation=p.empty) for p in self.parameters.values()]
        return _wrapped(f"{inspect.Signature(plain)} -> {self.return_annotation}", 0, 4)


def _wrapped(text: str, first: int, others: int) -> str:
    """``text`` in lines that help() keeps within 80 columns, indented."""
    return fill(
        text,
        74,
        initial_indent=" " * first,
        subsequent_indent=" " * others,
        break_long_words=False,
        break_on_hyphens=False,
    )


_FLAG = re.compile(
    r"(?<![\w-])(?P<flag>--[a-z][a-z0-9-]*)"
    r"(?: (?P<value>'[^']*'|\"[^\"]*\"|\[[^]]*\]|\d+(?:\.\d+)?(?![\w.])|[^\s:]\S*?(?=: )|[\w-]+))?"
)
"""A flag, and the word after it, which may be its value."""


def _with_arguments(text: str, flags: Mapping[str, str]) -> str:
    """``text`` with ``require='x'`` for ``--requirement 'x'``; commands in backticks stay."""

    def argument(found: re.Match[str]) -> str:
        flag, value = found["flag"], found["value"]
        if flag not in flags:
            return found[0]
        name = flags[flag]
        its = {option.flag: option for option in options().values()}.get(flag)
        if its is not None and its.kind is bool:
            return f"{name}=True" + (f" {value}" if value else "")
        if value is None:
            return name
        if value[0] in "'\"[" or re.fullmatch(r"[\d.]+|None", value):
            return f"{name}={value}"
        before, after = found.string[: found.start()], found.string[found.end() :]
        is_value = after.startswith(": ") if not before else before.endswith(("pass ", "use "))
        if is_value or (its is not None and value in its.choices):
            return f"{name}={value!r}"
        return f"{name} {value}"

    parts = text.split("`")
    parts[::2] = [_FLAG.sub(argument, part) for part in parts[::2]]
    return "`".join(parts)


@_from_python("run")
def bisect(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    *,
    precision: Precision | Literal["fp16", "bf16", "tf32"] = "fp16",
    runner: Literal["auto", "emulated", "tensorrt", "onnxruntime-cuda", "onnxruntime-rtx"] = "auto",
    emulate_on: Literal["cpu", "cuda"] = "cpu",
    require: str | Sequence[str] = (),
    metric: str | Callable[..., float] | Sequence[str | Callable[..., float]] = (),
    outputs: str | Sequence[str] = (),
    robust: float | None = None,
    allow_misses: float | None = None,
    strict: bool = False,
    max_cost: float | None = None,
    start_from: str | Path | None = None,
    reduced: str | Path | None = None,
    keep_fp32: str | Sequence[str] = (),
    keep_reduced: str | Sequence[str] = (),
    mark: str | Sequence[str] = (),
    infinite: str | Sequence[str] = (),
    holdout: Source | Sequence[Source] = (),
    augmented: str = "auto",
    stacked: bool = False,
    image_size: str | None = None,
    mean: str | None = None,
    std: str | None = None,
    scale: float | None = None,
    layout: Literal["auto", "NCHW", "NHWC"] = "auto",
    golden: str | Path | Feed | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    repair: str = "auto",
    weights: Literal["fit", "nearest"] = "fit",
    trt_module: Literal["tensorrt", "tensorrt_rtx"] | None = None,
    typing: Literal["strong", "weak"] = "strong",
    profile: str | Sequence[str] = (),
    time_shape: str | Sequence[str] = (),
    evaluation_timeout: float = 900.0,
    workers: int = 1,
    threads: int | None = None,
    ray: str | None = None,
    budget: float | None = None,
    max_builds: int | None = None,
    certify: Literal["emulated", "engine"] = "emulated",
    observer: Observer | None = None,
    limits: Limits | None = None,
) -> Result:
    """Find the layers of ``model`` that must stay in FP32; write the run's folder.

    Args:
        model: an FP32 model, its path or its proto.
        inputs: one sample or several. A sample is a mapping of input name to
            array, a file, a folder, a glob or ``module:function``. A function
            or generator of mappings gives several.
        observer: receives the progress.
        limits: bounds on the time of the steps; None for the usual ones.

    Returns:
        The content of the run's folder as one record. ``open()`` shows its
        report, ``model_path`` is the model to ship.

    Raises:
        BadInputError: the caller can correct it.
        RunnerUnavailableError: the runner does not work on this machine.
        MachineError: memory, disk or workers gave out.
            All three are a ``BisectError``.
    """
    return run(_settings("run", locals()), observer)


@_from_python("verify")
def verify(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    plan: PrecisionPlan | str | Path | None = None,
    *,
    precision: Precision | Literal["fp16", "bf16", "tf32"] | None = None,
    runner: Literal["auto", "emulated", "tensorrt", "onnxruntime-cuda", "onnxruntime-rtx"] = "auto",
    emulate_on: Literal["cpu", "cuda"] = "cpu",
    require: str | Sequence[str] = (),
    metric: str | Callable[..., float] | Sequence[str | Callable[..., float]] = (),
    outputs: str | Sequence[str] = (),
    hold: str | Sequence[str] = (),
    robust: float | None = None,
    allow_misses: float | None = None,
    reduced: str | Path | None = None,
    infinite: str | Sequence[str] = (),
    holdout: Source | Sequence[Source] = (),
    augmented: str = "auto",
    stacked: bool = False,
    image_size: str | None = None,
    mean: str | None = None,
    std: str | None = None,
    scale: float | None = None,
    layout: Literal["auto", "NCHW", "NHWC"] = "auto",
    golden: str | Path | Feed | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    trt_module: Literal["tensorrt", "tensorrt_rtx"] | None = None,
    typing: Literal["strong", "weak"] = "strong",
    profile: str | Sequence[str] = (),
    time_shape: str | Sequence[str] = (),
    evaluation_timeout: float = 900.0,
    threads: int | None = None,
    observer: Observer | None = None,
    limits: Limits | None = None,
) -> Verification:
    """Check that ``plan``, or another tool's ``reduced`` model, holds.

    Args:
        model: an FP32 model, its path or its proto.
        inputs: as for :func:`bisect`.
        plan: a plan, the path of a plan.json or of another tool's list; None
            with ``reduced``.
        observer: receives the progress.
        limits: bounds on the time of the steps; None for the usual ones.

    Returns:
        What was checked, with ``passed`` and the validation.

    Raises:
        BadInputError: it is no plan or mixed model of this model.
        RunnerUnavailableError: the runner cannot work here, or a time limit
            cannot be judged.
        MachineError: memory, disk or workers gave out.
    """
    given = dict(locals())
    saved = None
    if isinstance(plan, PrecisionPlan):
        saved = SavedPlan(plan, Path("plan"))
    elif isinstance(plan, (str, Path)):
        saved = older_plan(Path(plan), lambda: load_source(model), trt_module)
    elif plan is not None:
        raise BadInputError(f"plan: a {type(plan).__name__}; pass a PrecisionPlan or a plan's path")
    found_for = saved.searched if saved is not None else Precision.FP16
    given["precision"] = found_for if precision is None else precision
    settings = _settings("verify", given)
    if saved is not None and settings.precision is not saved.searched:
        asked, planned = settings.precision.value, saved.searched.value
        raise BadInputError(f"precision={asked!r}: this is a plan for {planned}")
    verification = check_plan_validates(settings, saved, observer or Observer())
    write_verification(verification)
    return verification


@_from_python("reduce")
def reduce(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    *,
    precision: Precision | Literal["fp32", "tf32", "bf16", "fp16"] = "fp32",
    check: str | None = None,
    runner: Literal["auto", "emulated", "tensorrt", "onnxruntime-cuda", "onnxruntime-rtx"] = "auto",
    infinite: str | Sequence[str] = (),
    stacked: bool = False,
    image_size: str | None = None,
    mean: str | None = None,
    std: str | None = None,
    scale: float | None = None,
    layout: Literal["auto", "NCHW", "NHWC"] = "auto",
    out: str | Path | None = None,
    trt_module: Literal["tensorrt", "tensorrt_rtx"] | None = None,
    typing: Literal["strong", "weak"] = "strong",
    evaluation_timeout: float = 900.0,
    workers: int = 1,
    threads: int | None = None,
    budget: float | None = None,
    max_builds: int | None = None,
    observer: Observer | None = None,
) -> Reduced | Observation:
    """Find the smallest part of ``model`` that an engine gets wrong.

    Its reproducer is written into the folder ``out``.

    Args:
        model: an FP32 model, its path or its proto.
        inputs: as for :func:`bisect`.
        precision: what the engine runs in.
        check: a command that judges the candidates instead of an engine.
        observer: receives the progress.

    Returns:
        The subgraph, or the observation on the whole model if that is not bad.

    Raises:
        BadInputError: the caller can correct it.
        RunnerUnavailableError: the engine cannot work on this machine.
    """
    settings = _settings("reduce", locals())
    made_by = "bisect_trt.reduce(...)"
    return run_reduction(settings, _precision(precision), check, made_by, observer)


@_from_python("cure")
def cure(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    *,
    precision: Precision | Literal["fp32", "tf32", "bf16", "fp16"] = "fp32",
    subgraph: str | Path | None = None,
    runner: Literal["auto", "emulated", "tensorrt", "onnxruntime-cuda", "onnxruntime-rtx"] = "auto",
    infinite: str | Sequence[str] = (),
    stacked: bool = False,
    image_size: str | None = None,
    mean: str | None = None,
    std: str | None = None,
    scale: float | None = None,
    layout: Literal["auto", "NCHW", "NHWC"] = "auto",
    out: str | Path | None = None,
    trt_module: Literal["tensorrt", "tensorrt_rtx"] | None = None,
    typing: Literal["strong", "weak"] = "strong",
    evaluation_timeout: float = 900.0,
    workers: int = 1,
    threads: int | None = None,
    budget: float | None = None,
    max_builds: int | None = None,
    observer: Observer | None = None,
) -> Cures:
    """Try what makes a wrong engine right and reproducible.

    Args:
        model: an FP32 model, its path or its proto.
        inputs: as for :func:`bisect`.
        precision: what the engine runs in.
        subgraph: a reproducer's folder, whose nodes are marked first.
        observer: receives the progress.

    Returns:
        What was tried, with what each attempt gave.

    Raises:
        BadInputError: the caller can correct it.
        RunnerUnavailableError: no engine can run on this machine.
    """
    settings = _settings("cure", locals())
    where = Path(subgraph) if subgraph is not None else None
    return try_cures(settings, _precision(precision), where, observer)


def _settings(command: str, given: Mapping[str, Any]) -> Settings:
    """The settings of ``command`` from the arguments of its call."""
    taken = {name: given[name] for name, o in options().items() if command in o.commands}
    taken["limits"] = given.get("limits") or Limits()
    asked = "precision" in _GIVEN.get()
    return Settings(given["model"], _several(given["inputs"]), precision_given=asked, **taken)


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
