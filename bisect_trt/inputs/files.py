"""The sources of inputs: files, folders, Python functions; and the golden outputs."""

from __future__ import annotations

import base64
import glob
import io
import json
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
from bisect_trt.base.sample import LazyArrays, RecentArrays
from bisect_trt.base.user_code import load_object, users_code
from bisect_trt.inputs.images import ImageOptions, is_image, read_image, recipe_for
from bisect_trt.inputs.npz import read_npy, read_npz, refuse_too_large, write_npz
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import InputSpec
from bisect_trt.settings import Settings

Function = Callable[[], Any]
ENDINGS = (".npz", ".npy", ".json")
_END = object()
"""What ``next`` gives at the end, as the user's generator may yield None."""

# A name with a colon that exists is a file, whatever it looks like.
_LOADER = re.compile(r"^[^*?\[\]]+:[A-Za-z_]\w*$")


def _feeds_of(path: Path) -> Iterator[dict[str, NDArray[Any]]]:
    """The feed dictionaries of polygraphy's JSON; each array is an .npy file in base 64."""
    try:
        refuse_too_large(f"{path}:", 2 * path.stat().st_size)
        feeds = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: not readable JSON ({one_line(error)})") from error
    if not isinstance(feeds, list) or not all(isinstance(feed, dict) for feed in feeds):
        raise BadInputError(f"{path}: not a list of feed dictionaries, as polygraphy saves them")
    for number, feed in enumerate(feeds):
        yield {name: _decoded(f"{path}[{number}]", name, a) for name, a in feed.items()}


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


def read_sources(
    source: str | Path | Function | Iterator[Any],
    specs: Sequence[InputSpec],
    *,
    stacked: bool,
    recent: RecentArrays,
    images: ImageOptions,
    option: str = "--input",
) -> Iterator[tuple[str, Arrays]]:
    """The names and arrays of the samples of ``source``, one after the other.

    Raises:
        BadInputError: names what cannot be found or read.
    """
    if not isinstance(source, (str, Path)):
        yield from _spooled(shown(source), _yielded(shown(source), source, option), recent)
    elif is_loader(source):
        found = load_object(str(source), option)
        if not (callable(found) or hasattr(found, "__iter__") or hasattr(found, "__getitem__")):
            raise BadInputError(
                f"{option} {str(source)!r}: neither a function nor what gives samples one by one"
            )
        yield from _spooled(str(source), _yielded(str(source), found, option), recent)
    else:
        for path in find_files([source]):
            if path.suffix == ".json":
                yield from _spooled(str(path), _feeds_of(path), recent)
            elif is_image(path):
                read = partial(read_image, path, recipe_for(path, specs, images))
                yield str(path), LazyArrays(unchanged(path, read), recent)
            elif stacked:
                yield from _from_stacked(path, specs, recent)
            else:
                yield str(path), LazyArrays(unchanged(path, partial(_read, path, specs)), recent)


def shown(source: object) -> str:
    """The name of ``source`` in messages."""
    if isinstance(source, (str, Path)):
        return str(source)
    return str(getattr(source, "__qualname__", type(source).__name__))


def is_loader(source: str | Path) -> bool:
    """Whether ``source`` has the form ``module:function``."""
    return _LOADER.match(str(source)) is not None and not Path(source).exists()


def find_files(sources: Sequence[str | Path]) -> list[Path]:
    """The files of paths, folders and globs, in order and without duplicates.

    Raises:
        BadInputError: names what is not there.
    """
    found: dict[Path, None] = {}
    for source in sources:
        if not str(source):
            raise BadInputError("--input '': an empty name; give a file, a folder or a glob")
        path = Path(source)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if _is_input(p) and not p.is_dir())
            # Beside arrays, images more likely show them, and a .json more likely holds labels.
            arrays = [p for p in inside if p.suffix in (".npz", ".npy")]
            matches = arrays or [p for p in inside if is_image(p)] or inside
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(Path(p) for p in glob.glob(str(source)))
        if not matches:
            kind = "holds no .npz, .npy, .json or image file" if path.is_dir() else "no such file"
            raise BadInputError(
                f"{source}: {kind}; give an .npz, .npy, .json or image file, a folder of them, a "
                "glob, or MODULE:FUNCTION"
            )
        for match in matches:
            if match.suffix == ".onnx":
                raise BadInputError(
                    f"{match}: a model, not an input; give an .npz, .npy, .json or image file"
                )
            if match.is_dir() or not match.exists():
                kind = "a folder" if match.is_dir() else "a link to a file that is not there"
                raise BadInputError(f"{match}: {kind}; give an .npz, .npy, .json or image file")
        found.update(dict.fromkeys(matches))
    return list(found)


