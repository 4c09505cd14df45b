"""The tables of what engines did with random networks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tests.fuzz.judging import PLACES, SAME, Scored

Line = dict[str, Any]
Named = tuple[str, str, dict[str, Any]]
"""The network's recipe, the word for the engine, and what it showed."""

SHOWN = 20
"""The most rows of a list."""

MESSAGE_CHARACTERS = 240
"""What a table shows of a failure's message."""


def table(lines: Sequence[Line]) -> Iterator[str]:
    """The tables in Markdown of the lines of a file."""
    if not lines:
        yield "No network was run."
        return
    engines = [
        (line["recipe"], word, found)
        for line in sorted(lines, key=lambda line: line["number"])
        for word, found in line.get("engines", {}).items()
    ]
    numbers = [line["number"] for line in lines]
    seconds = sum(line["seconds"] for line in lines) / len(lines)
    yield (
        f"{len(lines)} networks, numbers {min(numbers)} to {max(numbers)}, on {lines[0]['on']}; "
        f"{seconds:.1f} s each in one process."
    )
    wrong = wrong_in_fp32(engines)
    yield from _by_engine(engines, wrong)
    yield from _rows(
        "Networks whose FP32 engine is wrong, which is no matter of precision",
        "network | largest score",
        [(recipe, f"{score:.3g}") for recipe, score in wrong.items()],
    )
    yield from _failures(lines)
    yield from _other_places(engines)
    yield from _exceeding(engines)
    yield from _repetitions(engines)
    errors = [(line["recipe"], line["error"]) for line in lines if "error" in line]
    yield from _rows("Networks that broke outside of an engine", "network | error", errors)


def wrong_in_fp32(engines: Sequence[Named]) -> dict[str, float]:
    """The largest scores of FP32 engines that err far more than every perturbed copy, by recipe."""
    found: dict[str, float] = {}
    for recipe, word, engine in engines:
        for row in engine.get("inputs", ()) if word == "FP32" else ():
            if Scored(**row).far_exceeds:
                found[recipe] = max(found.get(recipe, 0.0), row["engine"])
    return found


def _by_engine(engines: Sequence[Named], wrong: Collection[str]) -> Iterator[str]:
    """One row a kind of engine, and one without the networks that are ``wrong`` in FP32."""
    yield ""
    yield (
        "| engine | built | not built | ran | not run | inputs | "
        + " | ".join(f"non-finite: {word}" for word in PLACES)
        + " | scores with 20 copies | above the largest | by more than a tenth "
        "| above 1 where no copy is | in three processes | bit-equal |"
    )
    yield "| --- |" + " --- |" * 15
    for kept, suffix in (
        (engines, ""),
        ([e for e in engines if e[0] not in wrong], ", not wrong in FP32"),
    ):
        for word in dict.fromkeys(word for _, word, _ in engines):
            yield _row(f"{word}{suffix}", [found for _, one, found in kept if one == word])
        yield _row(f"all{suffix}", [found for _, _, found in kept])


