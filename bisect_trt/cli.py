"""Defines the commands of the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from bisect_trt.base.plan import Precision
from bisect_trt.report.exits import Command
from bisect_trt.settings import PROJECT_FILE, Option, Settings, options
from bisect_trt.usage import ImportCommand, InputsCommand, ToolCommand, ToolGroup, Word, grouped
from bisect_trt.version import __version__


class NamedPath(click.Path):
    """A path that is not empty: click would take an empty one for the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path", param, ctx)
        return super().convert(value, param, ctx)


MODEL = click.argument("model", type=NamedPath())
INPUT = grouped(
    "Input",
    "--input",
    "inputs",
    multiple=True,
    required=True,
    help="A file (.npz, .npy, polygraphy's .json, an image), folder, glob or MODULE:FUNCTION. "
    "Repeatable.",
)

ENGINE_PRECISION = grouped(
    "Hardware",
    "--precision",
    type=Word([p.value for p in Precision]),
    default="fp32",
    show_default=True,
    help="What the engine runs in.",
)
PLAN = grouped(
    "Input",
    "--plan",
    "plan_path",
    type=NamedPath(),
    required=True,
    help="The plan.json that a run wrote, or the run's folder.",
)
PLAN_TO_VERIFY = grouped(
    "Input",
    "--plan",
    "plan_path",
    type=NamedPath(),
    help="The plan.json that a run wrote, or the run's folder, or another tool's list; "
    "needed without --reduced.",
)
JSON = grouped("Output", "--json", "as_json", is_flag=True, help="Print JSON instead of text.")
VERBOSE = grouped(
    "Output", "-v", "--verbose", is_flag=True, help="Tell each evaluation as it is made."
)
QUIET = grouped("Output", "--quiet", is_flag=True, help="Print nothing but errors.")


def settings_options(command: str) -> Callable[[Command], Command]:
    """Adds MODEL, ``--input`` and the options of :class:`Settings` that ``command`` takes."""
    return lambda function: MODEL(INPUT(options_of(command)(function)))


def options_of(command: str, without: str = "") -> Callable[[Command], Command]:
    """Adds the options of ``command``, in the order of the settings' fields."""

    def decorate(function: Command) -> Command:
        for name, option in reversed(options().items()):  # click's last decorator comes first
            if command in option.commands and name != without:
                default = Settings.__dataclass_fields__[name].default
                text = option.help_of.get(command, option.help)
                function = _click_option(name, option, text, default)(function)
        return function

    return decorate


def _click_option(
    name: str, option: Option, text: str, default: Any
) -> Callable[[Command], Command]:
    """The decorator that adds one option of the settings."""
    added = partial(grouped, option.group, rare=option.rare)
    if option.kind is bool:
        return added(option.flag, name, is_flag=True, default=default, help=text)
    kind: Any = None
    if option.choices:
        kind = Word(option.choices)
    elif option.kind is Path:
        kind = NamedPath()
    elif option.kind is int:
        kind = click.IntRange(min=None if option.least is None else int(option.least))
    elif option.kind is float:
        kind = click.FloatRange(min=option.least, max=option.most, min_open=option.above)
    # A help text that names a default describes what the field's default stands for.
    shown = "default" not in text.lower() and default not in (None, ())
    return added(
        option.flag,
        name,
        type=kind,
        multiple=option.repeatable,
        default=str(default) if option.kind is Precision else default,
        show_default=shown,
        help=f"{text} Repeatable." if option.repeatable else text,
        metavar=option.metavar,
    )


@click.command(
    "reduce",
    cls=InputsCommand,
    short_help="Find the smallest part of a model on which an engine fails.",
    examples=(
        "reduce model.onnx --input x.npz --out small",
        'reduce model.onnx --input x.npz --check "python check.py"',
    ),
)
@settings_options("reduce")
@ENGINE_PRECISION
@grouped(
    "Requirement",
    "--check",
    metavar="COMMAND",
    help="Says instead of an engine what is bad: exit code 0 is fine, 1 is bad, any other says "
    "nothing. The model's path is appended, or stands where {model} does; {inputs} and {expected} "
    "become the paths of the subgraph's other files.",
)
@JSON
@QUIET
def reduce_command(**given: Any) -> None:
    """Find the smallest part of a model on which an engine fails, is wrong or not reproducible;
    write a reproducer. Exit code 1 if the whole is not bad.
    """
    from bisect_trt import commands

    commands.reduce_command(**given)


