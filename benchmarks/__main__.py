"""Runs every benchmark, prints the tables and keeps them in ``benchmarks/results/cpu.md``; or only
those that are named.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.common import machine, reports

STATIONS = (
    ("probe",),
    ("peers.whole_run", "peers.peers"),
    ("scale",),
    ("workers",),
    ("searching",),
)
"""Each tuple in a process of its own: what one leaves in memory slows the next (the graph stage by
a quarter).
"""


def main() -> None:
    """Print as it goes; write the file at the end, unless only some were asked for."""
    parts = [f"# Benchmarks on a CPU\n\n`make bench`, {machine()}"]
    print(parts[0], flush=True)
    wanted = (
        [tuple(n for n in names if n in sys.argv[1:]) for names in STATIONS]
        if sys.argv[1:]
        else STATIONS
    )
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for names in filter(None, wanted):
            for part in pool.submit(reports, names).result():
                parts.append(part)
                print(f"\n{part}", flush=True)
    if not sys.argv[1:]:
        (Path(__file__).parent / "results" / "cpu.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
