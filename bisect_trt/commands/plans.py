"""The commands about plans: ``run``, ``compare``, ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from bisect_trt.core.errors import EXIT_NOT_MET, EXIT_OK, BadInputError
from bisect_trt.pipeline import compare, run
from bisect_trt.report.files.verification import write_verification
from bisect_trt.report.files.write import to_json
from bisect_trt.report.terminal.consoles import screen
from bisect_trt.report.terminal.exits import guarded, output
from bisect_trt.report.terminal.inputs_command import InputsCommand
from bisect_trt.report.terminal.options import JSON, PLAN, QUIET, settings_options
from bisect_trt.report.terminal.progress import progress
from bisect_trt.report.terminal.screen import print_comparison, print_verdict, print_verification
from bisect_trt.stations.answer.verify import verify
from bisect_trt.stations.asked.saved_plan import read_plan
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.bench.engine_choice import idle_options
from bisect_trt.stations.cost.estimate import estimate


@click.command("run", cls=InputsCommand)
@settings_options("run")
@click.option(
    "--dry-run", is_flag=True, help="Only say how many layers, about how many probes and how long."
)
@click.option("-v", "--verbose", is_flag=True, help="Tell each probe as it is made.")
@JSON
@QUIET
@guarded
def run_command(dry_run: bool, verbose: bool, as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Find the problem's kind and a small set of layers that must stay in FP32, test it on draws
    that the search has not seen; write the plan, model and report.
    """
    settings = Settings(**chosen)
    if dry_run:
        with progress(quiet=quiet) as observer:
            price = estimate(settings, observer)
        with output():
            click.echo(to_json(vars(price)) if as_json else price.sentence)
            for note in () if as_json else price.notes:
                click.echo(f"note: {note}")
            if settings.runner == "emulated" and not as_json and (idle := idle_options(settings)):
                click.echo(f"note: {idle}")
        return 0
    with progress(quiet=quiet, verbose=verbose, budget=settings.budget) as observer:
        result = run(settings, observer)
    with output():
        if as_json:
            click.echo(to_json(result.as_json()))
        elif not quiet:
            print_verdict(screen(), result)
    return result.exit_code


@click.command("compare", cls=InputsCommand)
@settings_options("compare")
@JSON
@QUIET
@guarded
def compare_command(as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Error tables only: every baseline's outputs and every layer, without a search."""
    with progress(quiet=quiet) as observer:
        result = compare(Settings(**chosen), observer)
    with output():
        if as_json:
            click.echo(to_json({**result.as_json(), "exit_code": EXIT_OK}))
        elif not quiet:
            print_comparison(screen(), result)
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
    with progress(quiet=quiet) as observer:
        verification = verify(Settings(precision=saved.searched, **chosen), saved, observer)
        write_verification(verification)
    with output():
        if as_json:
            click.echo(to_json(verification.as_json()))
        elif not quiet:
            print_verification(screen(), verification)
    return EXIT_OK if verification.passed else EXIT_NOT_MET
