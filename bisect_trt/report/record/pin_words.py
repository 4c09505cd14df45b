"""The pins in the words of the model: which normalisations, softmaxes and modules they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bisect_trt.core.names import plural
from bisect_trt.graph.model.layers import Layer
from bisect_trt.graph.model.patterns import Pattern

_SHOWN = 6


def in_words(
    pinned: Sequence[str], patterns: Sequence[Pattern], layers: Sequence[Layer]
) -> list[str]:
    """The pins by block, the largest first: "5 of the 5 LayerNorms: Pow, ReduceMean of each"; what
    is in no pattern, by module.

    Args:
        pinned: layer ids in network order.
        patterns: those found in the model.
        layers: all of the model's.
    """
    wanted, known = set(pinned), {layer.name: layer for layer in layers}
    lines: list[tuple[int, str]] = []
    told = set[str]()
    groups: dict[tuple[str, tuple[str, ...]], list[Pattern]] = {}
    for pattern in patterns:
        ops = tuple(known[n].op for n in pattern.layers if n in wanted and n in known)
        if ops and told.isdisjoint(n for n in pattern.layers if n in wanted):
            groups.setdefault((pattern.kind, ops), []).append(pattern)
            told.update(n for n in pattern.layers if n in wanted)
    totals = Counter(p.kind for p in patterns)
    for (kind, ops), members in groups.items():
        counted = ", ".join(f"{n} {op}" if n > 1 else op for op, n in Counter(ops).items())
        one = "" if len(members) == 1 else " of each"
        which = f"{len(members)} of the {totals[kind]} {plural(kind)}" if totals[kind] > 1 else kind
        inside = "" if ops == (kind,) else f": {counted}{one}"
        lines.append((len(members) * len(ops), which + inside))
    scopes: dict[str, list[str]] = {}
    for name in pinned:
        if name not in told and name in known:
            scopes.setdefault(_module(known[name].scope), []).append(known[name].op)
    for scope, left in scopes.items():
        counted = ", ".join(f"{n} {op}" if n > 1 else op for op, n in Counter(left).most_common())
        lines.append((len(left), f"{scope or 'the main graph'}: {counted}"))
    lines.sort(key=lambda line: -line[0])
    shown = [words for _, words in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        unsaid = sum(pins for pins, _ in lines[_SHOWN:])
        blocks = "1 block" if len(lines) == _SHOWN + 1 else f"{len(lines) - _SHOWN} blocks"
        shown.append(f"and {unsaid} more in {blocks}, in pins.csv")
    return shown


def _module(scope: str) -> str:
    """The two outermost parts of a scope."""
    return "/".join([part for part in scope.split("/") if part][:2])
