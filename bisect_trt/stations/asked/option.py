"""An option: how a field of the settings is asked for on the command line and in a notebook, and
what is made of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_trt.core.errors import BadInputError

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


def checked(its: Option, value: Any) -> Any:
    """``value`` in the option's own type.

    Args:
        its: the option.
        value: as a notebook or the command line gave it.

    Raises:
        BadInputError: it is none of the option's values.
    """
    if its.repeatable:
        if isinstance(value, (str, Path, Mapping)) or callable(value):
            return (value,)
        several = tuple(value) if isinstance(value, Iterable) else (value,)
        if any(isinstance(v, (int, float, bytes, type(None))) for v in several):
            raise BadInputError(f"{its.flag} {value}: not a text, or a list of texts")
        return several
    if value is None or isinstance(value, Mapping):
        return value
    if value == "" and its.kind is Path:
        raise BadInputError(f"{its.flag} '': an empty path")
    if its.choices and str(value) not in its.choices:
        hint = ": that is the reference" if str(value) == "fp32" else ": unknown"
        raise BadInputError(f"{its.flag} {value}{hint}; choose one of {', '.join(its.choices)}")
    try:
        converted = its.kind(value)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"{its.flag} {value}: not a {its.kind.__name__}") from error
    if its.kind is float and not math.isfinite(converted):
        raise BadInputError(f"{its.flag} {value}: not a number that can be used")
    if its.most is not None and not converted <= its.most:
        raise BadInputError(f"{its.flag} {value}: must be at most {its.most:g}")
    low = its.least is not None and (
        converted <= its.least if its.above else not converted >= its.least
    )
    if low:
        raise BadInputError(
            f"{its.flag} {value}: must be {'more than' if its.above else 'at least'} {its.least:g}"
        )
    return converted
