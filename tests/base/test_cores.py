"""How many cores a process may use."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bisect_trt.base.limits import own_cgroups, quota_of, thread_count, usable_cores


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
    assert thread_count() == thread_count(0) == thread_count(10**6) == usable_cores()
    assert thread_count(1) == 1
