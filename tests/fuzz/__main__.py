"""Random networks for as long as one likes: ``make fuzz``, or ``python -m tests.fuzz --help``."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz.campaign import Tally, campaign, quiet


def main() -> None:
    """Runs a campaign and prints its tally; exits with 1 if a relation does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="the first seed; default: another one each second")
    parser.add_argument("--out", type=Path, default=Path("reports/fuzz.jsonl"))
    parser.add_argument("--no-shrink", action="store_true", help="keep failures as they were found")
    chosen = parser.parse_args()
    # By the second, with room for the seeds of a day before the next one begins.
    first = chosen.seed if chosen.seed is not None else int(time.time()) * 10
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"seeds from {first}, failures go to {chosen.out}", flush=True)
    ends, tally = time.monotonic() + 60.0 * chosen.minutes, Tally()
    workers = ProcessPoolExecutor(chosen.processes, get_context("spawn"), quiet)
    with workers:
        parts = [
            workers.submit(
                campaign,
                first + number,
                chosen.processes,
                ends,
                chosen.out,
                shrinks=not chosen.no_shrink,
            )
            for number in range(chosen.processes)
        ]
        for part in parts:
            tally.add(part.result())
    print("\n".join(tally.lines()))
    raise SystemExit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
