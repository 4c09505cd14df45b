"""The journal: what is recorded is recalled, whole or not at all; other versions' files."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bisect_trt.core.errors import BadInputError
from bisect_trt.probe.journal import JOURNAL, Journal, Row, content_key


def test_answers_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.record([Row("a", "probe", {"score": float("inf")}, b"\x00\x01"), Row("b", "x", [1])])
    journal.close()
    again = Journal(tmp_path)
    assert again.recall("a") == ({"score": float("inf")}, b"\x00\x01")
    assert again.recall("b") == ([1], b"") and again.recall("c") is None
    again.close()


def test_several_answers_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(TypeError):
        journal.record([Row("a", "probe", 1), Row("b", "probe", object())])
    assert journal.recall("a") is None
    journal.record([Row("a", "probe", 2)])
    assert journal.recall("a") == (2, b"")
    journal.close()


def test_a_journal_of_0_3_0_is_opened_and_kept(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / JOURNAL)
    old.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, kind TEXT, meta TEXT, payload BLOB)")
    old.execute("INSERT INTO answers VALUES ('k', 'probe', '{\"verdict\": \"pass\"}', x'')")
    old.commit()
    old.close()
    journal = Journal(tmp_path)
    assert journal.recall("k") == ({"verdict": "pass"}, b"")
    journal.record([Row("n", "probe", 1)])
    journal.close()


def test_a_later_journal_and_another_file_are_refused_in_one_line(tmp_path: Path) -> None:
    later = sqlite3.connect(tmp_path / JOURNAL)
    later.execute("PRAGMA user_version=99")
    later.close()
    with pytest.raises(BadInputError, match="later version of bisect-trt") as caught:
        Journal(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / JOURNAL).write_bytes(b"no database at all, " * 400)
    with pytest.raises(BadInputError, match="not a usable journal"):
        Journal(tmp_path)


def test_keys_are_stable_and_tell_apart() -> None:
    assert content_key("a", {"x": 1, "y": 2}) == content_key("a", {"y": 2, "x": 1})
    assert content_key("a", "b") != content_key("ab")


def test_several_threads_share_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    def write(number: int) -> None:
        for place in range(20):
            journal.record([Row(f"{number}.{place}", "probe", [number, place])])
            assert journal.recall(f"{number}.{place}") == ([number, place], b"")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert all(journal.recall(f"{n}.{p}") for n in range(8) for p in range(20))
    journal.close()
