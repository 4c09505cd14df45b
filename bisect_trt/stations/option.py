"""An option: how a field of the settings is asked for on the command line and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLANNING = frozenset({"run", "compare", "verify"})
"""The commands about plans."""


@dataclass(frozen=True)
class Option:
    """How a field is asked for: ``flag`` on the command line, ``help`` everywhere.

    ``kind`` is the type of one value; ``least`` and ``most`` bound it, ``above`` whether
    that itself is not. ``commands`` are those that take the option, ``help_of`` what those say of
    it for which ``help`` is not true.
    """

    flag: str
    help: str
    kind: type = str
    choices: tuple[str, ...] = ()
    repeatable: bool = False
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    above: bool = False
    help_of: Mapping[str, str] = field(default_factory=dict)
    commands: frozenset[str] = PLANNING


def option(default: Any, flag: str, help: str, **more: Any) -> Any:
    """A field with its :class:`Option`.

    Args:
        default: the field's.
        flag: on the command line.
        help: everywhere.
        more: further fields of :class:`Option`.
    """
    return field(default=default, metadata={"option": Option(flag, help, **more)})
