"""Files as arrays: read by the system when they are looked at, and given back to it afterwards."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError, MachineError, is_out_of_memory

_PAGE = mmap.PAGESIZE
_maps: WeakValueDictionary[str, _Map] = WeakValueDictionary()
_alone = Lock()


class _Map(mmap.mmap):
    """A file in memory; lives as long as an array of it."""

    stamp: tuple[int, int, int]


def mapped(path: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """A part of a file, read only. It is not copied, and need not be aligned.

    Args:
        path: of the file.
        dtype: of the elements.
        offset: of the first one, bytes.
        shape: of the array.

    Raises:
        BadInputError: the file is gone, shorter, or not the one that was mapped before.
    """
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return np.empty(shape, dtype)
    try:
        found = np.frombuffer(_map_of(path), dtype, count, offset)
    except (OSError, ValueError) as error:
        if is_out_of_memory(error):
            raise MachineError(
                f"{path}: there is no room to map it ({error}); raise the limit (ulimit -v), or "
                "use a machine with more memory"
            ) from error
        raise BadInputError(f"{path}: cannot be read ({error})") from error
    return found.reshape(shape)


def let_go(array: NDArray[Any]) -> None:
    """Give back the memory of an array of :func:`mapped`: it is read again when it is looked at.
    Nothing where it is none, or where the system knows no such advice.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    whole = base.obj if isinstance(base, memoryview) else base
    if not isinstance(whole, _Map) or not hasattr(whole, "madvise"):
        return
    begin = array.ctypes.data - np.frombuffer(whole, np.uint8).ctypes.data
    # Pages at its ends are the neighbours' too; they are read again as easily.
    first = begin // _PAGE * _PAGE
    whole.madvise(mmap.MADV_DONTNEED, first, min(begin + array.nbytes, len(whole)) - first)


def _map_of(path: str) -> _Map:
    with _alone:
        status = os.stat(path)
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        found = _maps.get(path)
        if found is None:
            with Path(path).open("rb") as stream:
                found = _Map(stream.fileno(), 0, access=mmap.ACCESS_READ)
            found.stamp = stamp
            _maps[path] = found
        elif found.stamp != stamp:
            raise BadInputError(f"{path}: was changed while it was in use; run the command again")
        return found
