"""A command that takes inputs, and says what became of a pattern that the shell saw first."""

from __future__ import annotations

import click

_OPTIONS = ("--input", "--holdout")


class InputsCommand(click.Command):
    """Takes ``--input`` with one file, folder or pattern each time."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, which only says that there are words too many.

        Raises:
            UsageError: click's, with what may have made them.
        """
        told = [option for option in _OPTIONS if any(word.startswith(option) for word in args)]
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if type(error) is click.UsageError and told and "extra argument" in error.message:
                words = (
                    f"{error.message}. Each {' and each '.join(told)} is one file, folder or "
                    "pattern: put a pattern into quotes ('data/*.npz'), or the shell makes "
                    "several words of it"
                )
                raise click.UsageError(words, ctx) from error
            raise
