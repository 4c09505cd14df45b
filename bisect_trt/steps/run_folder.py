"""The folder of a run: whose it is, what may be written over, and what the user's metrics read."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from bisect_trt.base.atomic_files import RESULT_FILES, RUN, VERIFY_FILES, scratch_in
from bisect_trt.base.errors import BadInputError, not_written
from bisect_trt.base.user_code import content_digest
from bisect_trt.evaluate.cache import CACHE, Cache, Row, content_key
from bisect_trt.metrics.user_metric import UserMetric
from bisect_trt.steps.problem import Problem

try:
    import fcntl
except ImportError:  # no POSIX: two runs in one folder are then not told apart
    fcntl = None  # type: ignore[assignment]

_OWNER = "owner"


@contextmanager
def claimed_folder(problem: Problem, folder: Path) -> Iterator[Cache]:
    """The cache in ``folder``, which nobody else uses until the block ends.

    Raises:
        BadInputError: the folder cannot be written, is in use, holds files that are not a run's or
            that the run reads, or holds no usable cache.
        MachineError: the disk is full.
    """
    with held_folder(folder):
        _check_files(folder, problem)
        with scratch_in(folder), closing(Cache(folder)) as cache:
            cache.record([Row(_OWNER, _OWNER, _source_of(problem))])
            yield cache


def refuse_answer(folder: Path) -> None:
    """Tables alone take no answer's place.

    Raises:
        BadInputError: ``folder`` holds a run's answer.
    """
    if (folder / RUN).exists():
        raise BadInputError(
            f"--out {folder}: holds a run's answer, which these tables would take the place of; "
            "choose another folder"
        )


def folder_of(problem: Problem, suffix: str) -> Path:
    """As asked for, else ``reports/<model>-<precision><suffix>`` here; where that is another
    model's of the same name, with some of the path's digest behind it. Nothing is made.
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
    """The model whose runs lie in ``folder``; None where that cannot be told."""
    path = folder / CACHE
    if not path.is_file():
        return None
    read_only = f"{path.resolve().as_uri()}?mode=ro"
    query = "SELECT meta FROM answers WHERE key = ?"
    with (
        suppress(sqlite3.Error, OSError, ValueError),
        closing(sqlite3.connect(read_only, uri=True)) as database,
    ):
        row = database.execute(query, (_OWNER,)).fetchone()
        return None if row is None else str(json.loads(row[0]))
    return None


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """``folder``, made if it is not there; nobody else runs in it inside the block.

    The folder itself is locked, since SQLite has locks of its own on the cache; the system lets go
    of it with the process.

    Raises:
        BadInputError: the folder cannot be written, or is in use.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise not_written(f"--out {folder}", error, "; choose another folder") from error
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
            pass  # a file system without locks: two runs are then not told apart
        yield
    finally:
        os.close(handle)


def _check_files(folder: Path, problem: Problem) -> None:
    """Refuse to write over what the run reads, and over what no run wrote."""
    settings = problem.settings
    read = (*problem.model.side_files, *settings.inputs, *settings.holdout, settings.golden)
    sources = [Path(s) for s in (problem.model.path, *read) if isinstance(s, (str, Path))]
    for name in (*RESULT_FILES, *VERIFY_FILES, CACHE):
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
        if not (folder / CACHE).is_file():
            raise BadInputError(
                f"--out {folder}: holds {name} and no cache of bisect-trt, so it may not be a "
                "run's; choose another folder, or move the file away"
            )


class MetricReads:
    """``key`` is ``run_key``, or one that follows from it and the files as they are now; what the
    ``metrics`` read from now on is recorded beside the first answer that depends on it.
    """

    def __init__(self, metrics: Sequence[UserMetric], run_key: str, cache: Cache) -> None:
        self._metrics = metrics
        self.key, self._known = _current(run_key, cache)
        cache.beside = self._new_rows

    def _new_rows(self) -> list[Row]:
        reads = dict(self._known)
        for metric in self._metrics:
            read = dict(metric.reads)  # which another thread's call may add to
            for path, digest in read.items():
                if reads.get(path, digest) != digest:
                    raise BadInputError(
                        f"--metric {metric.name}: {path} changed while it was in use; run the "
                        "command again"
                    )
            reads |= read
        if reads == self._known:
            return []
        self._known = reads
        return [Row(_place(self.key), "reads", reads)]


def _current(key: str, cache: Cache) -> tuple[str, dict[str, str]]:
    """The key that the cache answers under for the files as they are now, and those files."""
    while True:
        found = cache.recall(_place(key))
        if found is None:
            return key, {}
        before = dict(found[0])
        now = {path: content_digest(path) for path in before}
        if now == before:
            return key, before
        key = content_key(key, now)


def _place(key: str) -> str:
    return content_key(key, "reads")
