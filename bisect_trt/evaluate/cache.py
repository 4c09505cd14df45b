"""Evaluations on disk, so that a repeated command asks nothing twice."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from bisect_trt.base.errors import BadInputError, BisectError, MachineError, one_line
from bisect_trt.base.outcomes import Reproducibility, Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.result import SampleResult, Vector
from bisect_trt.metrics.errors import TensorError

_HEADER = b"SQLite format 3\0"
_DAMAGE = ("malformed", "corrupt", "not a database", "no such column", "NOT NULL", "file is encr")
_MOST_ROWS = 1_000_000
"""A damaged count may be any number: so many of the newest rows are looked for."""

_SIDES = ("-journal", "-wal", "-shm")


def is_damaged(path: Path) -> bool:
    """Whether ``path`` is an SQLite file that does not read as one. A file of another kind is not
    damaged: it is not ours.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_HEADER))
    except FileNotFoundError:
        return False
    if head != _HEADER:
        return False
    try:
        with closing(_reading(path)) as database:
            found = database.execute("PRAGMA quick_check(1)").fetchone()
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return found is None or found[0] != "ok"
    except sqlite3.OperationalError:
        return False  # locked or not readable: opening it says so
    except sqlite3.DatabaseError as error:
        return any(words in str(error) for words in _DAMAGE)
    except UnicodeDecodeError:
        return True


def salvaged(path: Path, schema: str, columns: Sequence[str], form: int) -> str:
    """Set ``path`` aside and put in its place a new file with the rows that can be read."""
    aside, read = _free_name(path), 0
    os.replace(path, aside)
    for side in _SIDES:
        path.with_name(path.name + side).unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(schema)
        marks = ", ".join("?" for _ in columns)
        for row in _readable(aside, columns):
            database.execute(f"INSERT OR REPLACE INTO answers VALUES ({marks})", row)
            read += 1
        database.execute(f"PRAGMA user_version={form}")
    return (
        f"{path} was damaged: {read} answers could be read, the rest is asked again; the "
        f"damaged file is kept as {aside.name}"
    )


