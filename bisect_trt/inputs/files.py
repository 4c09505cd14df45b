"""Input files: .npz, .npy, JSON, Python, golden outputs."""

from __future__ import annotations

import base64
import glob
import io
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.atomic_files import scratch, unchanged
from bisect_trt.base.errors import BadInputError, MachineError, one_line
from bisect_trt.base.sample import LazyArrays
from bisect_trt.base.user_code import load_object, users_code
from bisect_trt.inputs.arrays import (
    check_stack,
    opened_npz,
    read_npy,
    read_npz,
    row_of_npy,
    rows_of_npz,
    shape_of_npy,
    write_npz,
)
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import InputSpec, check_array, check_names
from bisect_trt.settings import Settings

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


Function = Callable[[], Any]
ENDINGS = (".npz", ".npy", ".json")
_END = object()
_LOADER = re.compile(r"^[^*?\[\]]+:[A-Za-z_]\w*$")


def read_sources(
    source: str | Path | Function | Iterator[Any],
    specs: Sequence[InputSpec],
    *,
    stacked: bool,
    option: str = "--input",
) -> Iterator[tuple[str, Arrays]]:
    """The samples that ``source`` names, one after the other.

    Raises:
        BadInputError: names what cannot be found or read.
    """
    if not isinstance(source, (str, Path)):
        yield from _from_loader(shown(source), source, option)
        return
    if is_loader(source):
        found = load_object(str(source), option)
        if not (callable(found) or hasattr(found, "__iter__") or hasattr(found, "__getitem__")):
            raise BadInputError(
                f"{option} {str(source)!r}: neither a function nor what gives samples one by one"
            )
        yield from _from_loader(str(source), found, option)
        return
    for path in find_files([source]):
        if path.suffix == ".json":
            yield from _spooled(str(path), feeds_of(path))
            continue
        if not stacked:
            yield str(path), LazyArrays(unchanged(path, partial(_read, path, specs)))
            continue
        yield from _from_stacked(path, specs)


def shown(source: object) -> str:
    """``source`` as a message names it."""
    if isinstance(source, (str, Path)):
        return str(source)
    return str(getattr(source, "__qualname__", type(source).__name__))


def is_loader(source: str | Path) -> bool:
    """Whether ``source`` names a function that gives the samples."""
    return _LOADER.match(str(source)) is not None and not Path(source).exists()


def find_files(sources: Sequence[str | Path]) -> list[Path]:
    """The files that paths, folders and globs name, in order, each once.

    Raises:
        BadInputError: names what is not there.
    """
    found: dict[Path, None] = {}
    for source in sources:
        if not str(source):
            raise BadInputError("--input '': an empty name; give a file, a folder or a glob")
        path = Path(source)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix in ENDINGS and not p.is_dir())
            # Beside arrays a .json is more likely labels than inputs.
            matches = [p for p in inside if p.suffix != ".json"] or inside
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(Path(p) for p in glob.glob(str(source)))
        if not matches:
            kind = "holds no .npz, .npy or .json file" if path.is_dir() else "no such file"
            raise BadInputError(
                f"{source}: {kind}; give an .npz, .npy or .json file, a folder of them, a glob, or "
                "MODULE:FUNCTION"
            )
        for match in matches:
            if match.is_dir() or not match.exists():
                kind = "a folder" if match.is_dir() else "a link to a file that is not there"
                raise BadInputError(f"{match}: {kind}; give an .npz, .npy or .json file")
        found.update(dict.fromkeys(matches))
    return list(found)


def _read(path: Path, specs: Sequence[InputSpec]) -> dict[str, NDArray[Any]]:
    check = partial(_check_header, path, specs, {})
    if path.suffix != ".npy":
        with opened_npz(path) as (_, entries):
            check_names(str(path), list(entries), specs)
        return read_npz(path, check)
    name = _only(path, specs).name
    return {name: read_npy(path, name, check)}


def _only(path: Path, specs: Sequence[InputSpec]) -> InputSpec:
    """The one input that the array of an .npy file can be."""
    if len(specs) != 1:
        names = ", ".join(s.name for s in specs)
        raise BadInputError(
            f"{path}: one array, and the model takes {names}; save named arrays with "
            "numpy.savez(path, name=array)"
        )
    return specs[0]


