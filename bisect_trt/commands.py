"""What each command does, once its options are read."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
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
from bisect_trt.imports.entries import Form
from bisect_trt.imports.mapping import Status
from bisect_trt.imports.read import plan_json
from bisect_trt.metrics.time_limits import parse_time_limits, saying_what_is_held
from bisect_trt.model.block_lists import BLOCK_LISTS, WRITTEN_OUT
from bisect_trt.model.inspection import inspect_model
from bisect_trt.model.lifted import lifted_form, load_source
from bisect_trt.model.load import load_model
from bisect_trt.model.outputs import mark_outputs, select_tensors, with_ranks
from bisect_trt.model.save import check_target, save_model, save_text
from bisect_trt.model.typed import to_typed
from bisect_trt.model.weak_typing import OF_FUNCTIONS, polygraphy_script, trtexec_arguments
from bisect_trt.pipeline import CURED, REDUCED, compare, cure, reduce, repair, run
from bisect_trt.reduction.reduce import Reduced, result_folder
from bisect_trt.report import terminal
from bisect_trt.report.built import built_page, built_record, exit_code
from bisect_trt.report.diff import as_page, diff_record, diff_runs, write_diff
from bisect_trt.report.exits import ended_by, guarded, output
from bisect_trt.report.files import to_json, write_documents, write_verification
from bisect_trt.report.gate import (
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
from bisect_trt.settings import Settings
from bisect_trt.steps.built import read_built
from bisect_trt.steps.estimate import estimate
from bisect_trt.steps.import_plan import import_plan, older_plan
from bisect_trt.steps.open_runners import idle_options
from bisect_trt.steps.run_folder import held_folder
from bisect_trt.steps.saved_plan import read_plan
from bisect_trt.steps.verify import verify


def limits() -> Limits:
    """The limits that whoever called :func:`main` gave as click's ``obj``, else the usual ones."""
    return click.get_current_context().find_object(Limits) or Limits()


def _print(
    record: Any, show: Callable[..., None], *results: Any, as_json: bool, quiet: bool
) -> None:
    """Prints ``record`` as JSON, or ``results`` by ``show``."""
    with output():
        if as_json:
            click.echo(to_json(record))
        elif not quiet:
            show(terminal.screen(), *results)


def _is_given(option: str) -> bool:
    """Whether the option was given, and has not its default."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT


@guarded
def reduce_command(
    precision: str, check: str | None, as_json: bool, quiet: bool, **chosen: Any
) -> int:
    """Reduces a failing model and prints what is left of it."""
    settings = Settings(**chosen, limits=limits())
    made_by = shlex.join(["bisect-trt", *sys.argv[1:]])
    with terminal.progress(quiet=quiet, verbose=not as_json, budget=settings.budget) as observer:
        found = reduce(settings, Precision(precision), check, made_by, observer)
    folder = result_folder(settings, REDUCED)
    show = terminal.print_reduced
    _print(as_record(found), show, found, folder, as_json=as_json, quiet=quiet)
    return EXIT_OK if isinstance(found, Reduced) else EXIT_NOT_MET


@guarded
def cure_command(
    precision: str, subgraph: Path | None, as_json: bool, quiet: bool, **chosen: Any
) -> int:
    """Tries what makes an engine right and prints the table."""
    settings = Settings(**chosen, limits=limits())
    with terminal.progress(quiet=quiet, verbose=not as_json, budget=settings.budget) as observer:
        cures = cure(settings, Precision(precision), subgraph, observer)
    folder = result_folder(settings, CURED)
    show = terminal.print_cures
    _print(cures_as_json(cures), show, cures, folder, as_json=as_json, quiet=quiet)
    return EXIT_NOT_MET if cures.needed and cures.smallest is None else EXIT_OK


@guarded
def repair_command(as_json: bool, verbose: bool, quiet: bool, **chosen: Any) -> int:
    """Repairs the graph and prints the edits and the proof."""
    settings = Settings(**chosen, limits=limits())
    with terminal.progress(quiet=quiet, verbose=verbose, budget=settings.budget) as observer:
        found = repair(settings, observer)
    _print(found.as_json(), terminal.print_repair, found, as_json=as_json, quiet=quiet)
    return found.exit_code


@guarded
def doctor_command(as_json: bool) -> int:
    """Prints what is installed and which runners work."""
    with terminal.progress() as observer:
        observer.step("doctor")
        checks = examine()
    with output():
        if as_json:
            click.echo(json.dumps([vars(c) for c in checks], indent=2))
            return 0
        width = 1 + max(len(check.name) for check in checks)
        for check in checks:
            sign = {True: "ok  ", False: "no  ", None: "    "}[check.works]
            click.echo(f"{sign}{check.name:<{width}}{printable(check.detail)}")
    return 0


@guarded
def gate_command(
    config: Path, out: Path | None, verbose: bool, as_json: bool, quiet: bool, **chosen: Any
) -> int:
    """Runs every model of a project and prints the table."""
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


@guarded
def inspect_command(model: Path, precision: str, as_json: bool) -> int:
    """Prints the findings, the patterns and the layers of a model."""
    with terminal.progress() as observer:
        observer.step("load")
        loaded = load_model(model)
        observer.step("inspect")
        inspection = inspect_model(loaded, Precision(precision))
    record = inspection.as_json()
    _print(record, terminal.print_inspection, inspection, as_json=as_json, quiet=False)
    return EXIT_OK


@guarded
def mark_command(model: Path, selectors: tuple[str, ...], target: Path) -> int:
    """Writes a model with inner tensors as further outputs."""
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


_BY_NAMES = {"trtexec": trtexec_arguments, "polygraphy": polygraphy_script}


@guarded
def export_command(
    model: Path, plan_path: Path, choice: str | None, form: str, target: Path | None
) -> int:
    """Writes a plan in another form."""
    saved = read_plan(plan_path)
    if choice is not None:
        saved = saved.choice(choice)
    with terminal.progress() as observer:
        observer.step("load")
        source = saved.source_of(model)
        loaded, plan, graph = source.model, saved.plan, source.graph
        saved.check_model(graph)
        if target is not None:
            check_target(target, loaded, saved.path, model)
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
            raise BadInputError(WRITTEN_OUT if form in BLOCK_LISTS else OF_FUNCTIONS)
        if source.lifted is not None:
            raise BadInputError(
                f"--format {form}: {model} is {source.lifted.precision.value.upper()} in the "
                "source already, so names alone cannot keep its layers in FP32; use --format onnx"
            )
        text = {**_BY_NAMES, **BLOCK_LISTS}[form](graph, plan)
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


@guarded
def built_command(
    engine: Path,
    model: Path | None,
    plan: Path | None,
    profile: Path | None,
    load: bool,
    run: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Prints what an engine was built as, and what of a plan it does not honour."""
    with terminal.progress(quiet=quiet) as observer:
        built = read_built(engine, model, plan, profile, load=load, run=run, observer=observer)
    page = built_page(built)
    _print(built_record(built), terminal.print_page, page, as_json=as_json, quiet=quiet)
    return exit_code(built)


