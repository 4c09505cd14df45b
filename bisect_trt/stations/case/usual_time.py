"""About what an inference takes, counted from the model: what decides how much is tested must not
follow the clock, or the answer would change with the machine and its moods.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from bisect_trt.core.sample import Sample, evenly
from bisect_trt.graph.inspection.inference_work import inference_work
from bisect_trt.graph.model.graph import Graph
from bisect_trt.numerics.draws.noise import LARGE

_COUNTED = 4
"""Inputs may differ in size; so many of them stand for all."""

_A_VALUE, _A_PRODUCT, _A_NODE = 1e-9, 1e-11, 6e-6
"""Seconds on two cores: 26.7 ms of 33 for an OCR detector at 192 by 320, 4.5 of 3.5 for UniMatch,
0.47 of 0.47 for an encoder of 75 nodes. A power of two would do."""

_A_LARGE_INPUTS_VALUE = 4e-8
"""Seconds for each value of an input beyond :data:`LARGE`: in a draw a copy of it is made three
times, hashed and run, in memory that the system has to clear. Of an input of 128 MB and four nodes
80 copies of a kind were to be made, and eight minutes did not do for a run."""


def usual_seconds(graph: Graph, samples: Sequence[Sample]) -> float:
    """About what one emulated inference takes on two cores, the same on every machine.

    Args:
        graph: the model.
        samples: those it is run on.
    """
    chosen = [sample.shapes for sample in evenly(samples, _COUNTED)]
    # Mostly all are of one size: a graph of thousands of nodes takes a while to count.
    counts = Counter(tuple(sorted(shapes.items())) for shapes in chosen)
    seconds = sum(count * usual_seconds_on(graph, dict(shapes)) for shapes, count in counts.items())
    return seconds / max(1, len(chosen))


def usual_seconds_on(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """As :func:`usual_seconds`, on inputs of such shapes.

    Args:
        graph: the model.
        shapes: of its inputs.
    """
    work = inference_work(graph, shapes)
    beyond = sum(max(0, math.prod(shape) - LARGE) for shape in shapes.values())
    counted = _A_VALUE * work.values + _A_PRODUCT * work.products + _A_NODE * work.nodes
    return counted + _A_LARGE_INPUTS_VALUE * beyond