def _check_header(
    path: Path,
    specs: Sequence[InputSpec],
    symbols: dict[str, int],
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
) -> None:
    """Refuse what the model does not take before it is read."""
    for spec in specs:
        if spec.name == name:
            check_array(str(path), spec, dtype, shape, symbols)


def _from_stacked(path: Path, specs: Sequence[InputSpec]) -> Iterator[tuple[str, Arrays]]:
    """The samples of a file whose arrays hold many: from the file itself where each can be found in
    it, else put on disk one by one.
    """
    if path.suffix != ".npy":
        rows = ({n: _alone(a, specs, n) for n, a in row.items()} for row in rows_of_npz(path))
        yield from _spooled(str(path), rows)
        return
    name = _only(path, specs).name
    shape = shape_of_npy(path, name, whole=False)
    check_stack(path, shape[:1] or (0,))
    for number in range(shape[0]):
        row = partial(_row, path, specs, name, number)
        yield f"{path}[{number}]", LazyArrays(unchanged(path, row))


def _row(path: Path, specs: Sequence[InputSpec], name: str, number: int) -> Arrays:
    return {name: _alone(row_of_npy(path, number), specs, name)}


def _alone(array: NDArray[Any], specs: Sequence[InputSpec], name: str) -> NDArray[Any]:
    """One sample as the model takes it: without the stacked axis, or as a batch of one where the
    model's own first axis is the one that was stacked along.
    """
    shapes = [s.shape for s in specs if s.name == name]
    along_batch = bool(shapes) and shapes[0] is not None and array.ndim + 1 == len(shapes[0])
    return np.asarray(array[np.newaxis] if along_batch else array)


def _from_loader(
    text: str, source: Function | Iterable[Any], option: str
) -> Iterator[tuple[str, Arrays]]:
    """What a function of the user's yields."""
    yield from _spooled(text, _yielded(text, source, option))


def _spooled(text: str, samples: Iterable[dict[str, NDArray[Any]]]) -> Iterator[tuple[str, Arrays]]:
    """``samples``, each put on disk as it comes: all together need not fit into memory."""
    spool = scratch("inputs")
    for number, arrays in enumerate(samples):
        where = f"{text}[{number}]"
        objects = [n for n, a in arrays.items() if a.dtype.hasobject]
        if objects:
            raise BadInputError(
                f"{where}: input {objects[0]!r} holds Python objects, yield plain numbers"
            )
        path = Path(spool.name) / f"{number}.npz"
        try:
            write_npz(path, arrays, zipfile.ZIP_STORED)
        except OSError as error:
            raise MachineError(f"{path}: cannot be written ({error.strerror})") from error
        yield where, LazyArrays(partial(_read_spooled, spool, path))


def _yielded(
    text: str, source: Function | Iterable[Any], option: str
) -> Iterator[dict[str, NDArray[Any]]]:
    """What ``source`` yields, each piece of its work done as the user's code."""
    what, number = f"{option} {text}", 0
    with users_code(what):
        given = source() if callable(source) else source
        if isinstance(given, Mapping):
            raise BadInputError(f"{what}: gives one mapping; yield {{'input': array}} for each")
        samples = iter(given)
    while True:
        with users_code(what):
            feed = next(samples, _END)
            if feed is _END:
                return
            if not isinstance(feed, Mapping):
                kind = type(feed).__name__
                raise BadInputError(
                    f"{text}[{number}]: not a mapping but {kind}; yield {{'input': array}}"
                )
            arrays = {str(n): np.asarray(a) for n, a in feed.items()}
        yield arrays
        number += 1


def _read_spooled(spool: tempfile.TemporaryDirectory[str], path: Path) -> dict[str, NDArray[Any]]:
    """``spool`` is held so that the folder stays as long as a sample of it."""
    return read_npz(path)


def load_golden(settings: Settings, graph: Graph, inputs: int) -> Arrays | None:
    """The golden outputs by name; they belong to one input. What is wrong with a file is told by
    its headers, before an array is read.

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
