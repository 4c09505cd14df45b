"""The layers that options name: those that are held, those that the tables show."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bisect_trt.core.errors import BadInputError
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.layers import Layer
from bisect_trt.graph.passes.marked import select_tensors
from bisect_trt.stations.asked.settings import Settings


def marked_layers(
    settings: Settings, graph: Graph, layers: Sequence[Layer]
) -> frozenset[str] | None:
    """The layers that ``--mark`` names; None where it is not given.

    Args:
        settings: the selectors.
        graph: the model.
        layers: those that can run at the precision.

    Raises:
        BadInputError: a selector names none of those that can run at the precision.
    """
    if not settings.mark:
        return None
    marked: set[str] = set()
    for selector in settings.mark:
        tensors = set(select_tensors(graph, [selector]))
        found = {x.name for x in layers if not tensors.isdisjoint(x.outputs)}
        if not found:
            raise BadInputError(
                f"--mark {selector!r}: names no layer that can run in {settings.precision.value}"
            )
        marked |= found
    return frozenset(marked)


def compiled(flag: str, text: str) -> re.Pattern[str]:
    """What an option's regular expression says.

    Raises:
        BadInputError: it is none.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise BadInputError(f"{flag} {text!r}: no regular expression ({error})") from error


def held_layers(
    settings: Settings, layers: Sequence[Layer]
) -> tuple[frozenset[str], frozenset[str]]:
    """The layers that ``--pin`` and ``--lower`` name.

    Raises:
        BadInputError: no expression, one that names no layer, or a layer named by both.
    """
    found: list[frozenset[str]] = []
    for flag, texts in (("--pin", settings.pin), ("--lower", settings.lower)):
        named: set[str] = set()
        for text in texts:
            expression = compiled(flag, text)
            matched = {x.name for x in layers if expression.search(x.name)}
            if not matched:
                raise BadInputError(
                    f"{flag} {text!r}: names no layer; `bisect-trt inspect` lists them"
                )
            named |= matched
        found.append(frozenset(named))
    both = sorted(found[0] & found[1])
    if both:
        raise BadInputError(f"--pin and --lower: both name layer {both[0]!r}")
    return found[0], found[1]
