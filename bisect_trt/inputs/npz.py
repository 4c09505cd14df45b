"""Reads and writes .npy and .npz files; refuses what does not fit into memory unread."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError, BisectError, MachineError, one_line
from bisect_trt.base.limits import free_bytes, in_words

_ENDING = ".npy"


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name.

    Raises:
        BadInputError: names the file.
        MachineError: an array is larger than the memory that is free.
    """
    _refuse_other_files(path)
    with _named_in_errors(path, ".npz"), zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        return {e.filename.removesuffix(_ENDING): _member(path, archive, e) for e in entries}


def _refuse_other_files(path: Path) -> None:
    if zipfile.is_zipfile(path):
        return
    try:
        with path.open("rb") as stream:
            single = stream.read(6) == b"\x93NUMPY"
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
    if single:
        raise BadInputError(
            f"{path}: a single array; save named arrays with numpy.savez(path, name=array)"
        )
    if path.suffix == ".py":
        raise BadInputError(f"{path}: a Python file; name its function too: {path}:FUNCTION")
    raise BadInputError(f"{path}: not a readable .npz file (it is none, or holds Python objects)")


def _member(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    name = entry.filename.removesuffix(_ENDING)
    try:
        with archive.open(entry) as stream:
            _check_header(stream, entry.file_size)
        refuse_too_large(f"{path}: array {name!r}", entry.file_size)
        with archive.open(entry) as stream:
            array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
            return array
    except (BisectError, MemoryError):
        raise
    except Exception as error:  # wrong checksums, passwords, unknown compression, short data
        raise BadInputError(f"{path}: array {name!r} cannot be read ({one_line(error)})") from error


def read_npy(path: Path, name: str, *, mapped: bool = False) -> NDArray[Any]:
    """The array of an .npy file; if ``mapped``, its data are read on use.

    Raises:
        BadInputError: names the file.
        MachineError: the array is larger than the memory that is free.
    """
    if zipfile.is_zipfile(path):
        raise BadInputError(f"{path}: not a single array; call it .npz")
    with _named_in_errors(path, ".npy"):
        with path.open("rb") as stream:
            size = path.stat().st_size
            _check_header(stream, size)
        if not mapped:
            refuse_too_large(f"{path}: array {name!r}", size)
        array: NDArray[Any] = np.load(path, "r" if mapped else None, allow_pickle=False)
        return array


@contextmanager
def _named_in_errors(path: Path, kind: str) -> Iterator[None]:
    """Turns errors into one sentence about the file."""
    try:
        yield
    except BisectError:
        raise
    except MemoryError as error:
        raise MachineError(f"{path}: does not fit into memory") from error
    except Exception as error:  # zipfile and NumPy's parser raise anything on damaged bytes
        raise BadInputError(f"{path}: not a readable {kind} file ({one_line(error)})") from error


def refuse_too_large(what: str, size: int) -> None:
    """Refuse ``size`` bytes that do not fit into memory.

    Raises:
        MachineError: fewer bytes are free.
    """
    free = free_bytes()
    if free is not None and size > free:
        raise MachineError(
            f"{what} takes {in_words(size)}, and {in_words(free)} of memory are free"
        )


def _check_header(stream: IO[bytes], size: int) -> None:
    """Refuse an array of objects, or of another number of bytes than its header says."""
    version = np.lib.format.read_magic(stream)
    read, width = np.lib.format.read_array_header_1_0, 2
    if version != (1, 0):
        read, width = np.lib.format.read_array_header_2_0, 4
    length = stream.read(width)
    # NumPy has the same limit, but reads the whole header first.
    if int.from_bytes(length, "little") > 10_000:
        raise ValueError("its header is too long for one of NumPy's")
    text = io.BytesIO(length + stream.read(int.from_bytes(length, "little")))
    shape, _, dtype = read(text)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, save plain numbers")
    declared = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or stream.tell() + declared != size:
        raise ValueError(
            f"its header promises {declared} bytes, the file holds {size - stream.tell()}"
        )


def write_npz(
    path: Path, arrays: Mapping[str, NDArray[Any]], compression: int = zipfile.ZIP_DEFLATED
) -> None:
    """Write ``arrays`` as NumPy's ``savez`` does, under any names.

    Raises:
        OSError: the file cannot be written.
    """
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}{_ENDING}", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)
