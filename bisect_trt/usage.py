"""How the command line explains itself: help in groups, and hints where it is misused."""

from __future__ import annotations

import importlib
from typing import Any

import click

from bisect_trt.base.interrupt import interrupts_held


class ToolCommand(click.Command):
    """A command that imports the libraries only once its options are right."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        with interrupts_held():
            importlib.import_module("bisect_trt.commands")
        return super().invoke(ctx)


class ToolGroup(click.Group):
    """All commands together."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that the words name.

        Raises:
            click.Abort: Ctrl-C came before the command began.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # click would print an empty line for it
            raise click.Abort from error
