"""A segment as it is for inputs of certain shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bisect_trt.graph.passes.segments.known_shapes import giving, told_by_shapes, with_constants
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.numerics.arrays import Arrays


def fixed_segment(
    segment: Segment,
    shapes: Mapping[str, tuple[int, ...]],
    values: Arrays,
    run: Callable[[Segment], Arrays],
) -> tuple[Segment, Arrays]:
    """``segment`` with what follows from ``shapes`` and ``values`` as constants, and those it would
    give.

    Args:
        segment: any.
        shapes: of what it takes.
        values: of what it takes, as far as they are to be constants.
        run: what a part of it gives for inputs of these shapes, whatever its switches.

    Returns:
        ``segment`` itself and nothing where there are no values and nothing follows.

    Raises:
        Exception: that of ``run``.
    """
    known = dict(values)
    fixed = with_constants(segment, known) if known else segment
    while names := told_by_shapes(fixed, shapes, known):
        known |= run(giving(fixed, names))
        fixed = with_constants(fixed, known)
    return fixed, {name: known[name] for name in segment.gives if name in known}
