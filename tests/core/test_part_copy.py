"""Parts of files, copied by the system or, where it cannot, by hand."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bisect_trt.base.atomic_files import copy_part


def fails(*_: Any) -> int:
    raise OSError(errno.EXDEV, "another file system")


def ends_early(*arguments: Any) -> int:
    if arguments[3] > 100:
        raise OSError(errno.EXDEV, "another file system")
    return copied(*arguments[:2], min(7, arguments[2]), *arguments[3:])


copied = os.copy_file_range


@pytest.mark.parametrize("system", [copied, fails, ends_early, lambda *_: 0])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 300))
def test_a_part_is_copied_whichever_way(
    tmp_path: Path, system: Any, offset: int, length: int, before: int
) -> None:
    content = bytes(i * 7 % 251 for i in range(10_000))
    (tmp_path / "source").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch, (tmp_path / "target").open("wb") as stream:
        patch.setattr(os, "copy_file_range", system)
        stream.write(b"x" * before)
        copy_part(tmp_path / "source", offset, length, stream)
        stream.write(b"end")
    found = (tmp_path / "target").read_bytes()
    assert found == b"x" * before + content[offset : offset + length] + b"end"


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_bytes(b"short")
    with (
        (tmp_path / "target").open("wb") as stream,
        pytest.raises(OSError, match="has become shorter"),
    ):
        copy_part(tmp_path / "source", 0, 10, stream)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with (tmp_path / "target").open("wb") as stream, pytest.raises(OSError, match="No space"):
        copy_part(tmp_path / "source", 0, 3, stream)
