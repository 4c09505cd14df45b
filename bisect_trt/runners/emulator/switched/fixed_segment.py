"""A segment as it is for inputs of certain shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from bisect_trt.graph.passes.segments.known_shapes import what_shapes_tell, with_constants
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.runners.ort.sessions import run_all, session_as_written

_WHERE = "what shapes tell"


def fixed_segment(
    segment: Segment, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, NDArray[Any]]
) -> tuple[Segment, Arrays]:
    """``segment`` with what follows from ``shapes`` and ``values`` as constants, and those it would
    give. The CPU computes them as it would a shape's path of any device's session.

    Args:
        segment: any.
        shapes: of what it takes.
        values: of what it takes, as far as they are to be constants.

    Returns:
        ``segment`` itself and nothing where nothing follows.

    Raises:
        RunnerFailedError: with ONNX Runtime's words.
    """
    known: dict[str, NDArray[Any]] = dict(values)
    fixed = with_constants(segment, known) if known else segment
    while (model := what_shapes_tell(fixed, shapes, known)) is not None:
        session = session_as_written(model, _WHERE, 1)
        known |= run_all(session, {}, _WHERE)
        fixed = with_constants(fixed, known)
    return fixed, {name: known[name] for name in segment.gives if name in known}
