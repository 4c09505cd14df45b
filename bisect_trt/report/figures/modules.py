"""The module tree as an icicle: how much of each module is pinned, and what it does alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from bisect_trt.core.names import counted
from bisect_trt.numerics.scores import brief
from bisect_trt.report.figures.figure import BAD, Figure, label

_SEPARATORS = re.compile(r"[./]")
_MOST_SHOWN, _DEEPEST = 1500, 12
_CLASSES = (
    (1.0, "a layer misses the requirement alone", BAD),
    (0.1, "up to the tolerance alone", "#d9a83f"),
    (0.01, "up to a tenth of it", "#8da4ef"),
    (-math.inf, "up to a hundredth, or not measured", "#b9bbc6"),
)
"""The worst score that a layer of a box has alone, at least; its words and colour."""


@dataclass
class _Module:
    """A box under construction: layers in it, those pinned, and the one that does most alone."""

    path: tuple[str, ...]
    start: int = 0
    layers: int = 0
    pinned: int = 0
    worst: float = -math.inf
    worst_layer: str = ""
    children: dict[str, _Module] = field(default_factory=dict)


def modules_figure(layers: pd.DataFrame) -> Figure | None:
    """A box a module, as wide as it has layers, coloured by the worst score that one of its layers
    has alone; by operator where the model names no modules. None without such scores.
    """
    if "alone_score" not in layers or not len(layers):
        return None
    root = _tree(layers)
    _place(root, 0)
    boxes = sorted(_boxes(root), key=lambda box: -box.layers)[:_MOST_SHOWN]
    data = []
    for place, (least, words, colour) in enumerate(_CLASSES):
        most = _CLASSES[place - 1][0] if place else math.inf
        some = [b for b in boxes if least <= b.worst and (b.worst < most or not place)]
        if some:
            data.append(_bars(some, words, colour))
    deepest = max(len(box.path) for box in boxes) + 1
    layout = {
        "xaxis": {"visible": False, "range": [0, len(layers)]},
        "yaxis": {"visible": False, "range": [deepest, 0]},
        "barmode": "overlay",
        "bargap": 0,
        "zooms": True,
        "margin": {"l": 8, "b": 8},
        # Words that have to shrink for their box cannot be read; hovering shows them.
        "uniformtext": {"minsize": 10, "mode": "hide"},
    }
    alt = "Modules of the model, by layers, pins and what their worst layer does alone"
    return Figure("modules-plot", alt, data, layout, height=110 + 44 * deepest)


def _bars(boxes: Sequence[_Module], words: str, colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": words,
        "x": [box.start + box.layers / 2 for box in boxes],
        "width": [box.layers for box in boxes],
        "y": [0.97] * len(boxes),
        "base": [len(box.path) for box in boxes],
        "text": [_words(box) for box in boxes],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "customdata": [_facts(box) for box in boxes],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": colour, "line": {"width": 1}},
    }


def has_modules(layers: pd.DataFrame) -> bool:
    """Whether some layer says which module it is of."""
    return bool((layers["module"] != "").any() or (layers["scope"] != "").any())


def _tree(layers: pd.DataFrame) -> _Module:
    named = has_modules(layers)
    root = _Module(())
    columns = ("layer", "op", "module", "scope", "pinned", "alone_score")
    for layer, op, module, scope, pinned, alone in zip(*(layers[c] for c in columns), strict=True):
        path = (module or scope) if named else op
        parts = [part for part in _SEPARATORS.split(path) if part][:_DEEPEST]
        here = root
        _count(here, layer, bool(pinned), float(alone))
        for part in parts:
            here = here.children.setdefault(part, _Module((*here.path, part)))
            _count(here, layer, bool(pinned), float(alone))
    return root


def _count(module: _Module, layer: str, pinned: bool, alone: float) -> None:
    module.layers += 1
    module.pinned += pinned
    if alone > module.worst:
        module.worst, module.worst_layer = alone, layer


def _place(module: _Module, start: int) -> None:
    module.start = start
    for child in module.children.values():
        _place(child, start)
        start += child.layers


def _boxes(module: _Module) -> Sequence[_Module]:
    return [module, *(box for child in module.children.values() for box in _boxes(child))]


def _words(box: _Module) -> str:
    name = label(box.path[-1]) if box.path else "the model"
    return f"{name}<br>{box.pinned} of {box.layers}" if box.pinned else name


def _facts(box: _Module) -> str:
    name = label(".".join(box.path)) if box.path else "the model"
    lines = [f"<b>{name}</b>", f"{counted(box.layers, 'layer')}, {box.pinned} pinned"]
    if box.worst_layer:
        lines.append(f"worst alone: {label(box.worst_layer)}, {brief(box.worst)}")
    return "<br>".join(lines)
