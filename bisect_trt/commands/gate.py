"""``gate``: many models, one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from bisect_trt.core.machine.stop import is_stop
from bisect_trt.pipeline import run
from bisect_trt.report.files.write import to_json
from bisect_trt.report.runs.gate import (
    Entry,
    Gate,
    check_gate_folder,
    gate_page,
    gate_record,
    write_gate,
)
from bisect_trt.report.terminal.consoles import screen
from bisect_trt.report.terminal.exits import ended_by, guarded, output
from bisect_trt.report.terminal.options import JSON, QUIET, NamedPath, run_options
from bisect_trt.report.terminal.progress import ProgressObserver, progress
from bisect_trt.report.terminal.screen import print_page
from bisect_trt.stations.asked.project_file import PROJECT_FILE, read_project
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.bench.run_folder import held_folder


@click.command("gate")
@click.option(
    "--config",
    type=NamedPath(),
    default=PROJECT_FILE,
    show_default=True,
    help="The models and what each is asked.",
)
@click.option("--out", type=NamedPath(), help="A folder of runs. Default: as the file says.")
@run_options
@click.option("-v", "--verbose", is_flag=True, help="Tell each probe as it is made.")
@JSON
@QUIET
@guarded
def gate_command(
    config: Path, out: Path | None, verbose: bool, as_json: bool, quiet: bool, **chosen: Any
) -> int:
    """Run every model of bisect.toml and write one table, index.html and junit.xml. What is known
    from before is not run again. Options of run override the file.
    """
    source = click.get_current_context().get_parameter_source
    given = {n: v for n, v in chosen.items() if source(n) is not ParameterSource.DEFAULT}
    project = read_project(config, out, given)
    check_gate_folder(project.out, project.runs)
    gate = Gate(project.out, (), len(project.runs))
    with held_folder(project.out):
        for name, settings in project.runs.items():
            with progress(
                quiet=quiet, verbose=verbose, budget=settings.budget, subject=name
            ) as observer:
                entry = _entry(name, settings, observer)
            gate = Gate(project.out, (*gate.entries, entry), gate.planned)
            write_gate(gate)  # whoever interrupts has the table so far
    with output():
        if as_json:
            click.echo(to_json(gate_record(gate)))
        elif not quiet:
            print_page(screen(), gate_page(gate))
            click.echo(f"page: {project.out}/index.html")
    return gate.exit_code


def _entry(name: str, settings: Settings, observer: ProgressObserver) -> Entry:
    try:
        result = run(settings, observer)
    except Exception as error:  # no model's error is another's, whoever's mistake it is
        if is_stop(error):
            raise
        code, words = ended_by(error)
        return Entry(name, code, error=words)
    return Entry(name, result.exit_code, result)
