"""The golden outputs as they are given, checked against what the model says of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bisect_trt.core.errors import BadInputError
from bisect_trt.graph.model.graph import Graph
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.case.array_files import opened_npz, read_npz


def load_golden(settings: Settings, graph: Graph, inputs: int) -> Arrays | None:
    """The golden outputs by name; they belong to one input. What is wrong with a file is told by
    its headers, before an array is read.

    Args:
        settings: name them; None where there are none.
        graph: the model.
        inputs: how many were given.

    Raises:
        BadInputError: names what is not the model's, or no numbers.
    """
    golden = settings.golden
    if golden is None:
        return None
    if inputs > 1:
        raise BadInputError(
            f"--golden belongs to one input, and {inputs} were given; pass one --input"
        )
    where = "--golden" if isinstance(golden, Mapping) else f"--golden {golden}"

    def check(name: str, dtype: np.dtype[Any], _: tuple[int, ...]) -> None:
        if dtype.kind not in "biuf":
            raise BadInputError(f"{where}: output {name!r} holds {dtype}, no plain numbers")

    if isinstance(golden, Mapping):
        found = {name: np.asarray(array) for name, array in golden.items()}
        _check_names(where, found, graph)
        for name, array in found.items():
            check(name, array.dtype, array.shape)
        return found
    if not Path(golden).is_file():
        raise BadInputError(f"{where}: no such file")
    with opened_npz(Path(golden)) as (_, entries):
        _check_names(where, entries, graph)
    return read_npz(Path(golden), check)


def _check_names(where: str, names: Mapping[str, object], graph: Graph) -> None:
    unknown = [n for n in names if n not in graph.outputs]
    if unknown or not names:
        named = repr(unknown[0]) if unknown else "nothing"
        raise BadInputError(
            f"{where}: holds {named}, which is no output of the model; it has "
            f"{', '.join(graph.outputs)}"
        )
