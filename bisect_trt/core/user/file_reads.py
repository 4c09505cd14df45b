"""Which files a piece of the user's code reads: labels, annotations, another model. Python tells of
each that it opens itself; a native library's are not seen, nor those that other threads open.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CODE = (".py", ".pyc", ".so", ".pyd")
_NOT_FILES = ("/proc/", "/sys/", "/dev/")

_watching: dict[int, list[dict[str, str]]] = {}
"""By thread: what was opened by another one is not the watched code's."""

_known: dict[str, tuple[tuple[int, int, int], str]] = {}
_hooked = False


@contextmanager
def watched_reads(found: dict[str, str]) -> Iterator[None]:
    """Add to ``found`` the digest of the content of each file that this thread opens for reading
    inside, by its path; code is left out.
    """
    global _hooked
    if not _hooked:  # a hook can never be taken away again
        sys.addaudithook(_heard)
        _hooked = True
    watches = _watching.setdefault(threading.get_ident(), [])
    watches.append(found)
    try:
        yield
    finally:
        watches.pop()


def content_digest(path: str) -> str:
    """SHA-256 of a file's content; "" where it cannot be read."""
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    except OSError:
        return ""
    return found.hexdigest()


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open":
        return
    watches = _watching.get(threading.get_ident())
    if not watches or not _is_reading(*arguments[:3]):
        return
    path = os.path.abspath(os.fsdecode(arguments[0]))
    if path.endswith(_CODE) or path.startswith(_NOT_FILES) or not Path(path).is_file():
        return
    del _watching[threading.get_ident()]  # what is opened here is heard too
    try:
        digest = _digest_of(path)
    finally:
        _watching[threading.get_ident()] = watches
    for found in watches:
        found[path] = digest


def _digest_of(path: str) -> str:
    """The digest of a file as it is now; of one that seems not to have changed the one known."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    seems = (status.st_mtime_ns, status.st_size, status.st_ino)
    known = _known.get(path)
    if known is None or known[0] != seems:
        known = _known[path] = (seems, content_digest(path))
    return known[1]


def _is_reading(name: Any, mode: Any, flags: Any) -> bool:
    if not isinstance(name, (str, bytes, os.PathLike)):
        return False  # a descriptor, whose file was opened before
    if isinstance(mode, str) and set(mode) & set("wax+"):
        return False
    writing = os.O_WRONLY | os.O_RDWR
    return not (isinstance(flags, int) and mode is None and flags & writing)
