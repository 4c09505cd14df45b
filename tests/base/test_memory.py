"""How much memory there is, by every limit that this process has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
