"""The commands about engines that are to blame: ``reduce``, ``cure``; and ``doctor``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from bisect_trt.core.errors import EXIT_NOT_MET, EXIT_OK
from bisect_trt.core.names import printable
from bisect_trt.core.precision import Precision
from bisect_trt.pieces import CURED, REDUCED, cure, reduce
from bisect_trt.report.files.write import to_json
from bisect_trt.report.pieces.cured import cures_as_json
from bisect_trt.report.pieces.reduced import as_record
from bisect_trt.report.terminal.consoles import screen
from bisect_trt.report.terminal.exits import guarded, output
from bisect_trt.report.terminal.inputs_command import InputsCommand
from bisect_trt.report.terminal.options import (
    ENGINE_PRECISION,
    JSON,
    QUIET,
    NamedPath,
    settings_options,
)
from bisect_trt.report.terminal.progress import progress
from bisect_trt.report.terminal.screen import print_cures, print_reduced
from bisect_trt.runners.doctor import examine
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.pieces.reduce import Reduced
from bisect_trt.stations.pieces.reduce_model import result_folder


@click.command("reduce", cls=InputsCommand)
@settings_options("reduce")
@ENGINE_PRECISION
@click.option(
    "--check",
    metavar="COMMAND",
    help="Says instead of an engine what is bad: exit code 0 is fine, 1 is bad, any other says "
    "nothing. The model's path is appended, or stands where {model} does; {inputs} and {expected} "
    "become the paths of the piece's other files.",
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


@click.command("cure", cls=InputsCommand)
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


@click.command("doctor")
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
