"""NumPy's files, their headers read before their data: what does not fit is refused before it is
inflated.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError, BisectError, MachineError, one_line
from bisect_trt.core.machine.memory import free_bytes, in_words

Header = tuple[np.dtype[Any], tuple[int, ...]]
CheckHeader = Callable[[str, "np.dtype[Any]", tuple[int, ...]], None]
_ENDING = ".npy"


def read_npz(path: Path, check: CheckHeader | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file; pickled objects are refused.

    Args:
        path: the file.
        check: raises for the name, dtype and shape of an array that is not wanted, before its data
            is read.

    Raises:
        BadInputError: names the file.
        MachineError: an array is larger than the memory that is free.
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
        raise BadInputError(
            f"{path}: not a readable .npz file (it is none, or holds Python objects)"
        )
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.is_dir():
                    continue
                name = entry.filename.removesuffix(_ENDING)
                arrays[name] = _member(path, archive, entry, name, check)
    except BisectError:
        raise
    except MemoryError as error:
        raise MachineError(f"{path}: does not fit into memory") from error
    except Exception as error:  # zipfile raises whatever a damaged archive leads it to
        raise BadInputError(f"{path}: not a readable .npz file ({one_line(error)})") from error
    return arrays


def read_npy(path: Path, name: str, check: CheckHeader | None = None) -> NDArray[Any]:
    """The array of an .npy file.

    Args:
        path: the file.
        name: what the array is called in messages.
        check: as for :func:`read_npz`.

    Raises:
        BadInputError: names the file.
        MachineError: the array is larger than the memory that is free.
    """
    if zipfile.is_zipfile(path):
        raise BadInputError(f"{path}: not a single array; call it .npz")
    try:
        with path.open("rb") as stream:
            _examined(path, name, stream, path.stat().st_size, check)
        found: NDArray[Any] = np.load(path, allow_pickle=False)
        return found
    except BisectError:
        raise
    except MemoryError as error:
        raise MachineError(f"{path}: does not fit into memory") from error
    except Exception as error:  # NumPy's parser of headers raises what Python's would
        raise BadInputError(f"{path}: not a readable .npy file ({one_line(error)})") from error


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
                        name = entry.filename.removesuffix(_ENDING)
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
    dtype, shape = _header(stream)
    if min(shape, default=0) < 0 or stream.tell() + math.prod(shape) * dtype.itemsize != size:
        raise ValueError("the header promises other bytes")
    return shape


def _member(
    path: Path,
    archive: zipfile.ZipFile,
    entry: zipfile.ZipInfo,
    name: str,
    check: CheckHeader | None,
) -> NDArray[Any]:
    try:
        with archive.open(entry) as stream:
            _examined(path, name, stream, entry.file_size, check)
        with archive.open(entry) as stream:
            found: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
            return found
    except (BisectError, MemoryError):
        raise
    except Exception as error:  # wrong checksums, passwords, unknown compression, short data
        raise BadInputError(f"{path}: array {name!r} cannot be read ({one_line(error)})") from error


def _examined(
    path: Path, name: str, stream: IO[bytes], size: int, check: CheckHeader | None
) -> None:
    """Refuse by its header an array whose ``size`` bytes are not those that it declares, that does
    not fit into memory, or that ``check`` does not want.
    """
    dtype, shape = _header(stream)
    if dtype.hasobject:
        raise BadInputError(
            f"{path}: array {name!r} cannot be read (it holds Python objects, save plain numbers)"
        )
    if check is not None:
        check(name, dtype, shape)
    declared = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or stream.tell() + declared != size:
        raise BadInputError(
            f"{path}: array {name!r} cannot be read (its header promises {declared} bytes, the "
            f"file holds {size - stream.tell()})"
        )
    free = free_bytes()
    if free is not None and declared > free:
        raise MachineError(
            f"{path}: array {name!r} takes {in_words(declared)}, and {in_words(free)} of memory "
            "are free"
        )


def _header(stream: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    return np.dtype(dtype), tuple(int(n) for n in shape)


def _is_npy(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(6) == b"\x93NUMPY"


def write_npz(
    path: Path, arrays: Mapping[str, NDArray[Any]], compression: int = zipfile.ZIP_DEFLATED
) -> None:
    """Write ``arrays`` as NumPy's ``savez`` would, whatever their names are.

    Args:
        path: the file.
        arrays: by name.
        compression: one of ``zipfile``'s.

    Raises:
        OSError: the file cannot be written.
    """
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)
