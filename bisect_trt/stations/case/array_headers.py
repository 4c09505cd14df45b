"""The headers of NumPy's files, read before their data: what does not fit is refused before it is
inflated.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from bisect_trt.core.errors import BadInputError, MachineError
from bisect_trt.core.machine.memory import free_bytes, in_words

CheckHeader = Callable[[str, "np.dtype[Any]", tuple[int, ...]], None]
_LONGEST = 10_000
"""Bytes of a header that NumPy takes by itself."""

ENDING = ".npy"
"""Of an array's file, and of an array inside an .npz file."""


class Header(NamedTuple):
    """Of an array's file: ``by_columns`` where the first axis is the one that runs fastest."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_columns: bool

    @property
    def declared(self) -> int:
        """The bytes that it promises."""
        return math.prod(self.shape) * self.dtype.itemsize


def examined(
    path: Path,
    name: str,
    stream: IO[bytes],
    size: int,
    check: CheckHeader | None,
    *,
    whole: bool = True,
) -> Header:
    """The header of an array that can be read: its ``size`` bytes are those that it declares, all
    fit into memory if ``whole``, and ``check`` wants it.

    Args:
        path: the file.
        name: what the array is called in messages.
        stream: at the header; it is left at the data.
        size: of header and data.
        check: raises for the name, dtype and shape of an array that is not wanted.
        whole: whether all of it shall fit into memory; what lies by columns is read whole.

    Raises:
        BadInputError: names the array.
        MachineError: the array is larger than the memory that is free.
    """
    header = _header(stream)
    dtype, shape, declared = header.dtype, header.shape, header.declared
    if dtype.hasobject:
        raise BadInputError(
            f"{path}: array {name!r} cannot be read (it holds Python objects, save plain numbers)"
        )
    if check is not None:
        check(name, dtype, shape)
    if min(shape, default=0) < 0 or stream.tell() + declared != size:
        raise BadInputError(
            f"{path}: array {name!r} cannot be read (its header promises {declared} bytes, the "
            f"file holds {size - stream.tell()})"
        )
    free = free_bytes() if whole or header.by_columns else None
    if free is not None and declared > free:
        raise MachineError(
            f"{path}: array {name!r} takes {in_words(declared)}, and {in_words(free)} of memory "
            "are free"
        )
    return header


def headers_of(path: Path, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's arrays, by name, without their data; nothing where it is no such file.

    Args:
        path: an .npz or .npy file.
        names: what the model takes; one alone is the name of an .npy file's array.
    """
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as stream:
                shape = _kept_promise(stream, path.stat().st_size)
                return {names[0]: shape} if len(names) == 1 else {}
        found = {}
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir():
                    with archive.open(entry) as inner:
                        name = entry.filename.removesuffix(ENDING)
                        found[name] = _kept_promise(inner, entry.file_size)
        return found
    except Exception:  # whatever is wrong is said when the data are read
        return {}


def bytes_inside(path: Path) -> int:
    """What the arrays of an .npz or .npy file take when they are read; a compressed one is larger
    inside, which its directory tells.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except Exception:  # no archive, or a damaged one
        return path.stat().st_size


def _kept_promise(stream: IO[bytes], size: int) -> tuple[int, ...]:
    """The shape that the header of ``size`` bytes declares.

    Raises:
        ValueError: the bytes are not those that it declares: nothing may be concluded from it.
    """
    header = _header(stream)
    if min(header.shape, default=0) < 0 or stream.tell() + header.declared != size:
        raise ValueError("the header promises other bytes")
    return header.shape


def _header(stream: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(stream)
    read, size = np.lib.format.read_array_header_1_0, 2
    if version != (1, 0):
        read, size = np.lib.format.read_array_header_2_0, 4
    length = stream.read(size)
    # NumPy reads it all before it says that it is too long.
    if int.from_bytes(length, "little") > _LONGEST:
        raise ValueError("its header is too long for one of NumPy's")
    text = io.BytesIO(length + stream.read(int.from_bytes(length, "little")))
    shape, by_columns, dtype = read(text)
    return Header(np.dtype(dtype), tuple(int(n) for n in shape), bool(by_columns))