def _is_input(path: Path) -> bool:
    """Whether a file in a folder of inputs is one of them."""
    return path.suffix in ENDINGS or is_image(path)


def _read(path: Path, specs: Sequence[InputSpec]) -> dict[str, NDArray[Any]]:
    if path.suffix != ".npy":
        return _named(read_npz(path), specs)
    name = _only(path, specs).name
    return {name: read_npy(path, name)}


def _named(arrays: dict[str, NDArray[Any]], specs: Sequence[InputSpec]) -> dict[str, NDArray[Any]]:
    """``arrays``; one that was saved without a name gets that of the only input."""
    if len(specs) == 1 and set(arrays) == {"arr_0"}:
        return {specs[0].name: arrays["arr_0"]}
    return arrays


def _only(path: Path, specs: Sequence[InputSpec]) -> InputSpec:
    """The model's only input, which an .npy file is for."""
    if len(specs) != 1:
        names = ", ".join(s.name for s in specs)
        raise BadInputError(
            f"{path}: one array, and the model takes {names}; save named arrays with "
            "numpy.savez(path, name=array)"
        )
    return specs[0]


def _from_stacked(
    path: Path, specs: Sequence[InputSpec], recent: RecentArrays
) -> Iterator[tuple[str, Arrays]]:
    """The samples of a file whose arrays hold many along their first axis."""
    if path.suffix == ".npy":
        name = _only(path, specs).name
        count = _stacked(path, {name: read_npy(path, name, mapped=True)})
        for number in range(count):
            row = partial(_row, path, specs, name, number)
            yield f"{path}[{number}]", LazyArrays(unchanged(path, row), recent)
        return
    arrays = _named(read_npz(path), specs)
    rows = (
        {n: _alone(a[number], specs, n) for n, a in arrays.items()}
        for number in range(_stacked(path, arrays))
    )
    yield from _spooled(str(path), rows, recent)


def _stacked(path: Path, arrays: Arrays) -> int:
    """The number of samples along the first axes."""
    counts = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
    if len(counts) != 1 or counts == {0}:
        raise BadInputError(
            f"{path}: --stacked: the arrays have no first axis of one length; it is the one of the "
            "samples"
        )
    return counts.pop()


def _row(path: Path, specs: Sequence[InputSpec], name: str, number: int) -> Arrays:
    array = np.array(read_npy(path, name, mapped=True)[number])
    return {name: _alone(array, specs, name)}


def _alone(array: NDArray[Any], specs: Sequence[InputSpec], name: str) -> NDArray[Any]:
    """One sample of a stack; as a batch of one where the model's batch was the stack's axis."""
    shapes = [s.shape for s in specs if s.name == name]
    along_batch = bool(shapes) and shapes[0] is not None and array.ndim + 1 == len(shapes[0])
    return np.asarray(array[np.newaxis] if along_batch else array)


def _spooled(
    text: str, samples: Iterable[dict[str, NDArray[Any]]], recent: RecentArrays
) -> Iterator[tuple[str, Arrays]]:
    """``samples``, each written to a scratch folder as it comes."""
    # All of them need not fit into memory.
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
        yield where, LazyArrays(partial(_read_spooled, spool, path), recent)


def _yielded(
    text: str, source: Function | Iterable[Any], option: str
) -> Iterator[dict[str, NDArray[Any]]]:
    """The feeds of the user's ``source``, checked to be mappings."""
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
    # The argument ``spool`` keeps the folder on disk for as long as a sample needs it.
    return read_npz(path)


def load_golden(settings: Settings, graph: Graph, inputs: int) -> Arrays | None:
    """The golden outputs by name; None if there are none.

    Raises:
        BadInputError: they do not fit the model, or there are several inputs.
    """
    golden = settings.golden
    if golden is None:
        return None
    if inputs > 1:
        raise BadInputError(
            f"--golden belongs to one input, and {inputs} were given; pass one --input"
        )
    where = "--golden" if isinstance(golden, Mapping) else f"--golden {golden}"
    if isinstance(golden, Mapping):
        found = {name: np.asarray(array) for name, array in golden.items()}
    elif Path(golden).is_file():
        found = read_npz(Path(golden))
    else:
        raise BadInputError(f"{where}: no such file")
    unknown = [n for n in found if n not in graph.outputs]
    if unknown or not found:
        named = repr(unknown[0]) if unknown else "nothing"
        raise BadInputError(
            f"{where}: holds {named}, which is no output of the model; it has "
            f"{', '.join(graph.outputs)}"
        )
    for name, array in found.items():
        if array.dtype.kind not in "biuf":
            raise BadInputError(f"{where}: output {name!r} holds {array.dtype}, no plain numbers")
    return found
