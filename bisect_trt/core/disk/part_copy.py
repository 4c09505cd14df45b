"""Parts of files copied by the system: where a file system can (btrfs, XFS), both files then share
the blocks on the disk until one of them changes.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

BLOCK = 4096
"""What file systems share is whole blocks, so that a part has to lie alike in both files."""

_CANNOT = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EPERM)
_PIECE = 1 << 22


def copy_part(source: Path, offset: int, length: int, stream: IO[bytes]) -> None:
    """Append ``length`` bytes from ``offset`` on of ``source`` to a file.

    Args:
        source: the file.
        offset: in bytes, as is ``length``; the part lies in it.
        length: of the part.
        stream: to the other file, opened for writing in binary; at its end.

    Raises:
        OSError: it cannot be read or written.
    """
    stream.flush()
    with source.open("rb") as read:
        done = _by_system(read.fileno(), offset, length, stream)
        read.seek(offset + done)
        while done < length:
            piece = read.read(min(_PIECE, length - done))
            if not piece:
                raise OSError(errno.EIO, f"{source} has become shorter")
            stream.write(piece)
            done += len(piece)


def _by_system(read: int, offset: int, length: int, stream: IO[bytes]) -> int:
    """How many of the bytes the system has copied; what it cannot is left to the caller."""
    done, start = 0, stream.tell()
    while done < length and hasattr(os, "copy_file_range"):
        try:
            count = os.copy_file_range(
                read, stream.fileno(), length - done, offset + done, start + done
            )
        except OSError as error:
            if error.errno in _CANNOT:
                break
            raise
        if not count:
            break
        done += count
    stream.seek(start + done)
    return done
