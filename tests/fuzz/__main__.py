"""Random networks for as long as one likes: ``make fuzz``, or ``python -m tests.fuzz --help``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.fuzz.campaign import Tally
from tests.fuzz.processes import Options, run


def main() -> None:
    """Runs a campaign and prints its tally; exits with 1 if a relation does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="the first seed; default: another one each second")
    parser.add_argument("--out", type=Path, default=Path("reports/fuzz.jsonl"))
    parser.add_argument("--no-shrink", action="store_true", help="keep failures as they were found")
    parser.add_argument(
        "--add", type=Path, nargs="+", metavar="TALLY", help="print the sum of tallies, run nothing"
    )
    given = parser.parse_args()
    if given.processes < 1 or not given.minutes > 0:
        parser.error("--processes must be at least 1, and --minutes above 0")
    total = Tally()
    if given.add:
        for path in given.add:
            try:
                total.add(Tally.of_json(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError, TypeError):
                parser.error(f"{path} is no tally of a campaign; name a *.tally.json")
    else:
        # By the second: many processes take some ten seeds in one.
        first = given.seed if given.seed is not None else int(time.time()) * 1000
        given.out.parent.mkdir(parents=True, exist_ok=True)
        ends = time.monotonic() + 60.0 * given.minutes
        options = Options(given.processes, ends, given.out, not given.no_shrink)
        print(f"seeds from {first}, failures go to {given.out}, numbers to {options.tally(first)}")
        total = run(first, options)
    print("\n".join(total.lines()))
    raise SystemExit(1 if total.failures else 0)


if __name__ == "__main__":
    main()
