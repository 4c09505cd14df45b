"""The cache: what is recorded is recalled, whole or not at all; other versions' files."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.errors import BadInputError, MachineError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import CACHE, Answers, Cache, Row, content_key
from bisect_trt.evaluate.result import SampleResult


def test_answers_come_back(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.record([Row("a", "evaluation", {"score": float("inf")}, b"\x00\x01"), Row("b", "x", [1])])
    cache.close()
    again = Cache(tmp_path)
    assert again.recall("a") == ({"score": float("inf")}, b"\x00\x01")
    assert again.recall("b") == ([1], b"") and again.recall("c") is None
    again.close()


def test_several_answers_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(TypeError):
        cache.record([Row("a", "evaluation", 1), Row("b", "evaluation", object())])
    assert cache.recall("a") is None
    cache.record([Row("a", "evaluation", 2)])
    assert cache.recall("a") == (2, b"")
    cache.close()


def test_an_interruption_at_any_statement_leaves_a_journal_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come behind any of them; what follows must not be told of an open transaction."""

    class Interrupted(sqlite3.Connection):
        after = ""

        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:  # type: ignore[override]
            done = super().execute(sql, *values)
            if sql == self.after:
                Interrupted.after = ""
                raise KeyboardInterrupt
            return done

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Interrupted))
    cache = Cache(tmp_path)
    for number, statement in enumerate(("BEGIN", "COMMIT")):
        Interrupted.after = statement
        with pytest.raises(KeyboardInterrupt):
            cache.record([Row(f"lost {number}", "x", 1)])
        cache.record([Row(f"kept {number}", "x", 1)])
    assert [cache.recall(f"kept {n}") for n in (0, 1)] == [(1, b"")] * 2
    cache.close()


def test_a_cache_without_checksums_is_set_aside(tmp_path: Path) -> None:
    """As 0.3.0 wrote it."""
    old = sqlite3.connect(tmp_path / CACHE)
    old.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, kind TEXT, meta TEXT, payload BLOB)")
    old.commit()
    old.close()
    cache = Cache(tmp_path)
    cache.record([Row("n", "evaluation", 1)])
    assert cache.recall("n") == (1, b"") and cache.note
    cache.close()


def test_a_fresh_cache_knows_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.record([Row("a", "evaluation", 1)])
    cache.close()
    cache = Cache(tmp_path, fresh=True)
    assert cache.recall("a") is None
    cache.close()


def test_a_later_journal_and_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    later = sqlite3.connect(tmp_path / CACHE)
    later.execute("PRAGMA user_version=99")
    later.close()
    with pytest.raises(BadInputError, match="later version of bisect-trt") as caught:
        Cache(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / CACHE).write_bytes(b"no database at all, " * 400)
    for fresh in (False, True):
        with pytest.raises(BadInputError, match="not a usable cache"):
            Cache(tmp_path, fresh=fresh)
    (tmp_path / CACHE).unlink()
    with closing(sqlite3.connect(tmp_path / CACHE)) as other:
        other.execute("CREATE TABLE songs (name TEXT)")
    before = (tmp_path / CACHE).read_bytes()
    with pytest.raises(BadInputError, match="another program's"):
        Cache(tmp_path)
    assert (tmp_path / CACHE).read_bytes() == before


ROWS = {
    f"key {n}": ({"verdict": "pass", "score": n / 7.0}, bytes(range(n % 200))) for n in range(300)
}


