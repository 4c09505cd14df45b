"""How the command line explains itself: help in groups, and hints where it is misused."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from bisect_trt.base.display import did_you_mean
from bisect_trt.base.interrupt import interrupts_held
from bisect_trt.imports.known_options import KNOWN_OPTIONS
from bisect_trt.settings import FORMER

GROUPS = ("Input", "Requirement", "Search", "Hardware", "Output")
"""The headings of options in the help, in order."""

_HELP = "Help"
_SHOWS_RARE = "bisect_trt.shows_rare"
"""The key of click's context under which ``--help-all`` says that it was given."""


class GroupedOption(click.Option):
    """An option with its heading in the help; ``rare`` ones only ``--help-all`` shows."""

    def __init__(self, *args: Any, group: str = _HELP, rare: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group
        self.rare = rare


def grouped(group: str, *flags: str, rare: bool = False, **more: Any) -> Callable[[Any], Any]:
    """A decorator that adds an option under the heading ``group``."""
    return click.option(*flags, cls=GroupedOption, group=group, rare=rare, **more)


class Word(click.Choice[str]):
    """One of several words, with a hint where another is given."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """What click says, and the word that was probably meant."""
        said = super().get_invalid_choice_message(value, ctx).rstrip(".")
        known = [str(choice) for choice in self.choices]
        if value == "fp32" and "fp16" in known:
            return f"{said}; fp32 is the reference"
        return f"{said}{did_you_mean(str(value), known)}"


_TOLERANCE = "write --requirement 'atol=1e-3,rtol=1e-3'"
_METRIC = "write --requirement 'max_abs<=1e-3'"
_INPUTS = "write --input FILE, once for each"
_MODEL = "write the model's path without an option"

HINTS: Mapping[str, tuple[str, str]] = {
    "--fp16": ("--precision", "write --precision fp16"),
    "--bf16": ("--precision", "write --precision bf16"),
    "--tf32": ("--precision", "write --precision tf32"),
    "--atol": ("--requirement", _TOLERANCE),
    "--rtol": ("--requirement", _TOLERANCE),
    "--tolerance": ("--requirement", _METRIC),
    "--tol": ("--requirement", _METRIC),
    "--threshold": ("--requirement", _METRIC),
    "--metrics": ("--requirement", f"{_METRIC}, which names the metric"),
    "--inputs": ("--input", _INPUTS),
    "--load-inputs": ("--input", _INPUTS),
    "--loadInputs": ("--input", _INPUTS),
    "--output": ("--out", "write --out FOLDER"),
    "--onnx": ("--input", _MODEL),
    "--model": ("--input", _MODEL),
}
"""Options that other tools have: the option here that it needs, and what to write."""


class ToolCommand(click.Command):
    """A command with examples, and options in groups; libraries are imported when it starts."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self.examples = tuple(examples)
        shows_all = GroupedOption(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show rare options too, and exit.",
        )
        self.params.append(shows_all)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options under their headings."""
        headings: dict[str, list[tuple[str, str]]] = {name: [] for name in (*GROUPS, _HELP)}
        for param in self.get_params(ctx):
            rare = getattr(param, "rare", False) and not ctx.meta.get(_SHOWS_RARE)
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None and not rare:
                headings[getattr(param, "group", _HELP)].append(record)
        for name, records in headings.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}bisect-trt {example}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does, with a hint on options of other tools."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            needed, hint = HINTS.get(error.option_name, ("", ""))
            if not any(needed in param.opts for param in self.params):
                raise
            raise click.UsageError(f"No such option {error.option_name}: {hint}", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        with interrupts_held():
            importlib.import_module("bisect_trt.commands")
        return super().invoke(ctx)


def _show_all(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    """Prints the help with the rare options, and ends."""
    if given and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_RARE] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def in_todays_words(args: Sequence[str]) -> list[str]:
    """Replaces options of older versions in ``args`` by today's."""
    today, former = [], ""
    for arg in args:
        flag, equals, value = arg.partition("=")
        if former:
            today.append(FORMER[former][1](arg))
            former = ""
        elif flag in FORMER:
            name, translated = FORMER[flag]
            today.append(f"{name}={translated(value)}" if equals else name)
            former = "" if equals else flag
        else:
            today.append(arg)
    return today


class InputsCommand(ToolCommand):
    """A command with ``--input``, which also accepts the options of older versions."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does, with a hint where the shell has expanded a pattern."""
        args = in_todays_words(args)
        given = [o for o in ("--input", "--holdout") if any(word.startswith(o) for word in args)]
        try:
            return super().parse_args(ctx, list(args))
        except click.MissingParameter as error:
            unread = self._unread(ctx, args)
            if error.param is None or error.param.name != "inputs" or not unread:
                raise
            names = " ".join(f"--input {shlex.quote(word)}" for word in unread)
            raise click.UsageError(f"Missing option '--input': write {names}", ctx) from error
        except click.UsageError as error:
            # Subclasses, such as NoSuchOption, have other causes.
            if type(error) is click.UsageError and given and "extra argument" in error.message:
                message = (
                    f"{error.message}. Each {' and each '.join(given)} is one file, folder or "
                    "pattern: put a pattern into quotes ('data/*.npz'), or the shell makes "
                    "several words of it"
                )
                raise click.UsageError(message, ctx) from error
            raise

    def _unread(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """The words that are neither options nor the model."""
        _, words, _ = self.make_parser(ctx).parse_args(list(args))
        return words


class ImportCommand(ToolCommand):
    """A command that takes options of other tools as words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does, with a hint on an option that no tool has."""
        rest = super().parse_args(ctx, args)
        for word in ctx.params.get("given") or ():
            name = re.split(r"[=\s]", word, maxsplit=1)[0]
            if name.startswith("-") and name not in KNOWN_OPTIONS:
                own = [option for param in self.get_params(ctx) for option in param.opts]
                hint = did_you_mean(name, (*own, *KNOWN_OPTIONS))
                raise click.UsageError(f"No such option {name}{hint}", ctx)
        return rest


class ToolGroup(click.Group):
    """All commands together, those first that a user needs first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order in which they were added."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does, with a hint where the command is missing."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = f"No such option {error.option_name}: write the command first, such as "
            raise click.UsageError(f"{message}`bisect-trt run model.onnx`", ctx) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command as click does, with a hint where it is a model."""
        name = args[0]
        if name not in self.commands and not ctx.resilient_parsing:
            hint = did_you_mean(name, self.commands)
            if name.casefold().endswith(".onnx"):
                hint = f": did you mean `run {shlex.quote(name)}`?"
            raise click.UsageError(f"No such command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that the words name.

        Raises:
            click.Abort: Ctrl-C came before the command began.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # click would print an empty line for it
            raise click.Abort from error
