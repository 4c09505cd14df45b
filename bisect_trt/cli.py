"""The command line: thin; options come from the settings, the work is done by the stations."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from bisect_trt.core.errors import (
    EXIT_NOT_MET,
    EXIT_OK,
    BadInputError,
)
from bisect_trt.core.names import printable
from bisect_trt.core.precision import Precision
from bisect_trt.graph.graph import Graph
from bisect_trt.graph.inspection import inspect_model
from bisect_trt.graph.load import check_target, load_model, save_model, save_text
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.graph.weak_forms import polygraphy_script, trtexec_arguments
from bisect_trt.pipeline import CURED, REDUCED, compare, cure, reduce, run
from bisect_trt.report.consoles import screen
from bisect_trt.report.cured import cures_as_json
from bisect_trt.report.exits import guarded, output
from bisect_trt.report.options import MODEL, NamedPath, settings_options
from bisect_trt.report.progress import progress
from bisect_trt.report.reduced import as_record
from bisect_trt.report.screen import (
    print_comparison,
    print_cures,
    print_inspection,
    print_reduced,
    print_verdict,
    print_verification,
)
from bisect_trt.report.write import to_json
from bisect_trt.runners.doctor import examine
from bisect_trt.stations.estimate import estimate
from bisect_trt.stations.reduce import Reduced
from bisect_trt.stations.reduce_model import result_folder
from bisect_trt.stations.saved_plan import read_plan
from bisect_trt.stations.settings import Settings, options
from bisect_trt.stations.verify import verify
from bisect_trt.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="bisect-trt")
def main() -> None:
    """Find the layers of an ONNX model that must stay in FP32, prove each one, and write the typed
    model.
    """


PRECISION = click.option(
    "--precision",
    type=click.Choice(options()["precision"].choices),
    default="fp16",
    show_default=True,
    help=options()["precision"].help,
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
QUIET = click.option("--quiet", is_flag=True, help="Print nothing but errors.")


@main.command("run")
@settings_options("run")
@click.option(
    "--dry-run", is_flag=True, help="Only say how many layers, about how many probes and how long."
)
@click.option("-v", "--verbose", is_flag=True, help="Tell each probe as it is made.")
@JSON
@QUIET
@guarded
def run_command(dry_run: bool, verbose: bool, as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Find the problem's kind and the smallest proved set of FP32 layers; write the plan, model and
    report.
    """
    settings = Settings(**chosen)
    if dry_run:
        with progress(quiet=quiet) as observer:
            price = estimate(settings, observer)
        with output():
            click.echo(to_json(vars(price)) if as_json else price.sentence)
        return 0
    with progress(quiet=quiet, verbose=verbose, budget=settings.budget) as observer:
        result = run(settings, observer)
    with output():
        if as_json:
            click.echo(to_json(result.as_json()))
        elif not quiet:
            print_verdict(screen(), result)
    return result.exit_code


@main.command("compare")
@settings_options("compare")
@JSON
@guarded
def compare_command(as_json: bool, **chosen: Any) -> int:
    """Error tables only: every baseline's outputs and every layer, without a search."""
    with progress() as observer:
        result = compare(Settings(**chosen), observer)
    with output():
        if as_json:
            click.echo(to_json(result.as_json()))
        else:
            print_comparison(screen(), result)
    return 0


@main.command("inspect")
@MODEL
@PRECISION
@JSON
@guarded
def inspect_command(model: Path, precision: str, as_json: bool) -> int:
    """Layers, patterns, suspects and advice about the opset, without running anything."""
    with progress() as observer:
        observer.station("load")
        loaded = load_model(model)
        observer.station("inspect")
        inspection = inspect_model(loaded, Precision(precision))
    with output():
        if as_json:
            click.echo(to_json(inspection.as_json()))
        else:
            print_inspection(screen(), inspection)
    return 0


