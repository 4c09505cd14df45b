"""What the given inputs do not cover, as far as it can be seen: sizes of dynamic axes that were
never given, and ids from a corner of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bisect_trt.core.finding import Finding
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.inputs import InputSpec, dynamic_axes

NOT_COVERED, ALIKE = "not-covered", "alike"
"""Kinds of findings that the first lines say; the second keeps few inputs from being enough."""

_LARGE_TABLE, _CORNER = 1000, 0.1
"""Rows of an embedding from which on ids that span less than this share of them are a sign."""


def untested_sizes(specs: Sequence[InputSpec], samples: Sequence[Sample]) -> list[Finding]:
    """A finding for each input with dynamic axes: the sizes that these had.

    Args:
        specs: what the model takes.
        samples: all inputs that are given, those kept apart too.
    """
    by_input, told = dict[str, list[str]](), set[str]()
    for spec, axis, name in dynamic_axes(specs):
        sizes = [s.shapes[spec.name][axis] for s in samples]
        if not sizes or name in told:
            continue
        told.update([name] if not name.isdigit() else [])
        low, high = min(sizes), max(sizes)
        span = f"at {low} only" if low == high else f"from {low} to {high} only"
        spans = by_input.setdefault(spec.name, [])
        spans.append(f"axis {name} {span}" if spans else f"axis {name} was tested {span}")
    return [
        Finding(
            NOT_COVERED,
            name,
            f"{', '.join(spans)} (input {name!r}): give other sizes it will meet",
        )
        for name, spans in by_input.items()
    ]


def few_ids(graph: Graph, samples: Sequence[Sample]) -> list[Finding]:
    """A finding for each input of ids that all lie in a corner of the table they are looked up in:
    one language of several, say.
    """
    found = []
    for lookup in graph.lookups:
        node = graph.proto.graph.node[lookup.index]
        if not lookup.table or node.input[1] not in samples[0].arrays:
            continue
        name, rows = node.input[1], graph.float_constants[lookup.table].shape[0]
        ids = [np.asarray(s.arrays[name]) for s in samples]
        used = np.unique(np.concatenate([a.ravel() for a in ids]))
        low, high = int(used.min()), int(used.max())
        if rows >= _LARGE_TABLE and high - low < _CORNER * rows:
            message = (
                f"all {len(samples)} inputs have ids from {low} to {high} of {rows:,} in {name!r}: "
                "inputs of other languages or kinds are not covered"
            )
            found.append(Finding(ALIKE, name, message))
    return found