def _row(word: str, engines: Sequence[dict[str, Any]]) -> str:
    """The numbers of one kind of engine."""
    built = [found for found in engines if "build_s" in found]
    ran = [found for found in built if "inputs" in found]
    inputs = [Scored(**row) for found in ran for row in found["inputs"]]
    judged = [row for row in inputs if row.largest is not None]
    fails = [r for r in judged if r.largest is not None and r.largest <= 1.0 < r.engine]
    thrice = [f["repetition"] for f in ran if f["repetition"]["processes"] > 1]
    equal = sum(r["within"] and r["between"] for r in thrice)
    failed_runs = sum(found.get("failed") == "run" for found in engines)
    cells = [
        word,
        len(built),
        len(engines) - len(built),
        len(ran),
        failed_runs,
        len(inputs),
        *(sum(row.nonfinite == place for row in inputs) for place in PLACES),
        len(judged),
        _share(sum(row.exceeds for row in judged), len(judged)),
        _share(sum(row.clearly_exceeds for row in judged), len(judged)),
        len(fails),
        len(thrice),
        equal,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _share(count: int, of: int) -> str:
    return f"{count} ({count / of:.1%})" if of else "0"


def _failures(lines: Sequence[Line]) -> Iterator[str]:
    """What was not built or not run, by operator and message."""
    groups: dict[tuple[str, str, str], list[tuple[Line, str]]] = defaultdict(list)
    for line in lines:
        for word, found in line.get("engines", {}).items():
            if "failed" in found:
                key = (found["failed"], ", ".join(found["operators"]), alike(found["message"]))
                groups[key].append((line, word))
    rows = []
    for (step, operators, message), which in sorted(groups.items(), key=lambda g: -len(g[1])):
        shown = operators or f"none named; all have {rarest(lines, [line for line, _ in which])}"
        words = ", ".join(sorted({word for _, word in which}))
        rows.append((step, shown, message, len(which), words, which[0][0]["recipe"]))
    yield from _rows(
        "Kinds of engines that failed",
        "step | operators | message | engines | of | for example",
        rows,
    )


def rarest(lines: Sequence[Line], failed: Sequence[Line]) -> str:
    """The operator that all of the networks ``failed`` have, and the fewest of all ``lines``."""
    shared = set.intersection(*(set(line["operators"]) for line in failed))
    counts = {op: sum(op in line.get("operators", ()) for line in lines) for op in shared}
    return min(sorted(counts), key=counts.__getitem__, default="nothing in common")


def alike(message: str) -> str:
    """A message without what differs from one network to the next: names, shapes and numbers."""
    for pattern, instead in (
        (r"\{[^}]*\}?", ""),
        (r"[\w.]*(?:/|__)[\w./]*", "…"),
        (r"[\[(][\d…, ]+[\])]", "[#]"),
        (r"\b\d+\b", "#"),
    ):
        message = re.sub(pattern, instead, message)
    message = message.replace("|", "/")
    return message if len(message) <= MESSAGE_CHARACTERS else f"{message[:MESSAGE_CHARACTERS]}…"


def _other_places(engines: Sequence[Named]) -> Iterator[str]:
    """Where the engine and the emulator disagree on what is finite."""
    rows = [
        (recipe, word, place, row["nonfinite"], f"{row['engine']:.3g}", f"{row['emulated']:.3g}")
        for recipe, word, found in engines
        for place, row in enumerate(found.get("inputs", ()))
        if row["nonfinite"] != SAME
    ]
    yield from _rows(
        "Outputs that are not finite at other places",
        "network | engine | input | what | engine's score | emulated score",
        rows,
    )


def _exceeding(engines: Sequence[Named]) -> Iterator[str]:
    """The engine's scores that are farthest above the largest of the perturbed copies."""
    found = [
        (recipe, word, place, Scored(**row))
        for recipe, word, engine in engines
        for place, row in enumerate(engine.get("inputs", ()))
    ]
    above = [one for one in found if one[3].clearly_exceeds]
    above.sort(key=lambda one: -one[3].engine / max(one[3].largest or 0.0, 1e-30))
    rows = [
        (recipe, word, place, f"{s.engine:.3g}", f"{s.largest:.3g}", f"{s.emulated:.3g}")
        for recipe, word, place, s in above
    ]
    yield from _rows(
        "Scores above the largest of the perturbed copies by more than a tenth",
        "network | engine | input | engine's score | largest of the copies | emulated score",
        rows,
    )


def _repetitions(engines: Sequence[Named]) -> Iterator[str]:
    """The engines that do not give the same answer each time."""
    rows = [
        (
            recipe,
            word,
            "yes" if found["repetition"]["within"] else "no",
            "yes" if found["repetition"]["between"] else "no",
            f"{found['repetition']['apart']:.2g}",
        )
        for recipe, word, found in engines
        if "repetition" in found
        and not (found["repetition"]["within"] and found["repetition"]["between"])
    ]
    yield from _rows(
        "Engines that are not reproducible",
        "network | engine | bit-equal in each process | between processes | apart, in ranges",
        rows,
    )


def _rows(title: str, head: str, rows: Sequence[tuple[Any, ...]]) -> Iterator[str]:
    """A titled table with at most :data:`SHOWN` rows; a line where there are none."""
    yield ""
    if not rows:
        yield f"{title}: none."
        return
    more = f", of which {SHOWN} are shown" if len(rows) > SHOWN else ""
    yield f"{title}: {len(rows)}{more}."
    yield ""
    yield f"| {head} |"
    yield f"|{' --- |' * (head.count('|') + 1)}"
    for row in rows[:SHOWN]:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
