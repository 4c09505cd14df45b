"""Public reports, each from complaint to answer: `make cases` prints one table, and fails where an
answer is not the right one. On a GPU `python -m benchmarks.reports tensorrt` lets engines judge.
"""

from __future__ import annotations

import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console

import bisect_trt
from bisect_trt.report.summarise import Result
from bisect_trt.report.terminal import print_verdict
from fixtures.reports import REPORTS
from fixtures.reports.network import Report


def answer(report: Report, out: Path, runner: str = "emulated") -> tuple[Result, str]:
    """The run's result, and what the screen says of it."""
    result = bisect_trt.bisect(
        report.model,
        list(report.inputs),
        precision=report.precision,
        runner=runner,
        repair="none",
        weights="nearest",  # benchmarks/repairs.py has these models repaired
        out=out,
    )
    told = StringIO()
    print_verdict(Console(file=told, width=4000), result, verbose=True)
    return result, told.getvalue()


def faults(report: Report, result: Result, screen: str) -> list[str]:
    """What is not as it must be; empty for the right answer."""
    found = []
    if result.cause.value != report.cause:
        found.append(f"cause {result.cause.value}, expected {report.cause}")
    kept = set(result.pinned) - result.plan.held
    if kept != report.layers and (report.exact or not kept > report.layers):
        wrong = sorted(kept - report.layers), sorted(report.layers - kept)
        found.append(f"needless layers {wrong[0]}, missing {wrong[1]}")
    found += [f"not said: {words!r}" for words in report.words if words not in screen]
    return found


def main() -> int:
    rows, wrong = [], 0
    for make in REPORTS:
        report = make()
        with tempfile.TemporaryDirectory() as folder:
            result, screen = answer(report, Path(folder) / "run", *sys.argv[1:])
        found = faults(report, result, screen)
        wrong += bool(found)
        word = result.validation.word if result.validation is not None else None
        rows.append(
            {
                "case": report.name,
                "report": report.about,
                "cause": result.cause.value,
                "expected cause": report.cause,
                "layers": len(set(result.pinned) - result.plan.held),
                "expected layers": len(report.layers),
                "of": result.layer_count,
                "score": f"{result.score:.3g}",
                "verdict": word.value if word is not None else "",
                "got": "; ".join(found) or "as expected",
            }
        )
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
