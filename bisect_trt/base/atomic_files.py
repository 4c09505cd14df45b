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

_SCRATCH_NAME = re.compile(r"^\.bisect-trt-([0-9a-f]{8})-(\d+)-")


def draft_prefix() -> str:
    """The prefix of this process's scratch folders, by which :func:`sweep` recognises them."""
    return f".bisect-trt-{_machine()}-{os.getpid()}-"


def scratch(what: str, folder: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed with the object, by default in the system's temporary folder.

    Raises:
        OSError: it cannot be made.
    """
    return tempfile.TemporaryDirectory(prefix=f"{draft_prefix()}{what}-", dir=folder)


def sweep(*folders: Path) -> None:
    """Remove this machine's scratch folders in ``folders`` whose process has ended."""
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(folder)):
                name = _SCRATCH_NAME.match(entry.name)
                if name is None or not entry.is_dir(follow_symlinks=False):
                    continue
                # The processes of other machines and containers cannot be seen from here.
                if name.group(1) == _machine() and not _is_running(int(name.group(2))):
                    shutil.rmtree(entry.path, ignore_errors=True)


@functools.cache
def _machine() -> str:
    """A short hash of this machine and, on Linux, of this container."""
    try:  # containers have the same process ids, and may share a disk
        space = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        space = ""
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]


def _is_running(pid: int) -> bool:
    if os.name == "nt":  # signal 0 is Ctrl-C on Windows
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
    """A draft that replaces ``path`` when the block ends without an error.

    Raises:
        OSError: the folder of ``path`` cannot be written.
    """
    # A folder of its own, since further files may be written beside the draft.
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
    """``read``, which refuses to read ``path`` once the file has changed.

    Raises:
        BadInputError: when it is called, if the file has changed since.
    """
    before = _stamp(path)

    def read_again() -> Content:
        content = read()
        if _stamp(path) != before:
            raise BadInputError(f"{path}: changed while it was in use; run the command again")
        return content

    return read_again


def _stamp(path: Path) -> tuple[int, int] | None:
    """The file's time of change and size; None where it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    # Without the inode: some network mounts give another one each time.
    return status.st_mtime_ns, status.st_size


RUN = "run.json"
TYPED_MODEL = "model.typed.onnx"
REPAIRED_MODEL = "model.repaired.onnx"
FITTED_MODEL = "model.fitted.onnx"
REPAIR = "repair.json"
PLAN = "plan.json"

OLDER_FILES = (
    "journal.sqlite",
    "frontier.csv",
    "model.annotated.onnx",
    "model.rewritten.onnx",
    "model.rewritten.onnx.data",
)
"""What a run of 0.4.0 left that no run writes today; its folder may be written over."""

RESULT_FILES = (
    RUN,  # removed first and written last: its presence means that the folder is complete
    PLAN,
    TYPED_MODEL,
    f"{TYPED_MODEL}.data",
    REPAIRED_MODEL,
    f"{REPAIRED_MODEL}.data",
    FITTED_MODEL,
    f"{FITTED_MODEL}.data",
    "report.html",
    "report.md",
    "junit.xml",
    "layers.csv",
    "original_layers.csv",
    "original_tradeoff.csv",
    "outputs.csv",
    "search.csv",
    "pins.csv",
    "engines.csv",
    "inputs.csv",
    "tradeoff.csv",
)

VERIFY_RECORD = "verify.json"
VERIFY_JUNIT = "verify.junit.xml"
VERIFY_FILES = (VERIFY_RECORD, VERIFY_JUNIT)
"""Their names differ from a run's, whose folder they may be written to."""
