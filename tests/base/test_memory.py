"""How much memory there is, and how much a process takes."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="a process' own peak is told by Linux")
def test_a_peak_is_the_process_own_and_not_of_whoever_started_it() -> None:
    told = "from bisect_trt.base.limits import peak_bytes; print(peak_bytes())"
    held = b"x" * (256 << 20)  # as a notebook may hold
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert 1_000_000 < int(run.stdout) < len(held) / 2
