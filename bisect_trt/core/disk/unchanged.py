"""Files that are read more than once: what is kept of them belongs to what they held at first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bisect_trt.core.errors import BadInputError

Content = TypeVar("Content")


def unchanged(path: Path, read: Callable[[], Content]) -> Callable[[], Content]:
    """``read``, which may read ``path`` again later, for as long as the file is the same.

    Args:
        path: the file, as it is now.
        read: gives what it holds.

    Raises:
        BadInputError: when it is called, if the file has changed since.
    """
    before = _stamp(path)

    def read_again() -> Content:
        found = read()
        if _stamp(path) != before:
            raise BadInputError(f"{path}: changed while it was in use; run the command again")
        return found

    return read_again


def _stamp(path: Path) -> tuple[int, int] | None:
    """What tells that a file was written again; None where there is none any more."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size  # some network mounts give another inode each time
