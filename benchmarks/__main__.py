"""Runs every benchmark, prints the tables and keeps them in ``benchmarks/results/cpu.md``."""

from __future__ import annotations

from pathlib import Path

from benchmarks import peers, probe, scale, searching, whole_run, workers
from benchmarks.common import machine


def main() -> None:
    """Print as it goes; write the file at the end."""
    parts = [f"# Benchmarks on a CPU\n\n`make bench`, {machine()}"]
    print(parts[0], flush=True)
    for station in (probe, whole_run, peers, scale, workers, searching):
        parts.append("\n".join(station.report()))
        print(f"\n{parts[-1]}", flush=True)
    (Path(__file__).parent / "results" / "cpu.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