def _readable(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The rows that can be read, by number: one that cannot does not hide those behind it."""
    names = ", ".join(columns)
    try:
        with closing(_reading(path)) as database:
            last = database.execute("SELECT max(rowid) FROM answers").fetchone()[0] or 0
            for number in range(max(1, int(last) - _MOST_ROWS), int(last) + 1):
                try:
                    query = f"SELECT {names} FROM answers WHERE rowid = ?"
                    row = database.execute(query, (number,)).fetchone()
                except (sqlite3.Error, UnicodeDecodeError):
                    continue
                if row is not None:
                    yield row
    except (sqlite3.Error, UnicodeDecodeError):
        return


def _reading(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1.0)


def _free_name(path: Path) -> Path:
    for number in range(1, 1000):
        aside = path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")
        if not aside.exists():
            return aside
    raise OSError(f"{path}: a thousand damaged caches lie beside it; remove some")


CACHE = "cache.sqlite"
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


class Cache:
    """The cache in ``folder``; several threads may share it.

    Caches of earlier versions are opened too: their answers are simply other keys. One whose
    pages are damaged is set aside, with what can still be read of it in a new one; ``note`` then
    says so, and is empty otherwise. ``is_new`` where there was none. ``beside`` gives rows to write
    with every answer, in the same transaction.

    Raises:
        BadInputError: the file is no cache, or one of a later version of the tool, or cannot be
            written.
        MachineError: the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / CACHE
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
                f"{path}: another process is using the cache; wait for it, or choose another --out"
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
            f"{path}: not a usable cache ({one_line(error)}); choose another --out, or move the "
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
    """Rows on their way into ``cache``, written every half second: a transaction each would take
    as long as a small network's inference.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
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
            self._cache.record(self._rows)
        self._rows, self._written = [], time.monotonic()


class Answers:
    """Reads and makes rows of ``cache``; ``key`` is the content that all of them depend on. The
    runner waits ``patience`` seconds: what one that waited for less gave up is asked again.
    """

    def __init__(self, cache: Cache, key: str, patience: float = math.inf) -> None:
        self._cache = cache
        self._key = key
        self._patience = patience

    def key(self, *parts: str) -> str:
        """The key of one answer."""
        return content_key(self._key, *parts)

    def of(self, plan: PrecisionPlan, sample: Sample) -> SampleResult | None:
        """What ``plan`` showed on ``sample``; None if it was not run."""
        found = self._cache.recall(self._sample_key(plan, sample))
        if found is None:
            return None
        meta, payload = found
        verdict = Verdict(meta["verdict"])
        if verdict is Verdict.TIMED_OUT and self._patience > meta.get("patience", 0.0):
            return None
        return SampleResult(
            verdict,
            meta["score"],
            tuple(meta["values"]),
            {n: TensorError(**e) for n, e in meta["errors"].items()},
            meta["seconds"],
            meta["note"],
            np.frombuffer(payload, np.float32) if payload else None,
            Reproducibility(**meta["reproducibility"]) if meta.get("reproducibility") else None,
            tuple(meta.get("best_values", ())),
        )

    def vector(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Vector | None:
        """The signed errors of ``plan`` at the sampled elements of ``samples``, one sample after
        the other, in tolerances; None where it was not run, could not be, or nobody needs them.

        They are read when they are asked for: those of a thousand plans are 16 MB a sample.
        """
        found = [self.of(plan, sample) for sample in samples]
        vectors = [r.vector for r in found if r is not None and r.vector is not None]
        return np.concatenate(vectors) if len(vectors) == len(found) else None

    def row(self, plan: PrecisionPlan, sample: Sample, result: SampleResult) -> Row:
        """The row that :meth:`of` reads."""
        meta: dict[str, Any] = {
            "verdict": result.verdict.value,
            "score": result.score,
            "values": list(result.values),
            "seconds": result.seconds,
            "note": result.note,
            "errors": {n: vars(e) for n, e in result.errors.items()},
        }
        if result.verdict is Verdict.TIMED_OUT:
            meta["patience"] = self._patience
        if result.reproducibility is not None:
            meta["reproducibility"] = vars(result.reproducibility)
        if result.best_values:
            meta["best_values"] = list(result.best_values)
        payload = b"" if result.vector is None else result.vector.tobytes()
        return Row(self._sample_key(plan, sample), "evaluation", meta, payload)

    def of_all(
        self, plan: PrecisionPlan, samples: Sequence[Sample], *, best: bool = False
    ) -> list[float] | None:
        """The values of the collective metrics on ``samples``; None if they were not asked for."""
        found = self._cache.recall(self._key_of_all(plan, samples, best=best))
        return None if found is None else [float(v) for v in found[0]]

    def row_of_all(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        values: Sequence[float],
        *,
        best: bool = False,
    ) -> Row:
        """The row that :meth:`of_all` reads."""
        return Row(self._key_of_all(plan, samples, best=best), "together", list(values))

    def facts(self, plan: PrecisionPlan) -> dict[str, Any]:
        """What the runner added to ``plan``; empty where it adds nothing."""
        found = self._cache.recall(self.key("facts", plan.digest))
        return dict(found[0]) if found is not None else {}

    def row_of_facts(self, plan: PrecisionPlan, facts: dict[str, Any]) -> Row:
        """The row that :meth:`facts` reads."""
        return Row(self.key("facts", plan.digest), "facts", facts)

    def _sample_key(self, plan: PrecisionPlan, sample: Sample) -> str:
        return self.key("evaluation", plan.digest, sample.digest)

    def _key_of_all(self, plan: PrecisionPlan, samples: Sequence[Sample], *, best: bool) -> str:
        by = ["best runs"] if best else []
        return self.key("together", *by, plan.digest, *(s.digest for s in samples))