@click.command(
    "cure",
    cls=InputsCommand,
    short_help="Try what makes a wrong engine right.",
    examples=(
        "cure model.onnx --input x.npz",
        "cure model.onnx --input x.npz --subgraph reports/model-reduced",
    ),
)
@settings_options("cure")
@ENGINE_PRECISION
@grouped(
    "Input",
    "--subgraph",
    type=NamedPath(),
    metavar="DIR",
    help="The reproducer's folder: tensors inside the subgraph are marked first.",
)
@JSON
@QUIET
def cure_command(**given: Any) -> None:
    """Try what makes a wrong or not reproducible engine right and reproducible; write the table and
    the model to ship. Exit code 1 if nothing does.
    """
    from bisect_trt import commands

    commands.cure_command(**given)


@click.command(
    "repair",
    cls=InputsCommand,
    short_help="Edit the graph so that FP16 fits, and prove the edits.",
    examples=(
        "repair model.onnx --input x.npz",
        "repair model.onnx --input x.npz --repair fold-bn,mask",
    ),
)
@settings_options("repair")
@JSON
@VERBOSE
@QUIET
def repair_command(**given: Any) -> None:
    """Edit the graph so that FP16 fits, prove that FP32 stays the same, and write the repaired
    model. Exit code 1 if no edit helps.
    """
    from bisect_trt import commands

    commands.repair_command(**given)


@click.command(
    "doctor",
    cls=ToolCommand,
    short_help="Say which runners work here, and why others do not.",
    examples=(
        "doctor",
        "doctor --json",
    ),
)
@JSON
def doctor_command(**given: Any) -> None:
    """What is installed, which runners work here and why not."""
    from bisect_trt import commands

    commands.doctor_command(**given)


@click.command(
    "gate",
    cls=InputsCommand,
    short_help="Run every model of bisect.toml, for CI.",
    examples=(
        "gate",
        "gate --config ci/bisect.toml --runner tensorrt --json",
    ),
)
@grouped(
    "Input",
    "--config",
    type=NamedPath(),
    default=PROJECT_FILE,
    show_default=True,
    help="The models and what each is asked.",
)
@grouped("Output", "--out", type=NamedPath(), help="A folder of runs. Default: as the file says.")
@options_of("run", without="out")
@options_of("gate")
@VERBOSE
@JSON
@QUIET
def gate_command(**given: Any) -> None:
    """Run every model of bisect.toml and write one table, gate.md and junit.xml. What is known
    from before is not run again. Options of run override the file.
    """
    from bisect_trt import commands

    commands.gate_command(**given)


@click.command(
    "inspect",
    cls=ToolCommand,
    short_help="List layers, patterns and suspects; nothing is run.",
    examples=(
        "inspect model.onnx",
        "inspect model.onnx --precision bf16 --json",
    ),
)
@MODEL
@options_of("inspect")
@JSON
def inspect_command(**given: Any) -> None:
    """Layers, patterns, suspects and advice about the opset, without running anything."""
    from bisect_trt import commands

    commands.inspect_command(**given)


@click.command(
    "mark",
    cls=ToolCommand,
    short_help="Write the model with inner tensors as outputs.",
    examples=(
        "mark model.onnx --mark LayerNorm -o marked.onnx",
        'mark model.onnx --mark "/block.0/*" -o marked.onnx',
    ),
)
@MODEL
@grouped(
    "Output",
    "--mark",
    "selectors",
    multiple=True,
    required=True,
    metavar="SELECTOR",
    help="A layer, a tensor, a glob, an operator such as Pow, a pattern such as LayerNorm. "
    "Repeatable.",
)
@grouped("Output", "--output", "-o", "target", type=NamedPath(), required=True, help="Where to.")
def mark_command(**given: Any) -> None:
    """Write the model with inner tensors as further outputs, to look inside with any runner. On an
    engine each breaks fusions, so its numbers change.
    """
    from bisect_trt import commands

    commands.mark_command(**given)


