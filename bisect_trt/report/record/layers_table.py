"""The layers' table as the files have it: errors, ranges, places in the user's code."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.graph.model.origins import Origin, list_origins
from bisect_trt.report.record.failure_sources import failure_sources, is_wrong
from bisect_trt.stations.answer.known import Known


def layers_table(known: Known, plan: PrecisionPlan) -> pd.DataFrame:
    """A row a layer, or a row each of those that ``--mark`` asks for, as far as the run came;
    ``source`` marks layers that are wrong although what they read is right (see
    ``failure_sources``).
    """
    table = with_origins(_all_layers(known, plan), list_origins(known.case.graph))
    marked = known.case.marked
    return table if marked is None else table[table["layer"].isin(marked)].reset_index(drop=True)


def _all_layers(known: Known, plan: PrecisionPlan) -> pd.DataFrame:
    if known.baselines is None:
        rows = [{"layer": x.name, "op": x.op, "scope": x.scope} for x in known.case.layers]
        return pd.DataFrame([{**row, "pinned": False} for row in rows])
    table = known.baselines.layers.copy()
    table["pinned"] = table["layer"].isin(plan.pinned)
    if known.triage is not None:
        table["alone_score"] = table["layer"].map(dict(known.triage.sensitivity.scores))
        places = {name: place for place, name in enumerate(known.triage.ranking, start=1)}
        table["rank"] = table["layer"].map(places)
    if known.engine is not None and known.engine.table is not None:
        table = known.engine.table.joined(table)
    wrong = dict(zip(table["layer"], is_wrong(table), strict=True))
    table["source"] = table["layer"].isin(failure_sources(known.case.graph, wrong))
    return table


def with_origins(table: pd.DataFrame, origins: Mapping[str, Origin]) -> pd.DataFrame:
    """A layer table with what each layer's exporter said of where it comes from (``module``,
    ``module_class``, ``file``, ``line``, ``code``), blank where it said nothing.
    """
    found = [origins.get(str(name), Origin()) for name in table["layer"]]
    lines = pd.Series([o.line or None for o in found], index=table.index, dtype="Int64")
    return table.assign(
        module=[o.module for o in found],
        module_class=[o.module_class for o in found],
        file=[o.file for o in found],
        line=lines,
        code=[o.code for o in found],
    )
