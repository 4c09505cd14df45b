"""Outputs that the requirements do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.finding import Finding
from bisect_trt.core.names import some_of
from bisect_trt.graph.model.decided import decided_outputs
from bisect_trt.graph.model.graph import Graph
from bisect_trt.numerics.requirements.decisions import is_decision
from bisect_trt.numerics.requirements.requirements import Requirements

_NAMED = 3


def odd_outputs(
    graph: Graph, requirements: Requirements, layers: Sequence[str]
) -> tuple[Finding, ...]:
    """That no requirement looks at some outputs, and that an error's bound is asked of classes or
    indices beside everything else. A metric of the user's may look at any.

    Args:
        graph: the model.
        requirements: of the run.
        layers: ids of those that may run reduced.
    """
    items = requirements.items
    if any(item.own for item in items):
        return ()
    found = []
    asked = {str(item.output) for item in items if item.output is not None}
    everywhere = [item for item in items if item.output is None]
    unasked = sorted(set(graph.outputs) - asked) if not everywhere else []
    if unasked:
        message = (
            f"no requirement looks at {some_of([repr(name) for name in unasked], _NAMED)}: but for "
            "infinities nothing there decides; outputs.csv has the errors"
        )
        found.append(Finding("unasked", unasked[0], message))
    bounds = [i.text for i in everywhere if not (is_decision(i.metric) or i.by_scale)]
    decided = sorted(decided_outputs(graph, layers)) if bounds else []
    if decided:
        message = (
            f"output {some_of([repr(name) for name in decided], _NAMED)} holds integers or truth "
            f"values, of which one other counts as an error of {bounds[0]}: ask for the share that "
            f"stays, --requirement '{decided[0]}:equal>=0.999', and name the outputs of the others"
        )
        found.append(Finding("decided", decided[0], message))
    return tuple(found)
