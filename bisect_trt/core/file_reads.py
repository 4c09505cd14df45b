"""Which files a piece of the user's code reads: labels, annotations, another model. Python tells of
each that it opens itself; a native library's are not seen.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CODE = (".py", ".pyc", ".so", ".pyd")
_NOT_FILES = ("/proc/", "/sys/", "/dev/")

_watching: list[dict[str, str]] = []
_hooked = False


@contextmanager
def watched_reads(found: dict[str, str]) -> Iterator[None]:
    """Add to ``found`` the digest of the content of each file that is opened for reading inside,
    by its path; code is left out.
    """
    global _hooked
    if not _hooked:  # a hook can never be taken away again
        sys.addaudithook(_heard)
        _hooked = True
    _watching.append(found)
    try:
        yield
    finally:
        _watching.remove(found)


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
    if not _watching or event != "open":
        return
    name, mode = arguments[0], arguments[1]
    if not isinstance(name, (str, bytes, os.PathLike)) or (mode and set(mode) & set("wax+")):
        return
    path = os.path.abspath(os.fsdecode(name))
    if path.endswith(_CODE) or path.startswith(_NOT_FILES) or not Path(path).is_file():
        return
    targets = [found for found in _watching if path not in found]
    for found in targets:
        found[path] = ""  # told before it is opened here, which is heard again
    if targets:
        digest = content_digest(path)
        for found in targets:
            found[path] = digest
