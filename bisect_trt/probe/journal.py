"""The run's folder: a journal that survives kill -9, and files that appear whole or not at all.

The journal is SQLite, one transaction a probe. Rows are keyed by the content they depend on (model,
inputs, requirements, plan, runner and its version), so a repeated command finds its answers and a
changed one does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from bisect_trt.core.errors import BadInputError, one_line

JOURNAL = "journal.sqlite"
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, kind TEXT, meta TEXT, payload BLOB)"
)


def content_key(*parts: object) -> str:
    """A stable SHA-256 over JSON-able parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class RunFolder:
    """Opens (and makes) the folder of one run; one thread at a time may use it. Raises
    :class:`BadInputError` if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise BadInputError(
                f"--out {path}: cannot be written ({error.strerror}); choose another folder"
            ) from error
        try:
            self._journal = sqlite3.connect(
                path / JOURNAL, timeout=30.0, isolation_level=None, check_same_thread=False
            )
            self._journal.execute("PRAGMA synchronous=NORMAL")
            self._journal.execute(_SCHEMA)
        except sqlite3.Error as error:
            raise BadInputError(
                f"{path / JOURNAL}: not a usable journal ({one_line(error)}); delete it or choose "
                "another --out"
            ) from error

    def recall(self, key: str) -> tuple[Any, bytes] | None:
        """What was recorded under ``key``: its JSON value and its bytes; None if nothing was."""
        row = self._journal.execute(
            "SELECT meta, payload FROM answers WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else (json.loads(row[0]), bytes(row[1]))

    def record(self, key: str, kind: str, meta: Any, payload: bytes = b"") -> None:
        """Write one answer, durable when this returns."""
        self._journal.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)",
            (key, kind, json.dumps(meta), payload),
        )

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file of the folder in one step."""
        target = self.path / name
        data = content.encode() if isinstance(content, str) else content
        handle, draft = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            os.chmod(draft, 0o644)
            os.replace(draft, target)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
        return target

    def discard(self, name: str) -> None:
        """Remove an earlier run's file, if it is there: what is being computed anew must not look
        finished.
        """
        (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()
