"""Defines the options of all commands, with defaults and help, and their values."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from bisect_trt.base.display import did_you_mean
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.limits import Limits, thread_count
from bisect_trt.base.plan import Precision

if TYPE_CHECKING:  # --help must not wait for libraries that it does not use
    import onnx
    from numpy.typing import NDArray

Feed: TypeAlias = "Mapping[str, NDArray[Any]]"
"""One sample: arrays by the model's input names."""

Source: TypeAlias = "str | Path | Feed | Callable[[], Iterable[Feed]] | Iterator[Feed]"
"""A file, folder, glob or ``module:function``; a sample; a function or generator of samples."""

PROJECT_FILE = "bisect.toml"
"""The file that names a project's models for the gate."""


def _misses_of_holds(value: str) -> str:
    try:
        return str(round(1.0 - float(value), 12))
    except ValueError:
        return value


FORMER: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "--holds-on": ("--allow-misses", _misses_of_holds),
    "--variants": ("--augmented", str),
    "--probe-timeout": ("--evaluation-timeout", str),
    "--pin": ("--keep-fp32", str),
    "--lower": ("--keep-reduced", str),
    "--piece": ("--subgraph", str),
    "--rewrite": ("--repair", str),
}
"""Options of version 0.4.0: today's name, and a function that translates the value."""


_PLANNING = frozenset({"run", "compare", "verify"})
_ENGINES = frozenset({"reduce", "cure"})
_EVERYWHERE = _PLANNING | _ENGINES
_RUN = frozenset({"run"})
_REPAIR = frozenset({"repair"})
_JUDGED = frozenset({"run", "verify"})
_HOLDING = frozenset({"gate", "verify"})


@dataclass(frozen=True)
class Option:
    """An option of the command line and its field of :class:`Settings`."""

    flag: str  # such as ``--input``
    help: str  # one sentence
    kind: type = str  # type of one value
    choices: tuple[str, ...] = ()  # allowed values; empty for any
    repeatable: bool = False  # whether it may be given several times
    metavar: str | None = None  # placeholder in the help
    least: float | None = None  # smallest value
    most: float | None = None  # largest value
    above: bool = False  # whether the value must exceed ``least``
    help_of: Mapping[str, str] = field(default_factory=dict)  # help of commands that differ
    commands: frozenset[str] = _PLANNING  # commands that have it
    group: str = "Search"  # heading in the help
    rare: bool = False  # whether only --help-all shows it


def option(default: Any, flag: str, help: str, **more: Any) -> Any:
    """A field with its :class:`Option`, repeatable if the default is an empty tuple."""
    metadata = {"option": Option(flag, help, repeatable=default == (), **more)}
    return field(default=default, metadata=metadata)


def checked(option: Option, value: Any) -> Any:
    """Converts ``value`` to the option's type.

    Raises:
        BadInputError: not a value of the option.
    """
    if option.repeatable:
        if isinstance(value, (str, Path, Mapping)) or callable(value):
            return (value,)
        values = tuple(value) if isinstance(value, Iterable) else (value,)
        if any(isinstance(v, (int, float, bytes, type(None))) for v in values):
            raise BadInputError(f"{option.flag} {value}: not a text, or a list of texts")
        return values
    if value is None or isinstance(value, Mapping):
        return value
    if value == "" and option.kind is Path:
        raise BadInputError(f"{option.flag} '': an empty path")
    if option.choices and str(value) not in option.choices:
        hint = ": that is the reference" if str(value) == "fp32" else ": unknown"
        raise BadInputError(
            f"{option.flag} {value}{hint}; choose one of {', '.join(option.choices)}"
            f"{did_you_mean(str(value), option.choices)}"
        )
    try:
        converted = option.kind(value)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"{option.flag} {value}: not a {option.kind.__name__}") from error
    if option.kind is float and not math.isfinite(converted):
        raise BadInputError(f"{option.flag} {value}: not a number that can be used")
    if option.most is not None and converted > option.most:
        raise BadInputError(f"{option.flag} {value}: must be at most {option.most:g}")
    if option.least is not None:
        if option.above and converted <= option.least:
            raise BadInputError(f"{option.flag} {value}: must be more than {option.least:g}")
        if converted < option.least:
            raise BadInputError(f"{option.flag} {value}: must be at least {option.least:g}")
    return converted


