"""Evaluations on disk, so that a repeated command asks nothing twice."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import count
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

CACHE = "cache.sqlite"
_FORM = 2
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers "
    "(key TEXT PRIMARY KEY, kind TEXT, meta TEXT, payload BLOB, checksum TEXT)"
)
_LOCK_TIMEOUT_S = 10.0
_WRITE_EVERY_S = 0.5
"""A transaction for each row would take as long as a small network's inference."""

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

    A damaged one is set aside, and ``note`` says so; it is empty otherwise. ``is_new`` where there
    was none. With ``fresh`` its answers are removed.

    Raises:
        BadInputError: the file is no cache, or one of a later version of the tool, or cannot be
            written.
        MachineError: the disk is full.
    """

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self._path = path = folder / CACHE
        self._lock = Lock()
        self._waiting: dict[str, Row] = {}
        self._written_at = time.monotonic()
        self.note = ""
        try:
            if _is_damaged(path):
                self.note = _set_aside(path)
            self._database = _connected(path)
        except (*_FAILURES, OSError) as error:
            raise self._explained(error) from error
        try:
            form = self._opened()
            if fresh and form <= _FORM:
                self._database.execute("DELETE FROM answers")
        except _FAILURES as error:
            self.close()
            raise self._explained(error) from error
        self.is_new = fresh or form == 0
        if form > _FORM:
            self.close()
            raise BadInputError(
                f"{path}: written by a later version of bisect-trt; choose another --out"
            )

    def recall(self, key: str) -> tuple[Any, bytes] | None:
        """What was recorded under ``key``, JSON value and bytes; None if nothing was, or damaged.

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
            raise self._explained(error) from error
        if row is None or row[3] != _checksum(key, *row[:3]):
            return None
        return json.loads(row[1]), bytes(row[2])

    def record_later(self, row: Row) -> None:
        """Keep ``row`` for the next transaction, which begins here if the last is long ago."""
        self._waiting[row.key] = row
        if time.monotonic() - self._written_at > _WRITE_EVERY_S:
            self.record([])

    def record(self, rows: Sequence[Row]) -> None:
        """Write the rows and those that wait, all of them durable when this returns, or none.

        Raises:
            MachineError: the disk is full, or failed.
            BadInputError: another process holds the file, or it was damaged while it was open.
        """
        waiting = list(self._waiting.values())
        written = []
        for row in (*rows, *waiting):
            meta = json.dumps(row.meta)
            checksum = _checksum(row.key, row.kind, meta, row.payload)
            written.append((row.key, row.kind, meta, row.payload, checksum))
        if not written:
            return
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
            raise self._explained(error) from error
        self._written_at = time.monotonic()
        for row in waiting:
            self._waiting.pop(row.key, None)

    def _roll_back(self) -> None:
        if self._database.in_transaction:  # a full disk has ended it already
            self._database.execute("ROLLBACK")

    def close(self) -> None:
        """Write what waits, and close the file. A full disk loses what can be asked again."""
        with suppress(BisectError):
            self.record([])
        self._database.close()

    def _opened(self) -> int:
        """The number of the file's form, 0 for a new one; it is this version's from here on."""
        run = self._database.execute
        form = int(run("PRAGMA user_version").fetchone()[0])
        if form > _FORM:
            return form
        tables = {name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "answers" not in tables:
            raise sqlite3.DatabaseError("its tables are another program's")
        run("PRAGMA synchronous=NORMAL")
        run(_SCHEMA)
        run(f"PRAGMA user_version={_FORM}")
        return form

    def _explained(self, error: Exception) -> BisectError:
        """``error`` in words for the user, with what to do."""
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


def _is_damaged(path: Path) -> bool:
    """Whether an SQLite file does not read as a cache. A file of another kind is not ours."""
    try:
        with path.open("rb") as file:
            if not file.read(16).startswith(b"SQLite format 3"):
                return False
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as database:
            found = database.execute("PRAGMA quick_check(1)").fetchone()
            database.execute("SELECT key, kind, meta, payload, checksum FROM answers LIMIT 1")
        return found is None or found[0] != "ok"
    except FileNotFoundError:
        return False
    except sqlite3.OperationalError as error:  # locked or not readable: opening it says so
        return "no such column" in str(error)
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return True


def _set_aside(path: Path) -> str:
    """Rename a damaged cache; returns what to say of it."""
    names = (path.with_name(f"{path.stem}.damaged-{n}{path.suffix}") for n in count(1))
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    for suffix in ("-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return f"{path} was damaged and is set aside as {aside.name}; every answer is asked again"


def _connected(path: Path) -> sqlite3.Connection:
    # A statement that is kept keeps what it wrote last: of 20,000 layers' errors 20 MB.
    return sqlite3.connect(
        path,
        timeout=_LOCK_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=0,
    )


def _checksum(key: str, kind: Any, meta: Any, payload: Any) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in (key, kind, meta, payload):
        data = part if isinstance(part, bytes) else str(part).encode(errors="replace")
        found.update(f"{type(part).__name__} {len(data)} ".encode() + data)
    return found.hexdigest()


class Answers:
    """Reads and makes the rows of evaluations in ``cache``.

    ``key`` is the content that all of them depend on. An evaluation that ran out of time is asked
    again where the time-out is longer now.
    """

    def __init__(self, cache: Cache, key: str, timeout_s: float = math.inf) -> None:
        self._cache = cache
        self._key = key
        self._timeout_s = timeout_s

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
        if verdict is Verdict.TIMED_OUT and self._timeout_s > meta.get("patience", 0.0):
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
        """The signed errors at the sampled elements of ``samples`` in turn, in tolerances.

        None where ``plan`` was not run, could not be, or no errors were kept.
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
            meta["patience"] = self._timeout_s
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
