"""What a function of the user's depends on, and how its errors are told."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from bisect_trt.base.errors import BadInputError, MachineError
from bisect_trt.base.user_code import load_function, source_digest, users_code


def test_functions_that_their_file_does_not_name_are_new_each_time() -> None:
    for function in (functools.partial(metric, 1), lambda a, b: 1.0, metric.__call__, min):
        assert source_digest(function) != source_digest(function)
    assert source_digest(metric) == source_digest(metric) != source_digest(another)


def metric(a: Any, b: Any) -> float:
    return 1.0


def another(a: Any, b: Any) -> float:
    return 1.0


def test_where_the_user_s_code_raised_is_told(tmp_path: Path) -> None:
    """The user's own line, not that of the library it calls."""
    (tmp_path / "mine.py").write_text(
        "import json\n\ndef metric(a, b):\n    return json.loads('no')\n"
    )
    function = load_function(f"{tmp_path}/mine.py:metric", "--metric")
    with (
        pytest.raises(BadInputError, match=r"^--metric m: JSONDecodeError: .*\(mine.py, line 4\)$"),
        users_code("--metric m"),
    ):
        function(1, 2)


def test_the_user_s_code_is_told_as_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    for code, error, words in (
        ("raise KeyError('k')", BadInputError, "KeyError"),
        ("raise SystemExit(4)", BadInputError, "it called exit"),
        ("raise MemoryError", MachineError, "out of memory"),
    ):
        with pytest.raises(error, match=words), users_code("--metric m"):
            exec(code)
    with pytest.raises(KeyboardInterrupt), users_code("--metric m"):
        raise KeyboardInterrupt
    with users_code("--metric m"):
        print("to standard error")
    assert capsys.readouterr() == ("", "to standard error\n")


def test_a_function_that_is_not_there_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def other(): pass\nnumber = 3\n")
    where = f"{tmp_path}/mine.py"
    for name, said in (
        ("metric", "mine.py has no function 'metric'"),
        ("number", "not a function"),
    ):
        with pytest.raises(BadInputError, match=said) as refused:
            load_function(f"{where}:{name}", "--metric")
        assert "_bisect_trt" not in str(refused.value)
    with pytest.raises(
        BadInputError, match=r"write tools\.mine:metric, .* or tools/mine\.py:metric"
    ):
        load_function("tools/mine:metric", "--metric")
