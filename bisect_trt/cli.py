"""Defines the commands of the command line."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from bisect_trt.base.display import counted, printable
from bisect_trt.base.errors import EXIT_NOT_MET, EXIT_OK, BadInputError
from bisect_trt.base.interrupt import is_stop
from bisect_trt.base.limits import Limits
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.time_limits import parse_time_limits, saying_what_is_held
from bisect_trt.model.inspection import inspect_model
from bisect_trt.model.lifted import lifted_form
from bisect_trt.model.load import load_model
from bisect_trt.model.outputs import mark_outputs, select_tensors, with_ranks
from bisect_trt.model.save import check_target, save_model, save_text
from bisect_trt.model.typed import to_typed
from bisect_trt.model.weak_typing import OF_FUNCTIONS, polygraphy_script, trtexec_arguments
from bisect_trt.pipeline import CURED, REDUCED, compare, cure, reduce, repair, run
from bisect_trt.reduction.reduce import Reduced, result_folder
from bisect_trt.report import terminal
from bisect_trt.report.diff import as_page, diff_record, diff_runs, write_diff
from bisect_trt.report.exits import Command, ended_by, guarded, output
from bisect_trt.report.files import to_json, write_documents, write_verification
from bisect_trt.report.gate import (
    PROJECT_FILE,
    Entry,
    Gate,
    check_gate_folder,
    gate_page,
    gate_record,
    judged_entry,
    limits_held,
    read_project,
    write_gate,
)
from bisect_trt.report.record import read_run
from bisect_trt.report.reduced import as_record, cures_as_json
from bisect_trt.runners.doctor import examine
from bisect_trt.settings import FORMER, Option, Settings, options
from bisect_trt.steps.estimate import estimate
from bisect_trt.steps.open_runners import idle_options
from bisect_trt.steps.run_folder import held_folder
from bisect_trt.steps.saved_plan import read_plan
from bisect_trt.steps.verify import verify
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
INPUT = click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    help="A file (.npz, .npy, polygraphy's .json, an image), folder, glob or MODULE:FUNCTION. "
    "Repeatable.",
)

ENGINE_PRECISION = click.option(
    "--precision",
    type=click.Choice([p.value for p in Precision]),
    default="fp32",
    show_default=True,
    help="What the engine runs in.",
)
PLAN = click.option(
    "--plan",
    "plan_path",
    type=NamedPath(),
    required=True,
    help="The plan.json that a run wrote.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Tell each evaluation as it is made.")
QUIET = click.option("--quiet", is_flag=True, help="Print nothing but errors.")


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
    if option.kind is bool:
        return click.option(option.flag, name, is_flag=True, default=default, help=text)
    kind: Any = None
    if option.choices:
        kind = click.Choice(option.choices)
    elif option.kind is Path:
        kind = NamedPath()
    elif option.kind is int:
        kind = click.IntRange(min=None if option.least is None else int(option.least))
    elif option.kind is float:
        kind = click.FloatRange(min=option.least, max=option.most, min_open=option.above)
    # A help text that names a default describes what the field's default stands for.
    shown = "default" not in text.lower() and default not in (None, ())
    return click.option(
        option.flag,
        name,
        type=kind,
        multiple=option.repeatable,
        default=str(default) if option.kind is Precision else default,
        show_default=shown,
        help=f"{text} Repeatable." if option.repeatable else text,
        metavar=option.metavar,
    )


def limits() -> Limits:
    """The limits that whoever called :func:`main` gave as click's ``obj``, else the usual ones."""
    return click.get_current_context().find_object(Limits) or Limits()


def in_todays_words(args: Sequence[str]) -> list[str]:
    """Replaces options of older versions in ``args`` by today's."""
    today, former = [], ""
    for arg in args:
        flag, equals, value = arg.partition("=")
        if former:
            today.append(FORMER[former][1](arg))
            former = ""
        elif flag in FORMER:
            name, translated = FORMER[flag]
            today.append(f"{name}={translated(value)}" if equals else name)
            former = "" if equals else flag
        else:
            today.append(arg)
    return today