@click.command(
    "export",
    cls=ToolCommand,
    short_help="Write a plan as ONNX, trtexec arguments or a script.",
    examples=(
        "export model.onnx --plan reports/model-fp16 --format onnx -o t.onnx",
        "export model.onnx --plan plan.json --format trtexec",
    ),
)
@MODEL
@PLAN
@grouped(
    "Output",
    "--format",
    "form",
    type=Word(["onnx", "trtexec", "polygraphy", "autocast", "onnxruntime"]),
    required=True,
    help="What to write.",
)
@grouped(
    "Output",
    "--output",
    "-o",
    "target",
    type=NamedPath(),
    help="Where to; text goes to standard output without it.",
)
@grouped(
    "Input",
    "--choice",
    metavar="NAME",
    help="Another row of the plan's choices, such as repaired, plan, BF16 or FP32.",
)
def export_command(**given: Any) -> None:
    """Write a plan as typed ONNX, trtexec arguments, a polygraphy script, or as the arguments of
    AutoCast's and ONNX Runtime's converters.
    """
    from bisect_trt import commands

    commands.export_command(**given)


@click.command(
    "built",
    cls=ToolCommand,
    short_help="Say which precisions an engine really has.",
    examples=(
        "built layers.json --model model.onnx --plan reports/model-fp16",
        "built layers.json --profile times.json --json",
        "built model.engine --model model.onnx --load --run",
    ),
)
@click.argument("engine", type=NamedPath())
@grouped(
    "Input", "--model", type=NamedPath(), help="The ONNX model that the engine was built from."
)
@grouped(
    "Input",
    "--plan",
    type=NamedPath(),
    help="A plan.json or a run's folder: name the layers that the engine has otherwise.",
)
@grouped(
    "Input",
    "--profile",
    type=NamedPath(),
    help="The times of the layers, as trtexec --exportProfile writes them.",
)
@grouped(
    "Hardware",
    "--load",
    is_flag=True,
    help="Load ENGINE, in a process of its own. That can run code that is in the file.",
)
@grouped("Hardware", "--run", is_flag=True, help="Execute the loaded engine to time its layers.")
@JSON
@QUIET
def built_command(**given: Any) -> None:
    """The shares of tensors, layers and time in FP16, FP32 and BF16 of ENGINE. ENGINE is the JSON
    of trtexec --exportLayerInfo, or an engine with --load. Exit code 1 if a plan is not honoured.
    """
    from bisect_trt import commands

    commands.built_command(**given)


@click.command(
    "import",
    cls=ImportCommand,
    short_help="Take over another tool's list of layers as a plan.",
    context_settings={"ignore_unknown_options": True},
    examples=(
        "import model.onnx build.sh -o plan.json",
        "import model.onnx build_engine.py -o plan.json",
        "import model.onnx '--layerPrecisions=*/Softmax:fp32' -o plan.json",
    ),
)
@MODEL
@click.argument("given", metavar="FROM...", nargs=-1, required=True, type=click.UNPROCESSED)
@grouped(
    "Input",
    "--form",
    type=Word(["trtexec", "script", "replay", "replay-reverse", "autocast", "block-list", "mixed"]),
    help="What FROM is. Default: found by its content.",
)
@grouped(
    "Input",
    "--precision",
    type=Word(["fp16", "bf16"]),
    help="What the other layers run in. Default: as FROM says, else fp16.",
)
@grouped(
    "Hardware",
    "--trt-module",
    "module",
    rare=True,
    type=Word(["tensorrt", "tensorrt_rtx"]),
    help="Whose parser is asked for names. Default: whichever is installed.",
)
@grouped("Output", "--output", "-o", "target", type=NamedPath(), help="Where to write plan.json.")
@grouped("Output", "--strict", is_flag=True, help="Exit code 1 where an entry is refused.")
@grouped("Output", "-v", "--verbose", is_flag=True, help="Show every entry.")
@JSON
@QUIET
def import_command(**given: Any) -> None:
    """Take over a list of layers in FP32 as a plan: trtexec's options, a build script, polygraphy's
    script or replay, block lists of AutoCast, onnxconverter-common and ONNX Runtime, or a mixed
    model. FROM is a file or the options themselves. Scripts are read, never run.
    """
    from bisect_trt import commands

    commands.import_command(**given)


