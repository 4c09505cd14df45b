"""Cores, threads and memory that a process may use, and work in order on several threads."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bisect_trt.base import limits
from bisect_trt.base.limits import (
    at_most,
    in_order,
    own_cgroups,
    quota_of,
    thread_count,
    usable_cores,
)


@pytest.fixture(params=[1, 2, 5], autouse=True)
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(limits, "thread_count", lambda: count)
    return count


@pytest.mark.parametrize("size", [0, 1, 2, 3, 40])
def test_answers_come_in_order(size: int) -> None:
    assert list(in_order(lambda x: x * x, range(size))) == [x * x for x in range(size)]


def test_what_one_raises_is_raised_in_its_turn() -> None:
    def work(x: int) -> int:
        if x == 7:
            raise KeyError(x)
        return x

    seen = []
    with pytest.raises(KeyError, match="7"):
        for answer in in_order(work, range(30)):
            seen.append(answer)
    assert seen == list(range(7))
    assert list(in_order(work, range(5))) == list(range(5)), "the threads are still there"


def test_no_more_is_read_than_there_are_threads(several: int) -> None:
    read = []

    def items() -> Iterator[int]:
        for x in range(100):
            read.append(x)
            yield x

    answers = in_order(lambda x: x, items())
    assert next(answers) == 0
    assert len(read) <= several + 2
    answers.close()
    assert len(read) <= several + 2


def test_who_leaves_early_leaves_no_work_behind(several: int) -> None:
    release, begun = threading.Event(), []

    def work(x: int) -> int:
        begun.append(x)
        if x:
            release.wait(10.0)
        return x

    answers = in_order(work, range(50))
    assert next(answers) == 0
    answers.close()
    release.set()
    assert list(in_order(lambda x: x, range(50))) == list(range(50))
    assert len(begun) <= several + 2


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "nonsense"}, math.inf),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, math.inf),
        ({"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4.0),
    ],
)
def test_a_quota_is_read(files: dict[str, str], cores: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert quota_of([tmp_path / "none", tmp_path]) == cores


def test_the_smallest_quota_of_all_around_counts(tmp_path: Path) -> None:
    inner = tmp_path / "root" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000")
    (inner.parent / "cpu.max").write_text("50000 100000")
    (tmp_path / "own").write_text("0::/outer/inner\n")
    folders = own_cgroups("cpu", tmp_path / "own", tmp_path / "root")
    assert inner in folders and inner.parent in folders
    assert quota_of(folders) == 0.5
    first = tmp_path / "root" / "cpu,cpuacct" / "docker"
    first.mkdir(parents=True)
    (first / "cpu.cfs_quota_us").write_text("25000")
    (first / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / "own").write_text("4:memory:/docker\n2:cpu,cpuacct:/docker\n")
    assert quota_of(own_cgroups("cpu", tmp_path / "own", tmp_path / "root")) == 0.25


def test_affinity_is_followed() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity here")
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from bisect_trt.base.limits import usable_cores; print(usable_cores())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "1"
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_fewer_threads_can_be_asked_for_and_never_more() -> None:
    assert thread_count() == usable_cores()
    with at_most(None), at_most(10**6):
        assert thread_count() == usable_cores()
        with at_most(1):
            assert thread_count() == 1
            with at_most(2):
                assert thread_count() == 1, "an inner job takes no more than the outer one may"
    assert thread_count() == usable_cores()


ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1 << 30

CHILD = f"""
import resource, sys
from bisect_trt.base.limits import free_bytes
before = free_bytes()
kind = getattr(resource, sys.argv[1])
resource.setrlimit(kind, ({LIMIT}, {LIMIT}))
empty = free_bytes()
taken = bytearray(200 << 20)
print(before or 0, empty, free_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is told by Linux")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process_counts(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, kind],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    before, empty, later = map(int, done.stdout.split())
    assert empty < LIMIT  # the interpreter has taken some of it
    assert empty > LIMIT // 2 or before < LIMIT
    assert later <= empty - (200 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="a process' own peak is told by Linux")
def test_a_peak_is_the_process_own_and_not_of_whoever_started_it() -> None:
    told = "from bisect_trt.base.limits import peak_bytes; print(peak_bytes())"
    held = b"x" * (256 << 20)  # as a notebook may hold
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert 1_000_000 < int(run.stdout) < len(held) / 2
