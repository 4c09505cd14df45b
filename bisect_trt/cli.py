"""The command line: thin; options come from the settings, the work is done by the stations."""

from __future__ import annotations

import click

from bisect_trt.commands.engines import cure_command, doctor_command, reduce_command
from bisect_trt.commands.gate import gate_command
from bisect_trt.commands.models import export_command, inspect_command, mark_command
from bisect_trt.commands.plans import compare_command, run_command, verify_command
from bisect_trt.commands.runs import diff_command, report_command
from bisect_trt.version import __version__


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
    reduce_command,
    cure_command,
    doctor_command,
):
    main.add_command(command)
