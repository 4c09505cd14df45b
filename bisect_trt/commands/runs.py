"""The commands about runs that are over: ``report``, ``diff``. They run nothing."""

from __future__ import annotations

from pathlib import Path

import click

from bisect_trt.core.errors import EXIT_NOT_MET, EXIT_OK
from bisect_trt.core.names import printable
from bisect_trt.report.files.read_run import read_run
from bisect_trt.report.files.write import to_json, write_documents
from bisect_trt.report.runs.run_diff import diff_runs
from bisect_trt.report.runs.run_diff_page import as_page, as_record, write_diff
from bisect_trt.report.terminal.consoles import screen
from bisect_trt.report.terminal.exits import guarded, output
from bisect_trt.report.terminal.options import JSON, QUIET, NamedPath
from bisect_trt.report.terminal.progress import progress
from bisect_trt.report.terminal.screen import print_page


@click.command("report")
@click.argument("run", type=NamedPath())
@QUIET
@guarded
def report_command(run: Path, quiet: bool) -> int:
    """Write report.html, report.md and junit.xml of a run's folder again, from its other files."""
    with progress(quiet=quiet) as observer:
        observer.station("read")
        found = read_run(run)
        observer.station("write")
        write_documents(found)
    with output():
        if not quiet:
            click.echo(printable(f"report: {run}/report.html"))
    return EXIT_OK


@click.command("diff")
@click.argument("run_a", type=NamedPath())
@click.argument("run_b", type=NamedPath())
@click.option(
    "--out", type=NamedPath(), help="A folder for diff.html, diff.md and diff.json. Default: none."
)
@JSON
@QUIET
@guarded
def diff_command(run_a: Path, run_b: Path, out: Path | None, as_json: bool, quiet: bool) -> int:
    """What changed from one run's folder to another: requirements, what the plans hold on, pins and
    layers. Exit code 1 if the second misses what the first met, or was not asked what the first
    was; 2 if no layer is in both.
    """
    with progress(quiet=quiet) as observer:
        observer.station("read")
        before, after = read_run(run_a), read_run(run_b)
        observer.station("compare")
        found = diff_runs(before, after)
        if out is not None:
            write_diff(found, out)
    with output():
        if as_json:
            click.echo(to_json(as_record(found)))
        elif not quiet:
            print_page(screen(), as_page(found))
    return EXIT_NOT_MET if found.worse or found.untold else EXIT_OK
