"""Where errors come from: a layer that goes wrong although what it reads is right.

What is wrong behind a source is wrong because of it. coremltools' comparator marks sources so; the
threshold is one for all models: a layer is wrong where it is not finite, or where its error is more
than a tenth of its values (root mean squares).
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.tensors.tensor_types import captured_names

WRONG_BELOW_DB = 20.0


def is_measured(table: pd.DataFrame) -> pd.Series[bool]:
    """Whether the errors of each row of a layer table are known."""
    # A layer of which nothing is finite has no error either, but a count of what is not.
    counted = table["nonfinite"].notna() if "nonfinite" in table else False
    return table["max_abs"].notna() | counted


def is_wrong(table: pd.DataFrame) -> pd.Series[bool]:
    """Whether each row of a layer table is wrong with everything lowered; a layer whose errors are
    not known is not.
    """
    broken = ~table["finite"].astype(bool) & is_measured(table)
    return broken | (table["snr_db"] < WRONG_BELOW_DB)


def failure_sources(graph: Graph, wrong: Mapping[str, bool]) -> frozenset[str]:
    """The wrong layers all of whose inputs are right.

    Args:
        graph: the model.
        wrong: by layer id, whether it is. A node that is no layer passes on what it reads.
    """
    spoilt: set[str] = set()
    sources = []
    for node, name in zip(graph.proto.graph.node, graph.names, strict=True):
        reads_wrong = not spoilt.isdisjoint((*node.input, *captured_names(node)))
        if wrong.get(name, reads_wrong):
            spoilt.update(node.output)
            if not reads_wrong:
                sources.append(name)
    return frozenset(sources)