class InputsCommand(click.Command):
    """A command with ``--input``, which also accepts the options of older versions."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does, with a hint where the shell has expanded a pattern."""
        args = in_todays_words(args)
        given = [o for o in ("--input", "--holdout") if any(word.startswith(o) for word in args)]
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            # Subclasses, such as NoSuchOption, have other causes.
            if type(error) is click.UsageError and given and "extra argument" in error.message:
                message = (
                    f"{error.message}. Each {' and each '.join(given)} is one file, folder or "
                    "pattern: put a pattern into quotes ('data/*.npz'), or the shell makes "
                    "several words of it"
                )
                raise click.UsageError(message, ctx) from error
            raise


def _print(
    record: Any, show: Callable[..., None], *results: Any, as_json: bool, quiet: bool
) -> None:
    """Prints ``record`` as JSON, or ``results`` by ``show``."""
    with output():
        if as_json:
            click.echo(to_json(record))
        elif not quiet:
            show(terminal.screen(), *results)


@click.command("reduce", cls=InputsCommand)
@settings_options("reduce")
@ENGINE_PRECISION
@click.option(
    "--check",
    metavar="COMMAND",
    help="Says instead of an engine what is bad: exit code 0 is fine, 1 is bad, any other says "
    "nothing. The model's path is appended, or stands where {model} does; {inputs} and {expected} "
    "become the paths of the subgraph's other files.",
)
@JSON
@QUIET
@guarded
def reduce_command(
    precision: str, check: str | None, as_json: bool, quiet: bool, **chosen: Any
) -> int:
    """Find the smallest part of a model on which an engine fails, is wrong or not reproducible;
    write a reproducer. Exit code 1 if the whole is not bad.
    """
    settings = Settings(**chosen, limits=limits())
    made_by = shlex.join(["bisect-trt", *sys.argv[1:]])
    with terminal.progress(quiet=quiet, verbose=not as_json, budget=settings.budget) as observer:
        found = reduce(settings, Precision(precision), check, made_by, observer)
    folder = result_folder(settings, REDUCED)
    show = terminal.print_reduced
    _print(as_record(found), show, found, folder, as_json=as_json, quiet=quiet)
    return EXIT_OK if isinstance(found, Reduced) else EXIT_NOT_MET


@click.command("cure", cls=InputsCommand)
@settings_options("cure")
@ENGINE_PRECISION
@click.option(
    "--subgraph",
    type=NamedPath(),
    metavar="DIR",
    help="The reproducer's folder: tensors inside the subgraph are marked first.",
)
@JSON
@QUIET
@guarded
def cure_command(
    precision: str, subgraph: Path | None, as_json: bool, quiet: bool, **chosen: Any
) -> int:
    """Try what makes a wrong or not reproducible engine right and reproducible; write the table and
    the model to ship. Exit code 1 if nothing does.
    """
    settings = Settings(**chosen, limits=limits())
    with terminal.progress(quiet=quiet, verbose=not as_json, budget=settings.budget) as observer:
        cures = cure(settings, Precision(precision), subgraph, observer)
    folder = result_folder(settings, CURED)
    show = terminal.print_cures
    _print(cures_as_json(cures), show, cures, folder, as_json=as_json, quiet=quiet)
    return EXIT_NOT_MET if cures.needed and cures.smallest is None else EXIT_OK


@click.command("repair", cls=InputsCommand)
@settings_options("repair")
@JSON
@VERBOSE
@QUIET
@guarded
def repair_command(as_json: bool, verbose: bool, quiet: bool, **chosen: Any) -> int:
    """Edit the graph so that FP16 fits, prove that FP32 stays the same, and write the repaired
    model. Exit code 1 if no edit helps.
    """
    settings = Settings(**chosen, limits=limits())
    with terminal.progress(quiet=quiet, verbose=verbose, budget=settings.budget) as observer:
        found = repair(settings, observer)
    _print(found.as_json(), terminal.print_repair, found, as_json=as_json, quiet=quiet)
    return found.exit_code


