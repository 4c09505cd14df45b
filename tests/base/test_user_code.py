"""What a function of the user's depends on, and how its errors are told."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.errors import BadInputError, MachineError
from bisect_trt.base.user_code import load_function, source_digest, users_code


def made(text: str) -> Callable[..., Any]:
    space: dict[str, Any] = {"np": np, "functools": functools, "__name__": "notebook"}
    exec(text, space)
    found: Callable[..., Any] = space["m"]
    return found


DIFFERENT = [
    "def m(a, b): return 1",
    "def m(a, b): return 2",
    "def m(a, b): return 1.0",
    "def m(a, b, c=1): return 1",
    "K = [1, 0, 1]\ndef m(a, b): return K",
    "K = [1, 0, 0]\ndef m(a, b): return K",
    "K = [[1], 0]\ndef m(a, b): return K",
    "K = [[1, 0]]\ndef m(a, b): return K",
    "K = {'a': 1}\ndef m(a, b): return K",
    "K = {'a': 2}\ndef m(a, b): return K",
    "K = np.arange(3)\ndef m(a, b): return K",
    "K = np.arange(3.0)\ndef m(a, b): return K",
    "def f(a, b, c, d): return c\nm = functools.partial(f, 1, 2, 1)",
    "def f(a, b, c, d): return c\nm = functools.partial(f, 1, 2, 2)",
    "class D:\n    def score(self): return 1\ndef m(a, b): return D().score()",
    "class D:\n    def score(self): return 2\ndef m(a, b): return D().score()",
    "class D:\n    def __init__(self, k): self.k = k\n    def __call__(self, a, b): return self.k\n"
    "m = D(1)",
    "class D:\n    def __init__(self, k): self.k = k\n    def __call__(self, a, b): return self.k\n"
    "m = D(2)",
    "def wrap(f):\n    @functools.wraps(f)\n    def g(a, b): return f(a, b)\n    return g\n"
    "@wrap\ndef m(a, b): return 1",
    "def wrap(f):\n    @functools.wraps(f)\n    def g(a, b): return 2 * f(a, b)\n    return g\n"
    "@wrap\ndef m(a, b): return 1",
    "class D:\n    def __init__(self, k): self.k = k\n    def score(self, a, b): return self.k\n"
    "m = D(1).score",
    "class D:\n    def __init__(self, k): self.k = k\n    def score(self, a, b): return self.k\n"
    "m = D(2).score",
    "class D:\n    def __init__(self, k): self.k = k\n    def score(self, a, b): return self.k\n"
    "m = functools.partial(D(2).score)",
    "def m(a, b): return m.limit\nm.limit = 1",
    "def m(a, b): return m.limit\nm.limit = 2",
    "import types\ncfg = types.ModuleType('cfg')\ncfg.limit = 1\ndef m(a, b): return cfg.limit",
    "import types\ncfg = types.ModuleType('cfg')\ncfg.limit = 2\ndef m(a, b): return cfg.limit",
    "import re\np = re.compile('a')\ndef m(a, b): return p",
    "import re\np = re.compile('b')\ndef m(a, b): return p",
    "def h(a): return a\ndef m(a, b): return h(a)",
    "def h(a): return -a\ndef m(a, b): return h(a)",
    "def m(a, b): return a in {'x', 'y', 'z'}",
    "def m(a, b): return [c for c in a if c > 1]",
    "def m(a, b): return [c for c in a if c > 2]",
    "def m(a, b): return m(b, a)",
]


def test_other_code_or_other_values_are_another_digest() -> None:
    digests = [source_digest(made(text)) for text in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert digests == [source_digest(made(text)) for text in DIFFERENT]


def test_what_cannot_be_compared_is_never_taken_for_known() -> None:
    lock = "import threading\nlock = threading.Lock()\ndef m(a, b): return lock"
    assert source_digest(made(lock)) != source_digest(made(lock))


def test_digests_are_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "digests.py"
    script.write_text(
        "from tests.base.test_user_code import DIFFERENT, made\n"
        "from bisect_trt.base.user_code import source_digest\n"
        "print([source_digest(made(t)) for t in DIFFERENT])\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    told = {
        subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


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
