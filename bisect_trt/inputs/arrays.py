"""Arrays in .npy and .npz files, and their headers."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError, BisectError, MachineError, one_line
from bisect_trt.base.limits import free_bytes, in_words

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
    """The shapes of a file's arrays, by name, without their data; nothing where it is no such file."""
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


def read_npz(path: Path, check: CheckHeader | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file; pickled objects are refused.

    Raises:
        BadInputError: names the file.
        MachineError: an array is larger than the memory that is free.
    """
    with opened_npz(path) as (archive, entries):
        return {n: _member(path, archive, entry, n, check) for n, entry in entries.items()}


@contextmanager
def opened_npz(path: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """An .npz file and its arrays' entries by name; whatever is wrong with it while it is open is
    said of it.

    Raises:
        BadInputError: names the file.
        MachineError: something in it is larger than the memory that is free.
    """
    if not zipfile.is_zipfile(path):
        try:
            single = _is_npy(path)
        except OSError as error:
            raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
        if single:
            raise BadInputError(
                f"{path}: a single array; save named arrays with numpy.savez(path, name=array)"
            )
        if path.suffix == ".py":
            raise BadInputError(f"{path}: a Python file; name its function too: {path}:FUNCTION")
        raise BadInputError(
            f"{path}: not a readable .npz file (it is none, or holds Python objects)"
        )
    with said_of(path, ".npz"), zipfile.ZipFile(path) as archive:
        inside = [entry for entry in archive.infolist() if not entry.is_dir()]
        yield archive, {entry.filename.removesuffix(ENDING): entry for entry in inside}


@contextmanager
def said_of(path: Path, kind: str) -> Iterator[None]:
    """Errors as one sentence about the file.

    Raises:
        BadInputError: names the file.
        MachineError: something does not fit into memory.
    """
    try:
        yield
    except BisectError:
        raise
    except MemoryError as error:
        raise MachineError(f"{path}: does not fit into memory") from error
    except Exception as error:  # zipfile, and NumPy's parser, raise what damaged bytes lead to
        raise BadInputError(f"{path}: not a readable {kind} file ({one_line(error)})") from error


def read_npy(path: Path, name: str, check: CheckHeader | None = None) -> NDArray[Any]:
    """The array of an .npy file.

    Raises:
        BadInputError: names the file.
        MachineError: the array is larger than the memory that is free.
    """
    shape_of_npy(path, name, check)
    with said_of(path, ".npy"):
        found: NDArray[Any] = np.load(path, allow_pickle=False)
        return found


def shape_of_npy(
    path: Path, name: str, check: CheckHeader | None = None, *, whole: bool = True
) -> tuple[int, ...]:
    """The shape of an .npy file's array, which can be read.

    Raises:
        BadInputError: names the file.
        MachineError: the array is larger than the memory that is free.
    """
    if zipfile.is_zipfile(path):
        raise BadInputError(f"{path}: not a single array; call it .npz")
    with said_of(path, ".npy"), path.open("rb") as stream:
        size = path.stat().st_size
        return examined(path, name, stream, size, check, whole=whole).shape


def _member(
    path: Path,
    archive: zipfile.ZipFile,
    entry: zipfile.ZipInfo,
    name: str,
    check: CheckHeader | None,
) -> NDArray[Any]:
    with said_of_array(path, name):
        with archive.open(entry) as stream:
            examined(path, name, stream, entry.file_size, check)
        with archive.open(entry) as stream:
            found: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
            return found


@contextmanager
def said_of_array(path: Path, name: str) -> Iterator[None]:
    """Errors as one sentence about an array of a file.

    Raises:
        BadInputError: names both.
    """
    try:
        yield
    except (BisectError, MemoryError):
        raise
    except Exception as error:  # wrong checksums, passwords, unknown compression, short data
        raise BadInputError(f"{path}: array {name!r} cannot be read ({one_line(error)})") from error


def _is_npy(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(6) == b"\x93NUMPY"


def write_npz(
    path: Path, arrays: Mapping[str, NDArray[Any]], compression: int = zipfile.ZIP_DEFLATED
) -> None:
    """Write ``arrays`` as NumPy's ``savez`` would, whatever their names are.

    Raises:
        OSError: the file cannot be written.
    """
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)


def row_of_npy(path: Path, number: int) -> NDArray[Any]:
    """One entry along the first axis of an .npy file's array; no more of the file stays in memory.

    Raises:
        BadInputError: names the file.
    """
    with said_of(path, ".npy"):
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False)[number])


def rows_of_npz(path: Path) -> Iterator[dict[str, NDArray[Any]]]:
    """The entries along the first axis of an .npz file's arrays, one of each at a time.

    Raises:
        BadInputError: names the file; the axes are not of one length among others.
        MachineError: an array by columns is larger than the memory that is free.
    """
    with opened_npz(path) as (archive, entries), ExitStack() as opened:
        rows, counts = {}, set()
        for name, entry in entries.items():
            with said_of_array(path, name):
                stream = opened.enter_context(archive.open(entry))
                header = examined(path, name, stream, entry.file_size, None, whole=False)
                counts.add(header.shape[0] if header.shape else 0)
                rows[name] = _rows(path, name, stream, header)
        check_stack(path, counts)
        for _ in range(max(counts)):
            yield {name: next(of) for name, of in rows.items()}


def check_stack(path: Path, counts: Collection[int]) -> None:
    """Refuse arrays whose first axes are no stack of samples.

    Raises:
        BadInputError: they differ, or there is none.
    """
    if len(set(counts)) != 1 or set(counts) == {0}:
        raise BadInputError(
            f"{path}: --stacked: the arrays have no first axis of one length; it is the one of the "
            "samples"
        )


def _rows(path: Path, name: str, stream: IO[bytes], header: Header) -> Iterator[NDArray[Any]]:
    """The entries of the array whose data come next in ``stream``."""
    shape, size = header.shape[1:], math.prod(header.shape[1:]) * header.dtype.itemsize
    if header.by_columns:  # its entries lie all over it
        with said_of_array(path, name):
            data = stream.read()
            whole = np.ndarray(header.shape, header.dtype, data, order="F")
        yield from whole
        return
    for _ in range(header.shape[0]):
        with said_of_array(path, name):
            yield np.ndarray(shape, header.dtype, stream.read(size))