@click.command("doctor")
@JSON
@guarded
def doctor_command(as_json: bool) -> int:
    """What is installed, which runners work here and why not."""
    with terminal.progress() as observer:
        observer.step("doctor")
        checks = examine()
    with output():
        if as_json:
            click.echo(json.dumps([vars(c) for c in checks], indent=2))
            return 0
        for check in checks:
            sign = {True: "ok  ", False: "no  ", None: "    "}[check.works]
            click.echo(f"{sign}{check.name:<24}{printable(check.detail)}")
    return 0


@click.command("gate", cls=InputsCommand)
@click.option(
    "--config",
    type=NamedPath(),
    default=PROJECT_FILE,
    show_default=True,
    help="The models and what each is asked.",
)
@click.option("--out", type=NamedPath(), help="A folder of runs. Default: as the file says.")
@options_of("run", without="out")
@options_of("gate")
@VERBOSE
@JSON
@QUIET
@guarded
def gate_command(
    config: Path, out: Path | None, verbose: bool, as_json: bool, quiet: bool, **chosen: Any
) -> int:
    """Run every model of bisect.toml and write one table, gate.md and junit.xml. What is known
    from before is not run again. Options of run override the file.
    """
    source = click.get_current_context().get_parameter_source
    given = {n: v for n, v in chosen.items() if source(n) is not ParameterSource.DEFAULT}
    project = read_project(config, out, {**given, "limits": limits()})
    for warning in project.warnings:
        click.echo(f"warning: {project.path}: {warning}", err=True)
    check_gate_folder(project.out, project.runs)
    gate = Gate(project.out, (), len(project.runs))
    with held_folder(project.out):
        for name, settings in project.runs.items():
            with terminal.progress(
                quiet=quiet, verbose=verbose, budget=settings.budget, subject=name
            ) as observer:
                entry = _entry(name, settings, observer)
            gate = Gate(project.out, (*gate.entries, entry), gate.planned)
            write_gate(gate)  # after each model, for users who interrupt
    page = gate_page(gate)
    _print(gate_record(gate), terminal.print_page, page, as_json=as_json, quiet=quiet)
    if not (as_json or quiet):
        with output():
            click.echo(f"table: {project.out}/gate.md")
    return gate.exit_code


def _entry(name: str, settings: Settings, observer: terminal.ProgressObserver) -> Entry:
    """Runs one model of a gate."""
    try:
        with saying_what_is_held(settings):
            result = run(settings, observer)
    except Exception as error:  # an error in one model must not keep others from being run
        if is_stop(error):
            raise
        code, message = ended_by(error)
        return Entry(name, code, error=message)
    return judged_entry(name, result, parse_time_limits(settings.hold))


@click.command("inspect")
@MODEL
@options_of("inspect")
@JSON
@guarded
def inspect_command(model: Path, precision: str, as_json: bool) -> int:
    """Layers, patterns, suspects and advice about the opset, without running anything."""
    with terminal.progress() as observer:
        observer.step("load")
        loaded = load_model(model)
        observer.step("inspect")
        inspection = inspect_model(loaded, Precision(precision))
    record = inspection.as_json()
    _print(record, terminal.print_inspection, inspection, as_json=as_json, quiet=False)
    return EXIT_OK