@main.command("doctor")
@JSON
@guarded
def doctor_command(as_json: bool) -> int:
    """What is installed, which runners work here and why not."""
    with progress() as observer:
        observer.station("doctor")
        checks = examine()
    with output():
        if as_json:
            click.echo(json.dumps([vars(c) for c in checks], indent=2))
            return 0
        for check in checks:
            sign = {True: "ok  ", False: "no  ", None: "    "}[check.works]
            click.echo(f"{sign}{check.name:<24}{printable(check.detail)}")
    return 0


@main.command("verify")
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
    with progress(quiet=quiet) as observer:
        verification = verify(Settings(precision=saved.searched, **chosen), saved, observer)
    with output():
        if as_json:
            click.echo(to_json(verification.as_json()))
        elif not quiet:
            print_verification(screen(), verification)
    return EXIT_OK if verification.passed else EXIT_NOT_MET


@main.command("reduce")
@settings_options("reduce")
@ENGINE_PRECISION
@click.option(
    "--check",
    metavar="COMMAND",
    help="Says instead of an engine what is bad: exit code 0 is fine, any other is not. {model}, "
    "{inputs} and {expected} become the paths of the piece's files.",
)
@JSON
@QUIET
@guarded
def reduce_command(
    precision: str, check: str | None, as_json: bool, quiet: bool, **chosen: Any
) -> int:
    """Find the smallest part of a model on which an engine fails, is wrong or unsteady; write a
    reproducer. Exit code 1 if the whole is not bad.
    """
    settings, made_by = Settings(**chosen), shlex.join(["bisect-trt", *sys.argv[1:]])
    with progress(quiet=quiet, verbose=not as_json, budget=settings.budget) as observer:
        found = reduce(settings, Precision(precision), check, made_by, observer)
    with output():
        if as_json:
            click.echo(to_json(as_record(found)))
        elif not quiet:
            print_reduced(screen(), found, result_folder(settings, REDUCED))
    return EXIT_OK if isinstance(found, Reduced) else EXIT_NOT_MET


@main.command("cure")
@settings_options("cure")
@ENGINE_PRECISION
@click.option(
    "--piece",
    type=NamedPath(),
    metavar="DIR",
    help="The reproducer's folder: tensors inside the piece are marked first.",
)
@JSON
@QUIET
@guarded
def cure_command(
    precision: str, piece: Path | None, as_json: bool, quiet: bool, **chosen: Any
) -> int:
    """Try what makes a wrong or unsteady engine right and steady; write the table and the model to
    ship. Exit code 1 if nothing does.
    """
    settings = Settings(**chosen)
    with progress(quiet=quiet, verbose=not as_json, budget=settings.budget) as observer:
        cures = cure(settings, Precision(precision), piece, observer)
    with output():
        if as_json:
            click.echo(to_json(cures_as_json(cures)))
        elif not quiet:
            print_cures(screen(), cures, result_folder(settings, CURED))
    return EXIT_NOT_MET if cures.needed and cures.smallest is None else EXIT_OK


@main.command("export")
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
@guarded
def export_command(model: Path, plan_path: Path, form: str, target: Path | None) -> int:
    """Write a plan as typed ONNX, trtexec arguments or a polygraphy script."""
    saved = read_plan(plan_path)
    with progress() as observer:
        observer.station("load")
        loaded = load_model(model)
        plan, graph = saved.plan, Graph(loaded.proto)
        saved.check_model(graph)
        if target is not None:
            check_target(target, loaded, plan_path)
            target = target.resolve()  # a link stays one
        observer.station("export")
        if form == "onnx":
            if target is None:
                raise BadInputError("--format onnx needs --output FILE.onnx")
            save_model(to_typed(graph, plan), target)
            return 0
        write = trtexec_arguments if form == "trtexec" else polygraphy_script
        text = write(graph, plan)
    if target is not None:
        save_text(text + "\n", target)
        return 0
    with output(is_product=True):
        click.echo(text)
    return 0
