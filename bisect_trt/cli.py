"""The command line: thin, every option declared once, the work done by the stations."""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from bisect_trt.core.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_NOT_MET,
    EXIT_OK,
    BadInputError,
    BisectError,
    one_line,
)
from bisect_trt.core.precision import Precision
from bisect_trt.graph.inspection import inspect_model
from bisect_trt.graph.load import load_model, save_model
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.graph.weak_forms import polygraphy_script, trtexec_arguments
from bisect_trt.pipeline import compare, run
from bisect_trt.report.screen import (
    ProgressObserver,
    print_comparison,
    print_inspection,
    print_verdict,
    print_verification,
    screen,
)
from bisect_trt.report.write import to_json
from bisect_trt.runners.doctor import examine
from bisect_trt.runners.tensorrt.module import MODULES
from bisect_trt.stations.estimate import estimate
from bisect_trt.stations.settings import (
    CERTIFIERS,
    PROBE_TIMEOUT_S,
    REWRITES,
    RUNNERS,
    TYPINGS,
    Settings,
)
from bisect_trt.stations.verify import read_plan, verify
from bisect_trt.version import __version__

Command = Callable[..., int | None]


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM is answered as Ctrl-C is: workers ended, the best plan written."""
    raise KeyboardInterrupt


def guarded(command: Command) -> Command:
    """Turn the tool's errors into one line and an exit code; nobody sees a traceback for their own
    mistake.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        previous = (
            signal.signal(signal.SIGTERM, _interrupt)
            if threading.current_thread() is threading.main_thread()
            else None
        )
        try:
            code = command(*args, **kwargs) or 0
        except BisectError as error:
            click.echo(f"bisect-trt: {one_line(error, 500)}", err=True)
            code = error.exit_code
        except KeyboardInterrupt:
            click.echo(
                "bisect-trt: interrupted; run the same command again to go on from here", err=True
            )
            code = EXIT_INTERRUPTED
        except BrokenPipeError:
            code = 0
        # our own mistake: the traceback helps whoever mends it, and 1 would mean "cannot be met"
        except Exception:
            traceback.print_exc()
            click.echo(
                "bisect-trt: internal error, please report it with the lines above", err=True
            )
            code = EXIT_INTERNAL
        finally:
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)
        sys.exit(code)

    return wrapper


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="bisect-trt")
def main() -> None:
    """Find the layers of an ONNX model that must stay in FP32, prove each one, and write the typed
    model.
    """


MODEL = click.argument("model", type=click.Path(path_type=Path))
INPUT = click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    help="An .npz file, a folder or a glob; a sample each. Repeatable.",
)
PRECISION = click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16", "tf32"]),
    default="fp16",
    show_default=True,
    help="What unpinned layers run in.",
)
RUNNER = click.option(
    "--runner",
    type=click.Choice(RUNNERS),
    default="auto",
    show_default=True,
    help="What executes the plans.",
)
REQUIREMENT = click.option(
    "--requirement",
    "require",
    multiple=True,
    help="Such as max_abs<=1e-2, logits:cosine>=0.999 or atol=1e-3,rtol=1e-2. Repeatable. Default: "
    "rel_range<=1e-2.",
)
METRIC = click.option(
    "--metric",
    "metrics",
    multiple=True,
    help="MODULE:FUNCTION, a task metric for --requirement. Repeatable.",
)
GOLDEN = click.option(
    "--golden",
    type=click.Path(path_type=Path),
    help="The original framework's outputs (.npz), checked against the reference.",
)
OUT = click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The run's folder. Default: reports/MODEL-PRECISION.",
)
TRT_MODULE = click.option(
    "--trt-module", type=click.Choice(MODULES), help="Which TensorRT. Default: whichever imports."
)
TYPING = click.option(
    "--typing",
    type=click.Choice(TYPINGS),
    default="strong",
    show_default=True,
    help="Weak: flags, for TensorRT 8.6 to 10.x.",
)
PROFILE = click.option(
    "--profile",
    "profiles",
    multiple=True,
    help="INPUT:MIN/OPT/MAX, such as x:1x3x32x32/1x3x64x64/1x3x99x99. Default: from the inputs. "
    "Repeatable.",
)
TIMEOUT = click.option(
    "--probe-timeout",
    "probe_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=PROBE_TIMEOUT_S,
    show_default=True,
    help="Seconds that one engine may take to build and run.",
)
REWRITE = click.option(
    "--rewrite",
    type=click.Choice(REWRITES),
    help="First rewrite the model: exact, checked on the inputs, or refused.",
)
PLAN = click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    required=True,
    help="The plan.json that a run wrote.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
