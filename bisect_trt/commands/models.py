"""The commands about a model that run nothing: ``inspect``, ``mark``, ``export``."""

from __future__ import annotations

from pathlib import Path

import click

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.names import counted
from bisect_trt.core.precision import Precision
from bisect_trt.graph.files.load import load_model
from bisect_trt.graph.files.save import check_target, save_model, save_text
from bisect_trt.graph.inspection.inspection import inspect_model
from bisect_trt.graph.passes.lifted import lifted_form, load_source
from bisect_trt.graph.passes.marked import mark_outputs, select_tensors, with_ranks
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.graph.passes.weak_forms import OF_FUNCTIONS, polygraphy_script, trtexec_arguments
from bisect_trt.report.files.write import to_json
from bisect_trt.report.terminal.consoles import screen
from bisect_trt.report.terminal.exits import guarded, output
from bisect_trt.report.terminal.options import JSON, MODEL, PLAN, PRECISION, NamedPath
from bisect_trt.report.terminal.progress import progress
from bisect_trt.report.terminal.screen import print_inspection
from bisect_trt.stations.asked.saved_plan import read_plan


@click.command("inspect")
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
        observer.station("write")  # a table of 60,000 rows takes longer than what is in it
        console = screen()
        with console.capture() as printed:
            if not as_json:
                print_inspection(console, inspection)
        text = to_json(inspection.as_json()) + "\n" if as_json else printed.get()
    with output():
        click.echo(text, nl=False)
    return 0


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
    with progress() as observer:
        observer.station("load")
        loaded = load_model(model)
        check_target(target, loaded)
        observer.station("mark")
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
            click.echo(f"left out: {name!r}, of which nothing says how many dimensions it has")
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
@guarded
def export_command(model: Path, plan_path: Path, form: str, target: Path | None) -> int:
    """Write a plan as typed ONNX, trtexec arguments or a polygraphy script."""
    saved = read_plan(plan_path)
    with progress() as observer:
        observer.station("load")
        source = load_source(model)
        loaded, plan, graph = source.model, saved.plan, source.graph
        saved.check_model(graph)
        if target is not None:
            check_target(target, loaded, plan_path)
            target = target.resolve()  # a link stays one
        observer.station("export")
        if form == "onnx":
            if target is None:
                raise BadInputError("--format onnx needs --output FILE.onnx")
            if target.suffix != ".onnx":
                raise BadInputError(
                    f"--output {target}: a model is written; give it a name that ends with .onnx"
                )
            save_model(to_typed(graph, plan), target)
            return 0
        if loaded.written_out and plan.pinned:
            raise BadInputError(OF_FUNCTIONS)
        if source.lifted is not None:
            raise BadInputError(
                f"--format {form}: {model} is {source.lifted.precision.value.upper()} in the "
                "source already, so weak typing cannot keep its layers in FP32; use --format onnx"
            )
        write = trtexec_arguments if form == "trtexec" else polygraphy_script
        text = write(graph, plan)
    if target is not None:
        save_text(text + "\n", target)
        return 0
    with output(is_product=True):
        click.echo(text)
    return 0
