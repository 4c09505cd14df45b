"""A journal whose pages are damaged: what can still be read of it, and the rest kept aside."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

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
    """Set ``path`` aside and put in its place a new file with the rows that can be read.

    Args:
        path: the damaged file.
        schema: of the table ``answers``.
        columns: its columns.
        form: the new file's ``user_version``.

    Returns:
        A sentence that says so.
    """
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
    raise OSError(f"{path}: a thousand damaged journals lie beside it; remove some")
