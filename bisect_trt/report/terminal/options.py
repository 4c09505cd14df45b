"""The settings' options as click has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bisect_trt.core.precision import Precision
from bisect_trt.report.terminal.exits import Command
from bisect_trt.stations.asked.option import Option
from bisect_trt.stations.asked.settings import Settings, options


class NamedPath(click.Path):
    """A path that has a name: an empty one would be the current folder."""

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
    help="A file (.npz, .npy, polygraphy's .json), folder, glob or MODULE:FUNCTION. Repeatable.",
)

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


def settings_options(command: str) -> Callable[[Command], Command]:
    """MODEL, ``--input`` and the options of :class:`Settings` that ``command`` takes."""

    def decorate(function: Command) -> Command:
        return MODEL(INPUT(_with_options(function, command)))

    return decorate


def run_options(function: Command) -> Command:
    """The options of ``run`` but for those that say on what and where to."""
    return _with_options(function, "run", without="out")


def _with_options(function: Command, command: str, without: str = "") -> Command:
    defaults = Settings.__dataclass_fields__
    for name, its in reversed(options().items()):
        if command in its.commands and name != without:
            said = replace(its, help=its.help_of.get(command, its.help))
            # What another default takes the place of is not shown as one.
            shown = "Default" not in said.help and "default" not in said.help
            option = _click_option(name, said, defaults[name].default, shown=shown)
            function = option(function)
    return function


def _click_option(
    name: str, its: Option, default: Any, *, shown: bool
) -> Callable[[Command], Command]:
    """A field of the settings as click has it."""
    kind: Any = None
    if its.choices:
        kind = click.Choice(its.choices)
    elif its.kind is Path:
        kind = NamedPath()
    elif its.kind is int:
        kind = click.IntRange(min=None if its.least is None else int(its.least))
    elif its.kind is float:
        kind = click.FloatRange(min=its.least, max=its.most, min_open=its.above)
    if its.kind is bool:
        return click.option(its.flag, name, is_flag=True, default=default, help=its.help)
    return click.option(
        its.flag,
        name,
        type=kind,
        multiple=its.repeatable,
        default=str(default) if its.kind is Precision else default,
        show_default=shown and default not in (None, ()),
        help=f"{its.help} Repeatable." if its.repeatable else its.help,
        metavar=its.metavar,
    )
