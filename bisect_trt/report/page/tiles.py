"""The report's first screen in figures: what a reviewer asks before reading on."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bisect_trt.core.holds import Holds, InputKind
from bisect_trt.core.names import counted
from bisect_trt.numerics.scores import NOTHING_ALLOWED, brief
from bisect_trt.report.record.record import Record
from bisect_trt.report.words.sentences import number


@dataclass(frozen=True)
class Tile:
    """A figure (``value``), what it is (``name``), and what to know about it (``note``)."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Held:
    """One kind of input: the ``passed`` of ``tested``, their ``share``, what is known of all such
    inputs (``bound``, blank where the tested ones are all), the ``worst`` score and whose it is.
    """

    name: str
    passed: int
    tested: int
    share: float
    bound: str
    worst: str
    worst_name: str


def tiles(result: Record) -> list[Tile]:
    """Cause, the plan's size, before and after, and what it costs."""
    found = [Tile("cause", result.cause.value, "")]
    if result.passed:
        note = f"of {counted(result.layer_count, 'layer')} stay in FP32"
        found.append(Tile("pins", str(len(result.pinned)), note))
    reduced = result.precision.value.upper()
    before, of = _score(result.base_score)
    # A larger score on an input that may miss is not the plan's.
    count = ", on the inputs that count" if result.holds_on < 1.0 else ""
    found.append(Tile("before", before, f"{of}everything in {reduced}{count}"))
    if not math.isnan(result.score):
        after, of = _score(result.score)
        found.append(Tile("after", after, f"{of}with the plan{count}"))
    cost = _cost(result)
    return [*found, cost] if cost is not None else found


def _score(score: float) -> tuple[str, str]:
    """A score, and what it is a multiple of."""
    return brief(score), "tolerance, " if score < NOTHING_ALLOWED else ""


def _cost(result: Record) -> Tile | None:
    """Latency where engines were built, else the memory traffic that pins add."""
    if "latency_ms" in result.cost:
        rows = result.cost.itertuples()
        latency = {str(row.engine).rpartition(" ")[2]: float(str(row.latency_ms)) for row in rows}
        others = [n for n in ("fp32", result.precision.value) if n in latency]
        if "plan" in latency:
            beside = ", ".join(f"{n.upper()} {number(latency[n])} ms" for n in others)
            return Tile("latency", f"{number(latency['plan'])} ms", beside)
    if "relative_bytes" in result.frontier:
        picked = result.frontier.loc[result.frontier["set"] == "answer", "relative_bytes"].dropna()
        if len(picked):
            more = 100.0 * (float(picked.iloc[0]) - 1.0)
            note = "memory traffic against everything lowered; no engine was timed"
            return Tile("cost", f"{more:+.0f} %", note)
    return None


def held_kinds(holds: Holds | None) -> list[Held]:
    """What the plan was tested on, a kind a row; nothing where no plan passes."""
    if holds is None:
        return []
    found = []
    for kind in InputKind:
        its = holds.of(kind)
        if its.tested:
            drawn = kind is not InputKind.GIVEN
            bound = f"at least {100.0 * its.lower_bound:.1f} % of all" if drawn else ""
            worst = brief(its.worst_score)
            # The file's own name: the path is in inputs.csv.
            of = re.split(r"[\\/]", its.worst)[-1]
            found.append(Held(kind.words, its.passed, its.tested, its.share, bound, worst, of))
    return found