@click.command(
    "run",
    cls=InputsCommand,
    short_help="Find the layers that must stay in FP32.",
    examples=(
        "run model.onnx --input data/",
        'run model.onnx --input x.npz --requirement "cosine>=0.999"',
        "run model.onnx --input data/ --precision bf16 --dry-run",
    ),
)
@settings_options("run")
@grouped(
    "Output",
    "--dry-run",
    is_flag=True,
    help="Only say how many layers, about how many evaluations and how long.",
)
@VERBOSE
@JSON
@QUIET
def run_command(**given: Any) -> None:
    """Find the cause and the few layers that must stay in FP32. Validate the plan on inputs that
    the search did not use. Write the plan, the model and the report.
    """
    from bisect_trt import commands

    commands.run_command(**given)


@click.command(
    "compare",
    cls=InputsCommand,
    short_help="Write error tables of outputs and layers, without a search.",
    examples=(
        "compare model.onnx --input x.npz",
        "compare model.onnx --input x.npz --mark MatMul --json",
    ),
)
@settings_options("compare")
@JSON
@QUIET
def compare_command(**given: Any) -> None:
    """Error tables only: every baseline's outputs and every layer, without a search."""
    from bisect_trt import commands

    commands.compare_command(**given)


@click.command(
    "verify",
    cls=InputsCommand,
    short_help="Check that a plan still passes, for release gates.",
    examples=(
        "verify model.onnx --input new/ --plan reports/model-fp16",
        'verify m.onnx --input new/ --plan old/ --hold "latency_ms<=4.5"',
        "verify model.onnx --input new/ --reduced autocast.onnx",
    ),
)
@settings_options("verify")
@PLAN_TO_VERIFY
@JSON
@QUIET
def verify_command(**given: Any) -> None:
    """Does a plan, or another tool's mixed model, hold for these inputs? Exit code 0 if it does, 1
    if not; for release gates.
    """
    from bisect_trt import commands

    commands.verify_command(**given)


@click.command(
    "report",
    cls=ToolCommand,
    short_help="Write the report of a run's folder again.",
    examples=(
        "report reports/model-fp16",
        "report reports/model-fp16 --quiet",
    ),
)
@click.argument("run", type=NamedPath())
@QUIET
def report_command(**given: Any) -> None:
    """Write report.html, report.md and junit.xml of a run's folder again, from its other files."""
    from bisect_trt import commands

    commands.report_command(**given)


@click.command(
    "diff",
    cls=ToolCommand,
    short_help="Say what changed between two runs.",
    examples=(
        "diff reports/old reports/new",
        "diff reports/old reports/new --out reports/diff",
    ),
)
@click.argument("run_a", type=NamedPath())
@click.argument("run_b", type=NamedPath())
@grouped(
    "Output", "--out", type=NamedPath(), help="A folder for diff.md and diff.json. Default: none."
)
@JSON
@QUIET
def diff_command(**given: Any) -> None:
    """What changed from one run's folder to another: requirements, validation, pins and layers.
    Exit code 1 if the second misses what the first met, or was not asked what the first was; 2 if
    no layer is in both.
    """
    from bisect_trt import commands

    commands.diff_command(**given)


@click.group(
    cls=ToolGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="bisect-trt")
def main() -> None:
    """Find the layers of an ONNX model that must stay in FP32, and write the typed model.
    `bisect-trt COMMAND --help` says more.
    """


for command in (
    run_command,
    compare_command,
    verify_command,
    gate_command,
    report_command,
    diff_command,
    inspect_command,
    mark_command,
    export_command,
    built_command,
    import_command,
    repair_command,
    reduce_command,
    cure_command,
    doctor_command,
):
    main.add_command(command)
