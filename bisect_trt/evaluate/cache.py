"""Evaluations on disk, so that a repeated command executes nothing twice."""

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
"""The version of the file's layout."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers "
    "(key TEXT PRIMARY KEY, kind TEXT, meta TEXT, payload BLOB, checksum TEXT)"
)
_FAILURES = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises; text in a damaged file may not decode."""


class Row(NamedTuple):
    """One entry: ``meta`` is any JSON value, ``payload`` the bytes beside it."""

    key: str
    kind: str
    meta: Any
    payload: bytes = b""


def content_key(*parts: object) -> str:
    """A stable SHA-256 over JSON-able parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class Cache:
    """The cache in ``folder``, for several threads; ``fresh`` empties it.

    ``note``: says that a damaged cache was set aside.

    Raises:
        BadInputError: the file is no cache, is of a later version, or cannot be written.
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
        if form > _FORM:
            self.close()
            raise BadInputError(
                f"{path}: written by a later version of bisect-trt; choose another --out"
            )

    def recall(self, key: str) -> tuple[Any, bytes] | None:
        """The JSON value and the bytes of ``key``; None if it is absent or damaged.

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
        """Keep ``row`` for the next transaction, which is made now if the last is long ago."""
        self._waiting[row.key] = row
        # A transaction takes as long as an inference of a small network.
        if time.monotonic() - self._written_at > 0.5:
            self.record([])

    def record(self, rows: Sequence[Row]) -> None:
        """Write ``rows`` and the waiting ones in one transaction.

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
                self._roll_back()  # Ctrl-C may have left one open
                try:
                    self._database.execute("BEGIN")
                    # What timed out is replaced once it was given more time.
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
        """Write the waiting rows and close the file."""
        with suppress(BisectError):  # a full disk loses only what can be evaluated again
            self.record([])
        self._database.close()

    def _opened(self) -> int:
        """Prepare the tables; returns the version of the file's layout before, 0 for a new file."""
        run = self._database.execute
        form = int(run("PRAGMA user_version").fetchone()[0])
        if form > _FORM:
            return form
        tables = {name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "answers" not in tables:
            raise sqlite3.DatabaseError("its tables are another program's")
        # Fewer syncs with the disk; what a power cut damages is found at the next start.
        run("PRAGMA synchronous=NORMAL")
        run(_SCHEMA)
        run(f"PRAGMA user_version={_FORM}")
        return form

    def _explained(self, error: Exception) -> BisectError:
        """The error for the user, with what to do."""
        text, path = str(error), self._path
        if "locked" in text or "busy" in text:
            return BadInputError(
                f"{path}: another process is using the cache; wait for it, or choose another --out"
            )
        if "full" in text or "No space left" in text:
            return MachineError(
                f"{path}: the disk is full; free some space and run the same command again to go "
                "on from here"
            )
        if "readonly" in text or "unable to open" in text or isinstance(error, PermissionError):
            return BadInputError(f"{path}: cannot be written ({one_line(error)}); check its rights")
        if "disk I/O" in text or isinstance(error, OSError):
            return MachineError(f"{path}: the disk failed ({one_line(error)})")
        return BadInputError(
            f"{path}: not a usable cache ({one_line(error)}); choose another --out, or move the "
            "file away if it is bisect-trt's"
        )


def _is_damaged(path: Path) -> bool:
    """Whether an SQLite file cannot be read as a cache; False for a file of another kind."""
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
    except sqlite3.OperationalError as error:  # if locked or not readable, opening it says so
        return "no such column" in str(error)
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return True


def _set_aside(path: Path) -> str:
    """Rename a damaged cache; returns the message."""
    names = (path.with_name(f"{path.stem}.damaged-{n}{path.suffix}") for n in count(1))
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    for suffix in ("-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return f"{path} was damaged and is set aside as {aside.name}; every answer is asked again"


def _connected(path: Path) -> sqlite3.Connection:
    # Cached statements would keep the values that they wrote last in memory.
    return sqlite3.connect(
        path,
        timeout=10.0,  # seconds to wait for another process's transaction
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

    ``key``: the key of what all of them depend on. ``timeout_s``: the runner's time-out.
    """

    def __init__(self, cache: Cache, key: str, timeout_s: float = math.inf) -> None:
        self._cache = cache
        self._key = key
        self._timeout_s = timeout_s

    def key(self, *parts: str) -> str:
        """The key of one entry."""
        return content_key(self._key, *parts)

    def of(self, plan: PrecisionPlan, sample: Sample) -> SampleResult | None:
        """The result of ``plan`` on ``sample``; None if it was not run."""
        entry = self._cache.recall(self._sample_key(plan, sample))
        if entry is None:
            return None
        meta, payload = entry
        verdict = Verdict(meta["verdict"])
        # With a longer time-out it may finish.
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
        """The signed errors of all ``samples``, in tolerances; None if one has none."""
        results = [self.of(plan, sample) for sample in samples]
        vectors = [r.vector for r in results if r is not None and r.vector is not None]
        return np.concatenate(vectors) if len(vectors) == len(results) else None

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
        """The values of the collective metrics on ``samples``; None if not computed."""
        entry = self._cache.recall(self._key_of_all(plan, samples, best=best))
        return None if entry is None else [float(v) for v in entry[0]]

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
        """The runner's facts about ``plan``; empty if it has none."""
        entry = self._cache.recall(self.key("facts", plan.digest))
        return dict(entry[0]) if entry is not None else {}

    def row_of_facts(self, plan: PrecisionPlan, facts: dict[str, Any]) -> Row:
        """The row that :meth:`facts` reads."""
        return Row(self.key("facts", plan.digest), "facts", facts)

    def _sample_key(self, plan: PrecisionPlan, sample: Sample) -> str:
        return self.key("evaluation", plan.digest, sample.digest)

    def _key_of_all(self, plan: PrecisionPlan, samples: Sequence[Sample], *, best: bool) -> str:
        by = ["best runs"] if best else []
        return self.key("together", *by, plan.digest, *(s.digest for s in samples))