_SHARE: dict[str, Any] = {"kind": float, "least": 0.0, "most": 0.999, "metavar": "SHARE"}
_POSITIVE: dict[str, Any] = {"kind": float, "least": 0.0, "above": True}
_AS_FOUND = {"verify": "As for run. Default: those that the plan was found for."}


@dataclass(frozen=True)
class Settings:
    """The options of a command, checked and normalised; each field's help says what it is.

    Raises:
        BadInputError: a value is wrong, or two contradict each other.
    """

    model: str | Path | onnx.ModelProto
    inputs: Sequence[Source]
    precision: Precision = option(
        Precision.FP16,
        "--precision",
        "What unpinned layers run in.",
        help_of={"verify": "Must be the plan's, which is the default."},
        kind=Precision,
        choices=("fp16", "bf16", "tf32"),
        commands=_PLANNING | {"inspect"},
    )
    runner: str = option(
        "auto",
        "--runner",
        "What executes the plans.",
        choices=("auto", "emulated", "tensorrt", "onnxruntime-cuda", "onnxruntime-rtx"),
        help_of={
            "reduce": "The engine: auto is tensorrt, and emulated is none.",
            "cure": "The engine: auto is tensorrt, the only one.",
        },
        commands=_EVERYWHERE,
        group="Hardware",
    )
    emulate_on: str = option(
        "cpu",
        "--emulate-on",
        "Where the emulator computes.",
        choices=("cpu", "cuda"),
        group="Hardware",
        rare=True,
    )
    require: Sequence[str] = option(
        (),
        "--requirement",
        "Such as max_abs<=1e-2, logits:cosine@mean>=0.999, boxes[:,4:]:max_abs<=0.05, "
        "top1@mean>=0.99 or atol=1e-3,rtol=1e-2@p95. Default: snr_db>=40, integers equal.",
        help_of=_AS_FOUND,
        commands=_PLANNING | _REPAIR,
        group="Requirement",
    )
    metric: Sequence[str | Callable[..., float]] = option(
        (),
        "--metric",
        "MODULE:FUNCTION, a task metric for --requirement; with @all it sees all inputs at once.",
        help_of=_AS_FOUND,
        commands=_PLANNING | _REPAIR,
        group="Requirement",
    )
    outputs: Sequence[str] = option(
        (),
        "--outputs",
        "Tensors to judge in place of the model's outputs, such as what a plugin or an NMS reads; "
        "the rest stays in FP32. Several with commas.",
        help_of=_AS_FOUND,
        metavar="TENSORS",
        commands=_PLANNING | _REPAIR,
        group="Requirement",
    )
    hold: Sequence[str] = option(
        (),
        "--hold",
        "A time limit, latency_ms<=MS or saving_kept>=SHARE. One that cannot be judged is not met.",
        metavar="LIMIT",
        commands=_HOLDING,
        group="Requirement",
    )
    robust: float | None = option(
        None,
        "--robust",
        "The share of unseen inputs that must meet the requirement, tested on perturbed and "
        "augmented inputs; 0 fits the given inputs only. Default: 0.95, or less if "
        "--allow-misses asks for less.",
        help_of={
            "verify": "The share of unseen inputs from which on the plan is called validated; the "
            "exit code does not depend on it. Default: that which the plan was found for; 0 means "
            "0.95 of as few copies as tell it."
        },
        **_SHARE,
        commands=_JUDGED,
        group="Requirement",
    )
    allow_misses: float | None = option(
        None,
        "--allow-misses",
        "The share of the given inputs that may miss the requirement. Default: 0.",
        help_of={"verify": "As for run. Default: that which the plan was found for."},
        **_SHARE,
        commands=_JUDGED,
        group="Requirement",
    )
    strict: bool = option(
        False,
        "--strict",
        "Exit code 1 unless the answer is validated.",
        kind=bool,
        commands=_RUN,
        group="Requirement",
    )
    max_cost: float | None = option(
        None,
        "--max-cost",
        "The plan of the least error within PERCENT more time than FP16, as predicted. Exit code "
        "1 if it misses the requirement.",
        kind=float,
        least=0.0,
        metavar="PERCENT",
        commands=_RUN,
        group="Requirement",
    )
    start_from: Path | None = option(
        None,
        "--start-from",
        "Begin the search at an older plan.json, or at another tool's list, which is judged too.",
        kind=Path,
        metavar="PLAN",
        commands=_RUN,
    )
    reduced: Path | None = option(
        None,
        "--reduced",
        "A mixed model that another tool made of this one, with FP16 or BF16 types: a row beside "
        "the others.",
        kind=Path,
        metavar="MODEL",
        help_of={
            "compare": "A mixed model that another tool made of this one, with FP16 or BF16 types: "
            "its errors beside the others.",
            "verify": "Check this mixed model, which another tool made, in place of a plan.",
        },
        group="Input",
    )
    keep_fp32: Sequence[str] = option(
        (),
        "--keep-fp32",
        "Layers whose name matches REGEX stay in FP32.",
        metavar="REGEX",
        commands=_RUN | _REPAIR,
    )
    keep_reduced: Sequence[str] = option(
        (),
        "--keep-reduced",
        "Layers whose name matches REGEX are never kept in FP32.",
        metavar="REGEX",
        commands=_RUN | _REPAIR,
    )
    mark: Sequence[str] = option(
        (),
        "--mark",
        "Only these in the layer tables: a layer, a glob, an operator such as MatMul, a pattern "
        "such as LayerNorm. On an engine only they are marked.",
        metavar="SELECTOR",
        commands=_RUN | {"compare"},
        group="Output",
    )
    infinite: Sequence[str] = option(
        (),
        "--infinite",
        "An input that may hold -inf, such as an additive attention mask.",
        metavar="INPUT",
        commands=_EVERYWHERE | _REPAIR,
        group="Input",
        rare=True,
    )
    holdout: Sequence[Source] = option(
        (),
        "--holdout",
        "Inputs that the search never sees, judged at the end: files, folders, globs; 'none' keeps "
        "no given input apart. Default: a fifth of 20 inputs or more, none with --robust 0.",
        help_of={"verify": "Inputs counted apart, whatever the exit code. Default: none."},
        commands=_JUDGED,
        group="Input",
    )
    augmented: str = option(
        "auto",
        "--augmented",
        "Kinds of augmented inputs, such as shift,flip or MODULE:FUNCTION; none; auto takes "
        "all that fit where fewer than 20 inputs are searched with.",
        metavar="KINDS",
        commands=_JUDGED,
        group="Input",
    )
    stacked: bool = option(
        False,
        "--stacked",
        "Each array of the input files holds many samples, along its first axis.",
        kind=bool,
        commands=_EVERYWHERE | _REPAIR,
        group="Input",
        rare=True,
    )
    image_size: str | None = option(
        None,
        "--image-size",
        "What images are resized to, in pixels. Default: the model's fixed size, else the image's.",
        metavar="WIDTHxHEIGHT",
        group="Input",
        commands=_EVERYWHERE | _REPAIR,
    )
    mean: str | None = option(
        None,
        "--mean",
        "Subtracted from an image's scaled pixels: one number or R,G,B. Default: 0.",
        metavar="NUMBERS",
        group="Input",
        commands=_EVERYWHERE | _REPAIR,
    )
    std: str | None = option(
        None,
        "--std",
        "What an image's pixels, less the mean, are divided by: one number or R,G,B. Default: 1.",
        metavar="NUMBERS",
        group="Input",
        commands=_EVERYWHERE | _REPAIR,
    )
    scale: float | None = option(
        None,
        "--scale",
        "What an image's pixels, 0 to 255, are multiplied by first. Default: 1/255.",
        **_POSITIVE,
        group="Input",
        commands=_EVERYWHERE | _REPAIR,
    )
    layout: str = option(
        "auto",
        "--layout",
        "The axes of an image input; auto takes the axis of 1 or 3 for the channels.",
        choices=("auto", "NCHW", "NHWC"),
        group="Input",
        commands=_EVERYWHERE | _REPAIR,
    )
    golden: str | Path | Feed | None = option(
        None,
        "--golden",
        "The original framework's outputs (.npz), checked against the reference.",
        kind=Path,
        group="Input",
    )
    out: Path | None = option(
        None,
        "--out",
        "The run's folder. Default: reports/MODEL-PRECISION.",
        help_of={
            "verify": "Where answers are kept. Default: reports/MODEL-PRECISION-verify.",
            "compare": "Where the tables go. Default: reports/MODEL-PRECISION-compare.",
            "repair": "Where the repaired model goes. Default: reports/MODEL-PRECISION-repair.",
            "reduce": "The reproducer's folder. Default: reports/MODEL-reduced.",
            "cure": "Where table and model go. Default: reports/MODEL-cured.",
        },
        kind=Path,
        commands=_EVERYWHERE | _REPAIR,
        group="Output",
    )
    fresh: bool = option(
        False,
        "--fresh",
        "Begin with an empty cache, such as after a file that a metric reads has changed.",
        kind=bool,
        commands=_PLANNING | _REPAIR,
    )
    repair: str = option(
        "auto",
        "--repair",
        "Rules that may edit the graph so that FP16 fits, such as fold-bn,mask; auto takes all, "
        "none leaves the graph alone.",
        help_of={"repair": "Rules that may edit the graph, such as fold-bn,mask; auto takes all."},
        metavar="RULES",
        commands=_RUN | _REPAIR,
    )
    weights: str = option(
        "fit",
        "--weights",
        "How weights are rounded: fit takes the neighbour that makes errors cancel, where layers "
        "that multiply matrices would stay in FP32.",
        choices=("fit", "nearest"),
        commands=_RUN,
    )
    trt_module: str | None = option(
        None,
        "--trt-module",
        "Which TensorRT. Default: whichever imports.",
        choices=("tensorrt", "tensorrt_rtx"),
        commands=_EVERYWHERE,
        group="Hardware",
        rare=True,
    )
    typing: str = option(
        "strong",
        "--typing",
        "Weak: flags, for TensorRT 8.6 to 10.x.",
        choices=("strong", "weak"),
        commands=_EVERYWHERE,
        group="Hardware",
        rare=True,
    )
    profile: Sequence[str] = option(
        (),
        "--profile",
        "INPUT:MIN/OPT/MAX, such as x:1x3x32x32/1x3x64x64/1x3x99x99. Default: from the inputs.",
        group="Hardware",
    )
    time_shape: Sequence[str] = option(
        (),
        "--time-shape",
        "INPUT:SHAPE that engines are timed at, such as x:8x3x736x1280, where production's is not "
        "that of the inputs.",
        metavar="INPUT:SHAPE",
        commands=_JUDGED,
        group="Hardware",
    )
    evaluation_timeout: float = option(
        900.0,
        "--evaluation-timeout",
        "Seconds that an engine may take to build and run, or a worker's inference.",
        help_of={"reduce": "Seconds that an engine may take to build and run, or the check."},
        **_POSITIVE,
        commands=_EVERYWHERE,
        group="Hardware",
        rare=True,
    )
    workers: int = option(
        1,
        "--workers",
        "Evaluations at a time, a process each.",
        kind=int,
        least=1,
        commands=_RUN | _ENGINES,
        help_of=dict.fromkeys(_ENGINES, "Fresh processes at a time, on one GPU."),
        group="Hardware",
    )
    threads: int | None = option(
        None,
        "--threads",
        "Threads that compute, of all workers together. Default: those that may be used here.",
        kind=int,
        least=1,
        commands=_EVERYWHERE | _REPAIR,
        group="Hardware",
    )
    ray: str | None = option(
        None,
        "--ray",
        "Run the workers on this Ray cluster; 'local' starts one here.",
        metavar="ADDRESS",
        commands=_RUN,
        group="Hardware",
        rare=True,
    )
    budget: float | None = option(
        None,
        "--budget",
        "Minutes: the command then ends with the best so far; a run has tested it.",
        **_POSITIVE,
        metavar="MINUTES",
        commands=_RUN | _ENGINES | _REPAIR,
    )
    max_builds: int | None = option(
        None,
        "--max-builds",
        "Engine builds beyond the baselines and those to time; the answer's own is always made. "
        "Default: 8 and 6 more to time, with --certify engine as many as needed.",
        kind=int,
        least=0,
        commands=_RUN | _ENGINES,
        help_of=dict.fromkeys(_ENGINES, "Builds, or calls of --check. Default: as needed."),
        rare=True,
    )
    certify: str = option(
        "emulated",
        "--certify",
        "Where each pin is proved: engine builds the model once without each.",
        choices=("emulated", "engine"),
        commands=_RUN,
        rare=True,
    )
    limits: Limits = Limits()  # no option
    precision_given: bool = False  # no option: whether it was chosen, and is no default

    def __post_init__(self) -> None:
        for name, option in options().items():
            object.__setattr__(self, name, checked(option, getattr(self, name)))
        if self.fitted and self.max_cost is not None:
            raise BadInputError(
                f"--max-cost {self.max_cost:g}: with --robust 0 no layers are ranked by their "
                "cost; leave one of the two out"
            )

    @property
    def share_of_given(self) -> float:
        """The share of the given inputs that must meet the requirement (``--allow-misses``)."""
        return round(1.0 - (self.allow_misses or 0.0), 12)  # 1 - 0.9 is not 0.1 in binary

    @property
    def fitted(self) -> bool:
        """Whether the search uses the given inputs alone."""
        return self.robust == 0.0


