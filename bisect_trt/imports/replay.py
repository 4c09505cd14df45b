"""Reads the replay of polygraphy's ``debug precision``: how many layers were in FP32, and passed.

The file says which iterations passed. Which layers those were follows from polygraphy's rules, as
its version 0.49 has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.imports.entries import By, Entry, Form, Listing
from bisect_trt.model.trt_names import Network, NetworkLayer

_ITERATION = re.compile(r"_N(\d+)")
_FLOATS = frozenset(("FLOAT", "HALF", "INT8"))


def is_replay(data: Any) -> bool:
    """Whether a JSON document is a replay."""
    return isinstance(data, dict) and bool(data) and all(_ITERATION.fullmatch(str(k)) for k in data)


def is_iteration(data: Any) -> bool:
    """Whether a JSON document is the file of one iteration, which says only its number."""
    return isinstance(data, dict) and data.keys() == {"iteration"}


def read_replay(
    data: Mapping[str, Any], where: str, network: Network | None, form: Form
) -> Listing:
    """The layers that passed with the fewest in FP32, from the front or from the back.

    Raises:
        BadInputError: TensorRT's parser is needed, no iteration passed, or it is no such replay.
    """
    if network is None:
        raise BadInputError(
            f"{where}: a replay counts layers, which needs TensorRT's parser; install "
            "tensorrt-rtx-cu13"
        )
    passed = _results(data, where)
    number = len(network.layers)
    kept = _kept(passed, number)
    if kept is None:
        raise BadInputError(
            f"{where}: no iteration passed, or the replay is of another network than one of "
            f"{number} layers; give the list that was built from"
        )
    backwards = form is Form.REPLAY_REVERSE
    places = range(number - kept, number) if backwards else range(kept)
    layers = tuple(i for i in places if _is_marked(network.layers[i]))
    end, other = ("last", "front") if backwards else ("first", "back")
    text = f"the {end} {kept} of {number} layers"
    said = f"counted in the network of {network.version}; other versions number differently"
    option = Form.REPLAY if backwards else Form.REPLAY_REVERSE
    note = f"a replay does not say its direction; --form {option.value} counts from the {other}"
    entry = Entry(By.LAYERS, text, Precision.FP32, layers=layers, said=said)
    return Listing(Form.REPLAY, [entry], notes=(note,))


def _results(data: Mapping[str, Any], where: str) -> list[bool]:
    """Which iterations passed, in order."""
    try:
        found = {int(str(key).removeprefix("_N")): value[0] for key, value in data.items()}
        results = [found[index] for index in range(len(found))]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BadInputError(f"{where}: no replay of polygraphy debug precision") from error
    if not all(isinstance(one, bool) for one in results):
        raise BadInputError(f"{where}: no replay of polygraphy debug precision")
    return results


def _kept(passed: list[bool], number: int) -> int | None:
    """How many layers the last passing iteration had in FP32; None if none passed.

    A linear search begins at none and ends with the first that passes. A bisection begins at all.
    """
    if not passed[0]:
        return len(passed) - 1 if passed[-1] and not any(passed[:-1]) else None
    good, bad, marked = number + 1, 0, number
    kept: int | None = None
    for succeeded in passed:
        if succeeded:
            good = kept = marked
        else:
            bad = marked
        rounded = math.floor if succeeded else math.ceil
        before, marked = marked, int(rounded((good + bad) / 2.0))
        if before == marked or abs(good - bad) <= 1:
            break
    return kept


def _is_marked(layer: NetworkLayer) -> bool:
    """Whether polygraphy sets this layer: it leaves out weights, shapes and other types."""
    return layer.kind != "CONSTANT" and not layer.is_shape and _FLOATS.issuperset(layer.types)
