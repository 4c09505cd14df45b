"""What the rows of the choices take in time: measured on engines, or estimated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bisect_trt.base.plan import Precision
from bisect_trt.model.cost import CostTable
from bisect_trt.report.choices import AS_IS, BF16, FP32, Choice

EQUAL = 0.03
"""A share of FP16's saving: rows that differ by less take the same time."""


def with_times(
    rows: Sequence[Choice],
    own: CostTable,
    others: Mapping[str, CostTable],
    measured: Mapping[str, float],
) -> list[Choice]:
    """``rows`` with their times and the shares of the saving that they keep.

    ``own`` is the table of the original graph, ``others`` those of other rows' graphs. ``measured``
    are latencies in ms by row; where one of those compared is missing, shares are estimated.
    """
    estimated = {row.name: _relative(row, own, others.get(row.name, own)) for row in rows}
    anchors = {row.name for row in rows} & {AS_IS, FP32}
    found = []
    for row in rows:
        is_measured = anchors | {row.name} <= measured.keys() and len(anchors) == 2
        times = measured if is_measured else estimated
        found.append(
            replace(
                row,
                latency_ms=measured.get(row.name),
                saving_kept=_saving_kept(row.name, times),
                is_estimated=not is_measured,
            )
        )
    return found


def _relative(row: Choice, own: CostTable, table: CostTable) -> float:
    """The estimated time of a row; everything reduced in the original graph takes 1."""
    if row.name == BF16:  # the same bytes, and tensor cores of the same rate
        return own.time(row.plan)
    if row.plan.base is Precision.FP32:
        return own.time(replace(row.plan, pinned=frozenset(row.pinned)))
    return table.time(row.plan) * table.reduced_s / own.reduced_s


def _saving_kept(name: str, times: Mapping[str, float]) -> float | None:
    """The share of the reduced precision's saving that a row keeps; None if it saves nothing."""
    if AS_IS not in times or FP32 not in times:
        return None
    whole = times[FP32] - times[AS_IS]
    # An engine's times differ by chance where nothing is saved.
    return (times[FP32] - times[name]) / whole if whole > 0.01 * times[FP32] else None


def is_slower(row: Choice, other: Choice) -> bool:
    """Whether ``row`` takes clearly more time than ``other``, by the shares that they keep."""
    if row.saving_kept is None or other.saving_kept is None:
        return False
    return row.saving_kept < other.saving_kept - EQUAL and not math.isnan(row.saving_kept)
