"""Folders that a run needs only while it lasts: in the run's own folder once there is one, and
swept away by the next start where a run was killed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"^\.bisect-trt-([0-9a-f]{8})-(\d+)-")
_home: Path | None = None


def draft_prefix() -> str:
    """How the name of a folder begins that this process may leave behind if it is killed."""
    return f".bisect-trt-{_here()}-{os.getpid()}-"


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
    sweep(folder)
    sweep(Path(tempfile.gettempdir()))
    before, _home = _home, folder
    try:
        yield
    finally:
        _home = before


def sweep(folder: Path) -> None:
    """Remove the scratch folders in ``folder`` whose process is gone; those of other machines and
    containers, whose processes cannot be seen, are left.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        found = _NAME.match(entry.name)
        try:
            ours = found is not None and found.group(1) == _here()
            if found is None or not ours or not entry.is_dir(follow_symlinks=False):
                continue
        except OSError:
            continue
        if not _lives(int(found.group(2))):
            shutil.rmtree(entry.path, ignore_errors=True)


@functools.cache
def _here() -> str:
    """What tells this machine, and on Linux this container, from others that share a disk."""
    try:
        space = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        space = ""
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]


def _lives(pid: int) -> bool:
    if os.name == "nt":  # there signal 0 is Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