def options() -> dict[str, Option]:
    """The options of :class:`Settings` by field name, in order."""
    return {f.name: f.metadata["option"] for f in fields(Settings) if "option" in f.metadata}


def as_command(settings: Settings, command: str = "run") -> str:
    """The shell command for ``settings``, without defaults; objects are words in capitals."""
    model = str(settings.model) if isinstance(settings.model, (str, Path)) else "MODEL"
    words = ["bisect-trt", command, model]
    for source in settings.inputs:
        words += ["--input", as_word(source)]
    defaults = {f.name: f.default for f in fields(Settings)}
    for name, option in options().items():
        value = getattr(settings, name)
        if command not in option.commands or value == defaults[name]:
            continue
        if option.kind is bool:
            words.append(option.flag)
        else:
            for one in value if option.repeatable else (value,):
                words += [option.flag, as_word(one)]
    return shlex.join(words)


def as_word(value: Any) -> str:
    """A value on the command line; inputs in memory are a word in capitals."""
    if isinstance(value, Mapping):
        return "ARRAYS"
    if isinstance(value, Iterator):
        return "SAMPLES"
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}:{name}"
    return str(value)


More = ParamSpec("More")
Answer = TypeVar("Answer")


def within_threads(
    job: Callable[Concatenate[Settings, More], Answer],
) -> Callable[Concatenate[Settings, More], Answer]:
    """Limits NumPy's thread pools in ``job`` to ``--threads``, else to the process' CPUs."""

    @wraps(job)
    def limited(settings: Settings, /, *rest: More.args, **named: More.kwargs) -> Answer:
        from threadpoolctl import threadpool_limits  # --help does not wait for it

        with threadpool_limits(thread_count(settings.threads), "blas"):
            return job(settings, *rest, **named)

    return limited