def _bytes(change: Callable[[bytearray], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(bytes(data))

    return damage


def _at(share: float, length: int, value: int) -> Callable[[Path], None]:
    def change(data: bytearray) -> None:
        start = int(share * len(data))
        data[start : start + length] = bytes([value]) * len(data[start : start + length])

    return _bytes(change)


def _flips(seed: int, count: int) -> Callable[[Path], None]:
    def change(data: bytearray) -> None:
        random = Random(seed)
        for _ in range(count):
            data[random.randrange(16, len(data))] ^= 1 << random.randrange(8)

    return _bytes(change)


def _sql(statement: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with closing(sqlite3.connect(path)) as file, file:
            file.execute(statement)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda p: p.write_bytes(b"") and None,
    "removed": lambda p: p.unlink(),
    "header zeroed": _at(0.0, 100, 0),
    "header's version changed": _bytes(lambda d: d.__setitem__(slice(60, 64), b"\0\0\0\1")),
    "page size changed": _bytes(lambda d: d.__setitem__(slice(16, 18), b"\0\7")),
    "cut in half": _bytes(lambda d: d.__delitem__(slice(len(d) // 2, None))),
    "cut by a byte": _bytes(lambda d: d.__delitem__(slice(len(d) - 1, None))),
    "cut behind the header": _bytes(lambda d: d.__delitem__(slice(100, None))),
    "longer": _bytes(lambda d: d.extend(b"more" * 999)),
    "first page zeroed": _at(0.01, 3000, 0),
    "middle zeroed": _at(0.5, 4096, 0),
    "end is 0xff": _at(0.8, 9999, 255),
    "another table": _sql("ALTER TABLE answers RENAME TO songs"),
    "no table": _sql("DROP TABLE answers"),
    "a column dropped": _sql("ALTER TABLE answers DROP COLUMN payload"),
    "answers changed": _sql("UPDATE answers SET meta = replace(meta, 'pass', 'fail')"),
    "answers swapped": _sql("UPDATE answers SET meta = (SELECT meta FROM answers LIMIT 1)"),
    "not JSON": _sql("UPDATE answers SET meta = 'nonsense'"),
    "nulls": _sql("UPDATE answers SET meta = NULL, payload = NULL"),
    "payload is text": _sql("UPDATE answers SET payload = 'text'"),
    "checksums gone": _sql("UPDATE answers SET checksum = NULL"),
    **{f"{n} bits flipped, {seed}": _flips(seed, n) for n in (1, 20, 400) for seed in range(8)},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_gives_a_wrong_answer_or_a_traceback(damage: str, tmp_path: Path) -> None:
    whole = Cache(tmp_path)
    whole.record([Row(key, "evaluation", meta, payload) for key, (meta, payload) in ROWS.items()])
    whole.close()
    DAMAGES[damage](tmp_path / CACHE)
    try:
        cache = Cache(tmp_path)
        told = {key: cache.recall(key) for key in ROWS}
        cache.record([Row("new", "evaluation", 1)])
        assert cache.recall("new") == (1, b"")
        cache.close()
    except (BadInputError, MachineError) as error:
        assert "\n" not in str(error) and str(tmp_path) in str(error)
        return
    assert all(answer is None or answer == ROWS[key] for key, answer in told.items())


def test_a_damaged_cache_is_set_aside_and_said(tmp_path: Path) -> None:
    whole = Cache(tmp_path)
    whole.record([Row(key, "evaluation", meta, payload) for key, (meta, payload) in ROWS.items()])
    whole.close()
    DAMAGES["middle zeroed"](tmp_path / CACHE)
    damaged = (tmp_path / CACHE).read_bytes()
    cache = Cache(tmp_path)
    assert "was damaged" in cache.note and "cache.damaged-1.sqlite" in cache.note
    assert (tmp_path / "cache.damaged-1.sqlite").read_bytes() == damaged
    assert not any(cache.recall(key) for key in ROWS)
    cache.close()
    assert Cache(tmp_path).note == ""


def test_a_full_disk_and_another_writer_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(sqlite3.Connection):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.execute("PRAGMA max_page_count=4")
            self.execute("PRAGMA busy_timeout=50")

    with monkeypatch.context() as small:
        small.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Small))
        cache = Cache(tmp_path)
    with pytest.raises(MachineError, match="disk is full"):
        cache.record([Row("a", "evaluation", "x" * 100_000)])
    assert cache.recall("a") is None
    with closing(sqlite3.connect(tmp_path / CACHE)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BadInputError, match="another process is using"):
            cache.record([Row("b", "evaluation", 1)])
    cache.close()


def test_keys_are_stable_and_tell_apart() -> None:
    assert content_key("a", {"x": 1, "y": 2}) == content_key("a", {"y": 2, "x": 1})
    assert content_key("a", "b") != content_key("ab")


def test_several_threads_share_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def write(number: int) -> None:
        for place in range(20):
            cache.record([Row(f"{number}.{place}", "evaluation", [number, place])])
            assert cache.recall(f"{number}.{place}") == ([number, place], b"")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert all(cache.recall(f"{n}.{p}") for n in range(8) for p in range(20))
    cache.close()


def test_what_waits_is_known_at_once_and_written_with_the_next_answers(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.record_later(Row("a", "usable", True))
    assert cache.recall("a") == (True, b"")
    with closing(sqlite3.connect(tmp_path / CACHE)) as other:
        assert not other.execute("SELECT * FROM answers").fetchall()
        cache.record([Row("b", "evaluation", 1)])
        assert {key for (key,) in other.execute("SELECT key FROM answers")} == {"a", "b"}
    cache.record_later(Row("c", "usable", False))
    cache.close()
    cache = Cache(tmp_path)
    assert cache.recall("c") == (False, b"") and cache.recall("a") == (True, b"")
    cache.close()


@pytest.mark.parametrize(
    ("verdict", "asks_again"), [(Verdict.TIMED_OUT, True), (Verdict.CRASHED, False)]
)
def test_who_waits_longer_asks_again(tmp_path: Path, verdict: Verdict, asks_again: bool) -> None:
    plan, sample = PrecisionPlan("fp16"), Sample("s", {"x": np.ones(2, np.float32)})
    cache = Cache(tmp_path)
    first = Answers(cache, "key", 10.0)
    result = SampleResult(verdict, float("inf"), (), {}, 10.0, "no answer in 10 s")
    cache.record([first.row(plan, sample, result)])
    for patience, asked in ((5.0, False), (10.0, False), (900.0, True), (float("inf"), True)):
        found = Answers(cache, "key", patience).of(plan, sample)
        assert (found is None) is (asked and asks_again)
        assert found is None or found.verdict is verdict
    longer = Answers(cache, "key", 900.0)
    cache.record([longer.row(plan, sample, result)])
    assert (longer.of(plan, sample) is None) is False
    cache.close()