@click.command("mark")
@MODEL
@click.option(
    "--mark",
    "selectors",
    multiple=True,
    required=True,
    metavar="SELECTOR",
    help="A layer, a tensor, a glob, an operator such as Pow, a pattern such as LayerNorm. "
    "Repeatable.",
)
@click.option("--output", "-o", "target", type=NamedPath(), required=True, help="Where to.")
@guarded
def mark_command(model: Path, selectors: tuple[str, ...], target: Path) -> int:
    """Write the model with inner tensors as further outputs, to look inside with any runner. On an
    engine each breaks fusions, so its numbers change.
    """
    with terminal.progress() as observer:
        observer.step("load")
        loaded = load_model(model)
        check_target(target, loaded)
        observer.step("mark")
        lifted = lifted_form(loaded).model.proto  # reduced layers can be chosen as FP32 ones
        made = {name for node in loaded.proto.graph.node for name in node.output}
        chosen = [name for name in select_tensors(lifted, selectors) if name in made]
        tensors, unranked = with_ranks(loaded.proto, chosen)
        marked = mark_outputs(loaded.proto, tensors)
        save_model(marked, target.resolve())  # a link stays one
    more = len(marked.graph.output) - len(loaded.proto.graph.output)
    with output():
        click.echo(counted(more, "more output"))
        for name in unranked:
            click.echo(f"left out: {name!r}, whose number of dimensions is unknown")
    return 0


@click.command("export")
@MODEL
@PLAN
@click.option(
    "--format",
    "form",
    type=click.Choice(["onnx", "trtexec", "polygraphy"]),
    required=True,
    help="What to write.",
)
@click.option(
    "--output",
    "-o",
    "target",
    type=NamedPath(),
    help="Where to; text goes to standard output without it.",
)
@click.option(
    "--choice",
    metavar="NAME",
    help="Another row of the plan's choices, such as repaired, plan, BF16 or FP32.",
)
@guarded
def export_command(
    model: Path, plan_path: Path, choice: str | None, form: str, target: Path | None
) -> int:
    """Write a plan as typed ONNX, trtexec arguments or a polygraphy script."""
    saved = read_plan(plan_path)
    if choice is not None:
        saved = saved.choice(choice)
    with terminal.progress() as observer:
        observer.step("load")
        source = saved.source_of(model)
        loaded, plan, graph = source.model, saved.plan, source.graph
        saved.check_model(graph)
        if target is not None:
            check_target(target, loaded, plan_path, model)
            target = target.resolve()  # writes to the target of a link and keeps the link
        observer.step("export")
        if form == "onnx":
            if target is None:
                raise BadInputError("--format onnx needs --output FILE.onnx")
            if target.suffix != ".onnx":
                raise BadInputError(
                    f"--output {target}: a model is written; give it a name that ends with .onnx"
                )
            save_model(to_typed(graph, plan), target)
            return 0
        if loaded.written_out and plan.base.is_storage and plan.pinned:
            raise BadInputError(OF_FUNCTIONS)
        if source.lifted is not None:
            raise BadInputError(
                f"--format {form}: {model} is {source.lifted.precision.value.upper()} in the "
                "source already, so weak typing cannot keep its layers in FP32; use --format onnx"
            )
        write = trtexec_arguments if form == "trtexec" else polygraphy_script
        text = write(graph, plan)
    if loaded.path != model:  # the layers have names of the repaired model
        has = "whose weights are rounded to fit and " if saved.form.fitted else ""
        message = f"note: build from {loaded.path}, {has}whose layers it names"
        click.echo(printable(message), err=True)
    if target is not None:
        save_text(text + "\n", target)
        return 0
    with output(is_product=True):
        click.echo(text)
    return 0


