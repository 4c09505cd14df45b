"""Files are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from bisect_trt.base.atomic_files import write_whole, written_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "first")
    write_whole(path, "zweite Fassung, größer")
    assert path.read_text(encoding="utf-8") == "zweite Fassung, größer"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_an_interruption_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
