"""Chooses and locks a run's folder, and refuses to write over files that are not a run's."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from bisect_trt.base.atomic_files import OLDER_FILES, RESULT_FILES, RUN, VERIFY_FILES, sweep
from bisect_trt.base.errors import BadInputError, not_written
from bisect_trt.evaluate.cache import CACHE, Cache, Row
from bisect_trt.steps.problem import Problem

try:
    import fcntl
except ImportError:  # no POSIX: two runs in one folder are then not noticed
    fcntl = None  # type: ignore[assignment]

_OWNER = "owner"
"""The key of the cache's row with the path of the model."""


@contextmanager
def claimed_folder(problem: Problem, folder: Path) -> Iterator[Cache]:
    """The cache in ``folder``, which no other run uses until the block ends.

    Raises:
        BadInputError: the folder cannot be written, is in use, holds files that are not a run's or
            that the run reads, or holds no usable cache.
        MachineError: the disk is full.
    """
    with held_folder(folder):
        _check_files(folder, problem)
        sweep(folder, Path(tempfile.gettempdir()))
        with closing(Cache(folder, fresh=problem.settings.fresh)) as cache:
            cache.record([Row(_OWNER, _OWNER, _source_of(problem))])
            yield cache


def refuse_answer(folder: Path) -> None:
    """Refuse to replace an answer by tables alone.

    Raises:
        BadInputError: ``folder`` holds a run's answer.
    """
    if (folder / RUN).exists():
        raise BadInputError(
            f"--out {folder}: holds a run's answer, which these tables would take the place of; "
            "choose another folder"
        )


def folder_of(problem: Problem, suffix: str) -> Path:
    """``--out``, else ``reports/<model>-<precision><suffix>`` here. Nothing is made.

    A digest of the path is added where the folder belongs to another model of the same name.
    """
    if problem.settings.out is not None:
        return problem.settings.out
    path, name = problem.model.path, problem.model.name
    stem = (path.stem if path is not None else name).replace("/", "_").replace("\0", "_")[:80]
    folder = Path("reports") / f"{stem}-{problem.settings.precision.value}{suffix}"
    source = _source_of(problem)
    if _owner_of(folder) in (None, source):
        return folder
    digest = hashlib.sha256(source.encode(errors="surrogateescape")).hexdigest()[:8]
    return folder.with_name(f"{folder.name}-{digest}")


def _source_of(problem: Problem) -> str:
    path = problem.model.path
    return str(path.resolve()) if path is not None else f"graph {problem.model.name}"


def _owner_of(folder: Path) -> str | None:
    """The path of the model whose runs ``folder`` holds; None where that is unknown."""
    path = folder / CACHE
    if not path.is_file():
        return None
    uri = f"{path.resolve().as_uri()}?mode=ro"
    # The folder is not locked yet, so that the cache may not be written, nor made anew.
    with (
        suppress(sqlite3.Error, OSError, ValueError),
        closing(sqlite3.connect(uri, uri=True)) as database,
    ):
        query = "SELECT meta FROM answers WHERE key = ?"
        row = database.execute(query, (_OWNER,)).fetchone()
        return None if row is None else str(json.loads(row[0]))
    return None


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Make ``folder`` and lock it inside the block.

    Raises:
        BadInputError: the folder cannot be written, or is in use.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise not_written(f"--out {folder}", error, "; choose another folder") from error
    # The system unlocks the folder when the process ends, however it ends. The lock is on the
    # folder, since SQLite has locks of its own on the cache.
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInputError(
                f"--out {folder}: another run is using this folder; wait for it, or choose another "
                "--out"
            ) from None
        except OSError:
            pass  # a file system without locks: two runs are then not noticed
        yield
    finally:
        os.close(handle)


def _check_files(folder: Path, problem: Problem) -> None:
    """Refuse to write over what the run reads, and over what no run wrote."""
    settings = problem.settings
    given = (*settings.inputs, *settings.holdout, settings.golden)
    sources = [p for p in (problem.model.path, *problem.model.side_files) if p is not None]
    sources += [Path(p) for p in given if isinstance(p, (str, Path))]
    for name in (*RESULT_FILES, *VERIFY_FILES, *OLDER_FILES, CACHE):
        written = folder / name
        if not written.exists():
            continue
        if not written.is_file():
            raise BadInputError(
                f"--out {folder}: {name} there is no file; choose another folder, or move it away"
            )
        for source in sources:
            with suppress(OSError):
                if source.samefile(written):
                    raise BadInputError(
                        f"--out {folder}: {source} would be written over; choose another folder"
                    )
        if not any((folder / sign).is_file() for sign in (CACHE, *OLDER_FILES)):
            raise BadInputError(
                f"--out {folder}: holds {name} and no cache of bisect-trt, so it may not be a "
                "run's; choose another folder, or move the file away"
            )
