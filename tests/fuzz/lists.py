"""A plan as other tools' lists, and what ``import`` makes of them: the same plan, or a refusal."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.graph import Graph, to_typed
from bisect_trt.imports.read import import_list
from bisect_trt.model.block_lists import autocast_arguments, onnxruntime_arguments
from bisect_trt.model.weak_typing import polygraphy_script, trtexec_arguments

Written = str | bytes
"""A list as text, or a model."""

FORMS: dict[str, tuple[str, Callable[[Graph, PrecisionPlan], Written]]] = {
    "trtexec": ("list.sh", trtexec_arguments),
    "polygraphy": ("list.py", polygraphy_script),
    "autocast": ("autocast.json", autocast_arguments),
    "onnxruntime": ("onnxruntime.json", onnxruntime_arguments),
    "mixed": ("mixed.onnx", lambda graph, plan: to_typed(graph, plan).SerializeToString()),
}
"""The file and the writer of each form."""


@dataclass(frozen=True)
class Reading:
    """A plan in one form: ``outcome`` is same, refused or differs, ``detail`` says how."""

    form: str
    outcome: str
    detail: str = ""


def readings(graph: Graph, plan: PrecisionPlan) -> Iterator[Reading]:
    """``plan`` written in each form and read again, where it keeps some layers and not all."""
    layers = frozenset(layer.name for layer in graph.layers_at(plan.base))
    if not layers & plan.pinned or layers <= plan.pinned:
        return
    with tempfile.TemporaryDirectory() as folder:
        for form, (name, write) in FORMS.items():
            path = Path(folder) / name
            try:
                written = write(graph, plan)
            except BadInputError as error:
                yield Reading(form, "refused", str(error))
                continue
            content = written.encode() if isinstance(written, str) else written
            path.write_bytes(content)
            difference = _difference(path, graph, plan, layers)
            yield Reading(form, "differs" if difference else "same", difference)


def _difference(path: Path, graph: Graph, plan: PrecisionPlan, layers: frozenset[str]) -> str:
    """What of ``plan`` the file at ``path`` does not say of ``layers``; empty if nothing."""
    try:
        found = import_list(str(path), graph, "the model", parser=lambda: (None, ""))
    except BadInputError as error:
        return f"refused: {error}"
    # An entry that is refused is no fault by itself: AutoCast's names LayerNorms that it will make.
    wrong = []
    if found.plan.base is not plan.base:
        wrong.append(f"for {found.plan.base.value}")
    if lost := sorted(layers & plan.pinned - found.plan.pinned):
        wrong.append(f"without {lost[:3]}")
    if more := sorted(found.plan.pinned - plan.pinned):
        wrong.append(f"with {more[:3]}")
    return "; ".join(wrong)
