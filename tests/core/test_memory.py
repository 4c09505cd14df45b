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
from bisect_trt.core.memory import free_bytes
before = free_bytes()
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
empty = free_bytes()
taken = bytearray(200 << 20)
print(before or 0, empty, free_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is told by Linux")
def test_a_limit_of_the_address_space_counts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    before, empty, later = map(int, done.stdout.split())
    assert empty < LIMIT  # the interpreter has taken some of it
    assert empty > LIMIT // 2 or before < LIMIT
    assert later <= empty - (200 << 20)
