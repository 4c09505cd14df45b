"""Runs every benchmark, prints the tables and keeps them in ``benchmarks/results/cpu.md``; or only
those that are named.

With ``OLD`` in the environment, a checkout of another version, its tables are printed right after
ours and not kept: its code, its own benchmark, this Python. It needs ``.cache/demo`` and
``../shared`` as this one does (links are enough).
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.common import machine, reports

STATIONS = (
    ("evaluation",),
    ("peers.whole_run", "peers.peers"),
    ("scale",),
    ("workers",),
    ("searching",),
)
"""Each tuple in a process of its own: what one leaves in memory slows the next (the graph stage by
a quarter).
"""
BESIDE = ("evaluation", "peers.whole_run", "scale", "workers")
"""What is asked of an old checkout too: times. Counts do not depend on the machine."""


def beside(old: Path, name: str) -> str:
    """The tables of the benchmark ``name`` as ``old`` has and makes it, or why there are none."""
    file = old / "benchmarks" / f"{name.replace('.', '/')}.py"
    asked = name if file.exists() else name.rpartition(".")[2]  # before they had rooms
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", asked], cwd=old, capture_output=True, text=True
    )
    if done.returncode:
        return f"### The same by {old.name}\n\nFailed: {done.stderr.strip().splitlines()[-1]}"
    head, *parts = done.stdout.strip().split("\n\n## ")
    version = head.partition(", ")[2].partition(", onnx ")[0]
    tables = [part.partition("\n")[2].strip() for part in parts]
    return "\n\n".join([f"### The same by {old.name} ({version})", *tables])


def main() -> None:
    """Print as it goes; write the file at the end, unless only some were asked for."""
    old = Path(os.environ["OLD"]).resolve() if os.environ.get("OLD") else None
    parts = [f"# Benchmarks on a CPU\n\n`make context`, {machine()}"]
    print(parts[0], flush=True)
    wanted = (
        [tuple(n for n in names if n in sys.argv[1:]) for names in STATIONS]
        if sys.argv[1:]
        else STATIONS
    )
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for names in filter(None, wanted):
            for name, part in zip(names, pool.submit(reports, names).result(), strict=True):
                parts.append(part)
                if old and name in BESIDE:
                    part += f"\n\n{beside(old, name)}"
                print(f"\n{part}", flush=True)
    if not sys.argv[1:]:
        (Path(__file__).parent / "results" / "cpu.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
