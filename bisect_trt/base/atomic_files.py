"""Files that are written whole or not at all, and folders for scratch files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bisect_trt.base.errors import BadInputError

_NAME = re.compile(r"^\.bisect-trt-([0-9a-f]{8})-(\d+)-")


def draft_prefix() -> str:
    """How the name of a folder begins that this process may leave behind if it is killed."""
    return f".bisect-trt-{_here()}-{os.getpid()}-"


def scratch(what: str, folder: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed with the object, by default where the system keeps such.

    Raises:
        OSError: it cannot be made.
    """
    return tempfile.TemporaryDirectory(prefix=f"{draft_prefix()}{what}-", dir=folder)


def sweep(*folders: Path) -> None:
    """Remove the scratch folders in ``folders`` whose process is gone.

    Those of other machines and containers, whose processes cannot be seen, are left.
    """
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(folder)):
                found = _NAME.match(entry.name)
                ours = found and found.group(1) == _here() and entry.is_dir(follow_symlinks=False)
                if found and ours and not _lives(int(found.group(2))):
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


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A draft to write to; it takes the place of ``path`` when the block ends without an error.

    The draft lies alone in a folder beside ``path``, so that further files may be written there.

    Raises:
        OSError: the folder of ``path`` cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=draft_prefix()) as folder:
        draft = Path(folder) / path.name
        yield draft
        draft.chmod(0o644)
        os.replace(draft, path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) to ``path`` in one step.

    Raises:
        OSError: the folder of ``path`` cannot be written.
    """
    with written_whole(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


Content = TypeVar("Content")


def unchanged(path: Path, read: Callable[[], Content]) -> Callable[[], Content]:
    """``read``, which may read ``path`` again later, for as long as the file is the same.

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


RUN = "run.json"
TYPED_MODEL = "model.typed.onnx"
REWRITTEN_MODEL = "model.rewritten.onnx"
ANNOTATED_MODEL = "model.annotated.onnx"
PLAN = "plan.json"

OLDER_FILES = ("journal.sqlite", "frontier.csv")
"""What a run of 0.4.0 left that has another name today; its folder may be written over."""

RESULT_FILES = (
    RUN,  # the first to go and the last to come: its presence means that the folder is complete
    PLAN,
    TYPED_MODEL,
    f"{TYPED_MODEL}.data",
    REWRITTEN_MODEL,
    f"{REWRITTEN_MODEL}.data",
    ANNOTATED_MODEL,
    "report.html",
    "report.md",
    "junit.xml",
    "layers.csv",
    "outputs.csv",
    "search.csv",
    "pins.csv",
    "engines.csv",
    "inputs.csv",
    "tradeoff.csv",
)

VERIFY_PAGE = "verify.html"
VERIFY_RECORD = "verify.json"
VERIFY_JUNIT = "verify.junit.xml"
VERIFY_FILES = (VERIFY_RECORD, VERIFY_PAGE, VERIFY_JUNIT)
"""Names of their own: the folder may be that of the run whose plan it is."""
