"""Folders that a run needs only while it lasts: in the run's own folder once there is one, and
swept away by the next start where a run was killed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"^\.bisect-trt-(\d+)-")
_OLD_S = 3600.0
"""In the system's temporary folder other containers may work, whose processes cannot be seen: what
is young is left alone there."""

_home: Path | None = None


def draft_prefix() -> str:
    """How the name of a folder begins that this process may leave behind if it is killed."""
    return f".bisect-trt-{os.getpid()}-"


def scratch(what: str) -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed with the object.

    Args:
        what: a word for its name.

    Raises:
        OSError: it cannot be made.
    """
    return tempfile.TemporaryDirectory(prefix=f"{draft_prefix()}{what}-", dir=_home)


@contextmanager
def scratch_in(folder: Path) -> Iterator[None]:
    """Inside the block scratch folders are made in ``folder``; what dead processes left there, and
    in the system's temporary folder, is removed first.
    """
    global _home
    sweep(folder, older_than_s=0.0)
    sweep(Path(tempfile.gettempdir()), older_than_s=_OLD_S)
    before, _home = _home, folder
    try:
        yield
    finally:
        _home = before


def sweep(folder: Path, *, older_than_s: float) -> None:
    """Remove the scratch folders in ``folder`` whose process is gone.

    Args:
        folder: where to look; what cannot be read or removed is left.
        older_than_s: seconds since it was last written to.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        found = _NAME.match(entry.name)
        try:
            if found is None or not entry.is_dir(follow_symlinks=False):
                continue
            age = time.time() - entry.stat(follow_symlinks=False).st_mtime
        except OSError:
            continue
        if age >= older_than_s and not _lives(int(found.group(1))):
            shutil.rmtree(entry.path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
