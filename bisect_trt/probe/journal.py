"""What was answered before: a journal that survives kill -9.

It is SQLite, one transaction a call. Rows are keyed by the content they depend on (the tool's
version, model, requirements, plan, sample, runner and its versions), so a repeated command finds
its answers and a changed one does not. Each row has a checksum: a damaged one is left out, and what
it answered is asked again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from bisect_trt.core.errors import BadInputError, BisectError, MachineError, one_line
from bisect_trt.probe.salvage import is_damaged, salvaged

JOURNAL = "journal.sqlite"
_FORM = 2
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers "
    "(key TEXT PRIMARY KEY, kind TEXT, meta TEXT, payload BLOB, checksum TEXT)"
)
_COLUMNS = ("key", "kind", "meta", "payload", "checksum")
_WAIT_S = 10.0
"""Runs do not share a folder: whoever holds the file longer is somebody else, and will."""

_FAILURES = (sqlite3.Error, UnicodeDecodeError)
"""A damaged name or word may not even be text."""


class Row(NamedTuple):
    """One answer: ``meta`` is any JSON value, ``payload`` bytes beside it."""

    key: str
    kind: str
    meta: Any
    payload: bytes = b""


def content_key(*parts: object) -> str:
    """A stable SHA-256 over JSON-able parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class Journal:
    """The journal in ``folder``; several threads may share it.

    Journals of earlier versions are opened too: their answers are simply other keys. One whose
    pages are damaged is set aside, with what can still be read of it in a new one; ``note`` then
    says so, and is empty otherwise. ``is_new`` where there was none. ``beside`` gives rows to write
    with every answer, in the same transaction.

    Raises:
        BadInputError: the file is no journal, or one of a later version of the tool, or cannot be
            written.
        MachineError: the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / JOURNAL
        self._lock = Lock()
        self.note = ""
        self.beside: Callable[[], list[Row]] = list
        self._waiting: dict[str, Row] = {}
        try:
            if is_damaged(path):
                self.note = salvaged(path, _SCHEMA, _COLUMNS, _FORM)
            self._database = _connected(path)
        except (*_FAILURES, OSError) as error:
            raise self._told(error) from error
        try:
            form = self._opened()
        except _FAILURES as error:
            self.close()
            raise self._told(error) from error
        self.is_new = form == 0
        if form > _FORM:
            self.close()
            raise BadInputError(
                f"{path}: written by a later version of bisect-trt; choose another --out"
            )

    def recall(self, key: str) -> tuple[Any, bytes] | None:
        """What was recorded under ``key``: its JSON value and its bytes; None if nothing was, or
        what is there is damaged.

        Raises:
            MachineError: the disk failed.
            BadInputError: the file was damaged while it was open.
        """
        waiting = self._waiting.get(key)
        if waiting is not None:
            return waiting.meta, waiting.payload
        try:
            with self._lock:
                row = self._database.execute(
                    "SELECT kind, meta, payload, checksum FROM answers WHERE key = ?", (key,)
                ).fetchone()
        except _FAILURES as error:
            raise self._told(error) from error
        if row is None or row[3] != _checksum(key, *row[:3]):
            return None
        return json.loads(row[1]), bytes(row[2])

    def record_later(self, row: Row) -> None:
        """Keep ``row`` for the next answers' transaction, or the end: for what costs less to ask
        again than a transaction of its own.
        """
        self._waiting[row.key] = row

    def record(self, rows: Sequence[Row]) -> None:
        """Write the answers, all of them durable when this returns, or none.

        Raises:
            MachineError: the disk is full, or failed.
            BadInputError: another process holds the file, or it was damaged while it was open.
        """
        written = []
        waiting = list(self._waiting.values())
        for row in (*rows, *waiting, *self.beside()):
            meta = json.dumps(row.meta)
            checksum = _checksum(row.key, row.kind, meta, row.payload)
            written.append((row.key, row.kind, meta, row.payload, checksum))
        try:
            with self._lock:
                self._roll_back()  # one that Ctrl-C left open
                try:
                    self._database.execute("BEGIN")
                    self._database.executemany(
                        "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", written
                    )
                    self._database.execute("COMMIT")
                except BaseException:
                    self._roll_back()
                    raise
        except sqlite3.Error as error:
            raise self._told(error) from error
        for row in waiting:
            self._waiting.pop(row.key, None)

    def _roll_back(self) -> None:
        if self._database.in_transaction:  # a full disk has ended it already
            self._database.execute("ROLLBACK")

    def close(self) -> None:
        """Write what waits, and close the file. A full disk loses what can be asked again."""
        with suppress(BisectError):
            if self._waiting:
                self.record([])
        self._database.close()

    def _opened(self) -> int:
        """The form that the file had; it is of this version's from here on, unless later."""
        run = self._database.execute
        form = int(run("PRAGMA user_version").fetchone()[0])
        if form > _FORM:
            return form
        tables = {name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "answers" not in tables:
            raise sqlite3.DatabaseError("its tables are another program's")
        run("PRAGMA synchronous=NORMAL")
        run(_SCHEMA)
        if "checksum" not in {row[1] for row in run("PRAGMA table_info(answers)")}:
            run("ALTER TABLE answers ADD COLUMN checksum TEXT")
        run(f"PRAGMA user_version={_FORM}")
        return form

    def _told(self, error: Exception) -> BisectError:
        """What ``error`` means to a person: never that an answer should be thrown away."""
        said, path = str(error), self._path
        if "locked" in said or "busy" in said:
            return BadInputError(
                f"{path}: another process is using the journal; wait for it, or choose another "
                "--out"
            )
        if "full" in said or "No space left" in said:
            return MachineError(
                f"{path}: the disk is full; free some space and run the same command again to go "
                "on from here"
            )
        if "readonly" in said or "unable to open" in said or isinstance(error, PermissionError):
            return BadInputError(f"{path}: cannot be written ({one_line(error)}); check its rights")
        if "disk I/O" in said or isinstance(error, OSError):
            return MachineError(f"{path}: the disk failed ({one_line(error)})")
        return BadInputError(
            f"{path}: not a usable journal ({one_line(error)}); choose another --out, or move the "
            "file away if it is bisect-trt's"
        )


def _connected(path: Path) -> sqlite3.Connection:
    # A statement that is kept keeps what it wrote last: of 20,000 layers' errors 20 MB.
    return sqlite3.connect(
        path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False, cached_statements=0
    )


def _checksum(key: str, kind: Any, meta: Any, payload: Any) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in (key, kind, meta, payload):
        data = part if isinstance(part, bytes) else str(part).encode(errors="replace")
        found.update(f"{type(part).__name__} {len(data)} ".encode() + data)
    return found.hexdigest()


_WRITTEN_EVERY_S = 0.5


class RowBuffer:
    """Rows on their way into ``journal``, written every half second: a transaction each would take
    as long as a small network's inference.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._rows: list[Row] = []
        self._written = time.monotonic()

    def add(self, row: Row) -> None:
        """Keep ``row``; write what there is if it is time."""
        self._rows.append(row)
        if time.monotonic() - self._written > _WRITTEN_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what there is."""
        if self._rows:
            self._journal.record(self._rows)
        self._rows, self._written = [], time.monotonic()
