"""Polygraphy's inputs in JSON: a list of feed dictionaries, as ``--save-inputs`` writes it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError, one_line

_DEEPEST = 16
"""Of JSON that is read; what polygraphy saves is of three."""


def feeds_of(path: Path) -> Iterator[dict[str, NDArray[Any]]]:
    """The arrays of each dictionary of the file, one at a time; each array is an .npy file in base
    64 under "array".

    Raises:
        BadInputError: names the file, or the input that is none.
    """
    for number, feed in enumerate(_feeds(path)):
        yield {name: _decoded(f"{path}[{number}]", name, a) for name, a in feed.items()}


def _feeds(path: Path) -> Iterator[dict[str, Any]]:
    """The dictionaries of a JSON list, one at a time: hundreds of pages are a gigabyte of text."""
    import ijson  # type: ignore[import-untyped]  # nobody else needs it

    wrong = BadInputError(f"{path}: not a list of feed dictionaries, as polygraphy saves them")
    depth, feed = 0, ijson.ObjectBuilder()
    try:
        with path.open("rb") as stream:
            for event, value in ijson.basic_parse(stream):
                begins, ends = event.startswith("start"), event.startswith("end")
                is_list = depth == 0 and event == "start_array"
                is_feed = depth == 1 and event in ("start_map", "end_array")
                if not (is_list or is_feed or depth > 1) or depth > _DEEPEST:
                    raise wrong
                depth += begins
                if depth > 1:
                    feed.event(event, value)
                depth -= ends
                if depth == 1 and event == "end_map":
                    yield feed.value
                    feed = ijson.ObjectBuilder()
    except (OSError, ValueError, ijson.JSONError) as error:
        raise BadInputError(f"{path}: not readable JSON ({one_line(error)})") from error


def _decoded(where: str, name: str, value: Any) -> NDArray[Any]:
    try:
        data = base64.b64decode(value["array"], validate=True)
        stream = io.BytesIO(data)
        found: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    except Exception as error:  # NumPy's parser of headers raises what Python's would
        raise BadInputError(
            f"{where}: input {name!r} is no array as polygraphy saves it ({one_line(error)})"
        ) from error
    return found