QUIET = click.option("--quiet", is_flag=True, help="Print nothing but errors.")


def settings_options(command: Command) -> Command:
    """The options that make up a run's settings."""
    for option in reversed(
        (
            MODEL,
            INPUT,
            PRECISION,
            RUNNER,
            REQUIREMENT,
            METRIC,
            GOLDEN,
            OUT,
            REWRITE,
            TRT_MODULE,
            TYPING,
            PROFILE,
            TIMEOUT,
        )
    ):
        command = option(command)
    return command


@main.command("run")
@settings_options
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Probes at a time, a process each.",
)
@click.option(
    "--ray", metavar="ADDRESS", help="Run the workers on this Ray cluster; 'local' starts one here."
)
@click.option(
    "--max-builds",
    type=click.IntRange(min=0),
    default=None,
    help="Engine builds beyond the baselines. Default: 8, with --certify engine as many as needed.",
)
@click.option(
    "--certify",
    type=click.Choice(CERTIFIERS),
    default="emulated",
    show_default=True,
    help="Where each pin is proved: engine builds the model once without each.",
)
@click.option(
    "--dry-run", is_flag=True, help="Only say how many layers, about how many probes and how long."
)
@click.option("-v", "--verbose", is_flag=True, help="Tell each probe as it is made.")
@JSON
@QUIET
@guarded
def run_command(
    dry_run: bool, verbose: bool, as_json: bool, quiet: bool, precision: str, **options: Any
) -> int:
    """Find the problem's kind and the smallest proved set of FP32 layers; write the plan, model and
    report.
    """
    settings = Settings(precision=Precision(precision), **options)
    if dry_run:
        price = estimate(settings)
        click.echo(to_json(vars(price)) if as_json else price.sentence)
        return 0
    with ProgressObserver(
        Console(stderr=True), quiet=quiet or as_json, verbose=verbose
    ) as observer:
        result = run(settings, observer)
    if as_json:
        click.echo(to_json(result.as_json()))
    elif not quiet:
        print_verdict(screen(), result)
    return result.exit_code


@main.command("compare")
@settings_options
@JSON
@guarded
def compare_command(as_json: bool, precision: str, **options: Any) -> int:
    """Error tables only: every baseline's outputs and every layer, without a search."""
    result = compare(Settings(precision=Precision(precision), **options))
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
    inspection = inspect_model(load_model(model), Precision(precision))
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
    checks = examine()
    if as_json:
        click.echo(json.dumps([vars(c) for c in checks], indent=2))
        return 0
    for check in checks:
        sign = {True: "ok  ", False: "no  ", None: "    "}[check.works]
        click.echo(f"{sign}{check.name:<24}{check.detail}")
    return 0


@main.command("verify")
@settings_options
@PLAN
@JSON
@QUIET
@guarded
def verify_command(
    plan_path: Path, as_json: bool, quiet: bool, precision: str, **options: Any
) -> int:
    """Does a plan still hold for this model and these inputs? Exit code 0 if it does, 1 if not; for
    release gates.
    """
    saved = read_plan(plan_path)
    plan = saved.plan
    if (
        click.get_current_context().get_parameter_source("precision") is not ParameterSource.DEFAULT
        and precision != plan.base.value
    ):
        raise BadInputError(f"--precision {precision}: {plan_path} is a plan for {plan.base.value}")
    verification = verify(Settings(precision=saved.searched, **options), saved)
    if as_json:
        click.echo(to_json(verification.as_json()))
    elif not quiet:
        print_verification(screen(), verification)
    return EXIT_OK if verification.passed else EXIT_NOT_MET


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
    type=click.Path(path_type=Path),
    help="Where to; text goes to standard output without it.",
)
@guarded
def export_command(model: Path, plan_path: Path, form: str, output: Path | None) -> int:
    """Write a plan as typed ONNX, trtexec arguments or a polygraphy script."""
    saved = read_plan(plan_path)
    plan, loaded = saved.plan, load_model(model)
    saved.check_model(loaded.proto)
    if form == "onnx":
        if output is None:
            raise BadInputError("--format onnx needs --output FILE.onnx")
        save_model(to_typed(loaded.proto, plan), output)
        return 0
    text = (
        trtexec_arguments(loaded.proto, plan)
        if form == "trtexec"
        else polygraphy_script(loaded.proto, plan)
    )
    if output is None:
        click.echo(text)
    else:
        try:
            output.write_text(text + "\n")
        except OSError as error:
            raise BadInputError(f"{output}: cannot be written ({error.strerror})") from error
    return 0