@guarded
def import_command(
    model: Path,
    given: tuple[str, ...],
    form: str | None,
    precision: str | None,
    module: str | None,
    target: Path | None,
    strict: bool,
    verbose: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Maps another tool's list to the model's layers, and writes it as a plan."""
    text = given[0] if len(given) == 1 else shlex.join(given)
    with terminal.progress(quiet=quiet) as observer:
        observer.step("load")
        source = load_source(model)
        if target is not None:
            check_target(target, source.model, *(Path(word) for word in given if len(given) == 1))
            target = target.resolve()  # a link stays one
        observer.step("import")
        found = import_plan(
            text,
            source,
            form=None if form is None else Form(form),
            base=None if precision is None else Precision(precision),
            module=module,
        )
    if target is not None:
        save_text(plan_json(found, source.model.digest) + "\n", target)
    show = partial(terminal.print_imported, target=target, verbose=verbose)
    _print(found.as_json(), show, found, as_json=as_json, quiet=quiet)
    return EXIT_NOT_MET if strict and found.rows_of(Status.REFUSED) else EXIT_OK


@guarded
def run_command(dry_run: bool, verbose: bool, as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Searches a plan and prints the answer, or only an estimate."""
    asked = _is_given("precision")
    settings = Settings(**chosen, precision_given=asked, limits=limits())
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


@guarded
def compare_command(as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Prints the error tables of the baselines."""
    with terminal.progress(quiet=quiet) as observer:
        asked = _is_given("precision")
        result = compare(Settings(**chosen, precision_given=asked, limits=limits()), observer)
    record = {**result.as_json(), "exit_code": EXIT_OK}
    _print(record, terminal.print_comparison, result, as_json=as_json, quiet=quiet)
    return EXIT_OK


@guarded
def verify_command(
    plan_path: Path | None, as_json: bool, quiet: bool, precision: str, **chosen: Any
) -> int:
    """Judges a plan again, or a mixed model, and prints whether it passes."""
    saved = None
    if plan_path is not None:
        saved = older_plan(plan_path, lambda: load_source(chosen["model"]), chosen["trt_module"])
        found_for = saved.plan.base.value
        if _is_given("precision") and precision != found_for:
            raise BadInputError(f"--precision {precision}: {saved.path} is a plan for {found_for}")
        precision = saved.searched
    with terminal.progress(quiet=quiet) as observer:
        chosen["precision"], asked = Precision(precision), _is_given("precision")
        settings = Settings(**chosen, precision_given=asked, limits=limits())
        verification = verify(settings, saved, observer)
        write_verification(verification)
    record = verification.as_json()
    _print(record, terminal.print_verification, verification, as_json=as_json, quiet=quiet)
    return EXIT_OK if verification.passed else EXIT_NOT_MET


@guarded
def report_command(run: Path, quiet: bool) -> int:
    """Writes the documents of a run's folder again."""
    with terminal.progress(quiet=quiet) as observer:
        observer.step("read")
        found = read_run(run)
        observer.step("write")
        write_documents(found)
    with output():
        if not quiet:
            click.echo(printable(f"report: {run}/report.html"))
    return EXIT_OK


@guarded
def diff_command(run_a: Path, run_b: Path, out: Path | None, as_json: bool, quiet: bool) -> int:
    """Prints what changed between two runs."""
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
