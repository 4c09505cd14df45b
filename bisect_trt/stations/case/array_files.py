"""NumPy's files: read whole, after their headers, and written."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError, BisectError, MachineError, one_line
from bisect_trt.stations.case.array_headers import ENDING, CheckHeader, examined


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

    Args:
        path: the file.
        kind: its ending.

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

    Args:
        path: the file.
        name: what the array is called in messages.
        check: as for :func:`read_npz`.

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

    Args:
        path: the file.
        name: what the array is called in messages.
        check: as for :func:`read_npz`.
        whole: whether all of it shall fit into memory.

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

    Args:
        path: the file.
        name: of the array.

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