@click.command("run", cls=InputsCommand)
@settings_options("run")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say how many layers, about how many evaluations and how long.",
)
@VERBOSE
@JSON
@QUIET
@guarded
def run_command(dry_run: bool, verbose: bool, as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Find the problem's kind and a small set of layers that must stay in FP32, test it on copies
    that the search has not seen; write the plan, model and report.
    """
    settings = Settings(**chosen, limits=limits())
    if dry_run:
        with terminal.progress(quiet=quiet) as observer:
            price = estimate(settings, observer)
        with output():
            click.echo(to_json(vars(price)) if as_json else price.sentence)
            for note in () if as_json else price.notes:
                click.echo(f"note: {note}")
            if settings.runner == "emulated" and not as_json and (idle := idle_options(settings)):
                click.echo(f"note: {idle}")
        return 0
    with terminal.progress(quiet=quiet, verbose=verbose, budget=settings.budget) as observer:
        result = run(settings, observer)
    show = partial(terminal.print_verdict, verbose=verbose)
    _print(result.as_json(), show, result, as_json=as_json, quiet=quiet)
    return result.exit_code


@click.command("compare", cls=InputsCommand)
@settings_options("compare")
@JSON
@QUIET
@guarded
def compare_command(as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Error tables only: every baseline's outputs and every layer, without a search."""
    with terminal.progress(quiet=quiet) as observer:
        result = compare(Settings(**chosen, limits=limits()), observer)
    record = {**result.as_json(), "exit_code": EXIT_OK}
    _print(record, terminal.print_comparison, result, as_json=as_json, quiet=quiet)
    return EXIT_OK


@click.command("verify", cls=InputsCommand)
@settings_options("verify")
@PLAN
@JSON
@QUIET
@guarded
def verify_command(
    plan_path: Path, as_json: bool, quiet: bool, precision: str, **chosen: Any
) -> int:
    """Does a plan still hold for this model and these inputs? Exit code 0 if it does, 1 if not; for
    release gates.
    """
    saved = read_plan(plan_path)
    source = click.get_current_context().get_parameter_source("precision")
    found_for = saved.plan.base.value
    if source is not ParameterSource.DEFAULT and precision != found_for:
        raise BadInputError(f"--precision {precision}: {plan_path} is a plan for {found_for}")
    with terminal.progress(quiet=quiet) as observer:
        settings = Settings(precision=saved.searched, **chosen, limits=limits())
        verification = verify(settings, saved, observer)
        write_verification(verification)
    record = verification.as_json()
    _print(record, terminal.print_verification, verification, as_json=as_json, quiet=quiet)
    return EXIT_OK if verification.passed else EXIT_NOT_MET


@click.command("report")
@click.argument("run", type=NamedPath())
@QUIET
@guarded
def report_command(run: Path, quiet: bool) -> int:
    """Write report.html, report.md and junit.xml of a run's folder again, from its other files."""
    with terminal.progress(quiet=quiet) as observer:
        observer.step("read")
        found = read_run(run)
        observer.step("write")
        write_documents(found)
    with output():
        if not quiet:
            click.echo(printable(f"report: {run}/report.html"))
    return EXIT_OK


@click.command("diff")
@click.argument("run_a", type=NamedPath())
@click.argument("run_b", type=NamedPath())
@click.option("--out", type=NamedPath(), help="A folder for diff.md and diff.json. Default: none.")
@JSON
@QUIET
@guarded
def diff_command(run_a: Path, run_b: Path, out: Path | None, as_json: bool, quiet: bool) -> int:
    """What changed from one run's folder to another: requirements, what the plans hold on, pins and
    layers. Exit code 1 if the second misses what the first met, or was not asked what the first
    was; 2 if no layer is in both.
    """
    with terminal.progress(quiet=quiet) as observer:
        observer.step("read")
        before, after = read_run(run_a), read_run(run_b)
        observer.step("compare")
        found = diff_runs(before, after, limits_held(run_a), limits_held(run_b))
        if out is not None:
            write_diff(found, out)
    page = as_page(found)
    _print(diff_record(found), terminal.print_page, page, as_json=as_json, quiet=quiet)
    return EXIT_NOT_MET if found.worse or found.may_be_worse else EXIT_OK


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="bisect-trt")
def main() -> None:
    """Find the layers of an ONNX model that must stay in FP32, say on what they hold, and write the
    typed model.
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
    repair_command,
    reduce_command,
    cure_command,
    doctor_command,
):
    main.add_command(command)
