"""Files of arrays that hold many samples along their first axis, read a sample at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError
from bisect_trt.stations.case.array_files import opened_npz, said_of, said_of_array
from bisect_trt.stations.case.array_headers import Header, examined


def row_of_npy(path: Path, number: int) -> NDArray[Any]:
    """One entry along the first axis of an .npy file's array; no more of the file stays in memory.

    Args:
        path: the file, whose array can be read.
        number: of the entry.

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

    Args:
        path: the file.
        counts: the lengths of the first axes.

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
