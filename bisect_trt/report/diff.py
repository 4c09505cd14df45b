"""Compares two runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bisect_trt.base.display import counted, printable, some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import InputKind, Tally, ValidationVerdict, at_least
from bisect_trt.metrics.time_limits import JudgedLimit
from bisect_trt.report.choices import recommended
from bisect_trt.report.files import OwnedFolder, to_json
from bisect_trt.report.markdown import Page, Section, page_as_markdown
from bisect_trt.report.record import Record
from bisect_trt.report.tables import share_kept
from bisect_trt.report.text import per_cent

_MEASURES = ("engine_rel_range", "rel_range")
"""Columns of layer errors that can be compared, the engine's first."""

_NOT_ASKED = "not asked"
_LATENCY = "latency, ms"

_BOUND = re.compile(r"=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?=,|@|$)")
"""Matches the bounds in a requirement, but no number in an output's name."""

_FROM_WORST = (
    None,
    ValidationVerdict.OVERFITTED,
    ValidationVerdict.INCONCLUSIVE,
    ValidationVerdict.VALIDATED,
)


@dataclass(frozen=True)
class RunDiff:
    """The changes from one run to another."""

    before: Record
    after: Record
    worse: tuple[str, ...]  # reasons not to release the second run
    not_compared: tuple[str, ...]  # requirements of one run only, and shares that were lowered
    may_be_worse: bool  # whether ``not_compared`` leaves open if the second run is worse
    requirements: pd.DataFrame  # each requirement and time limit in both runs
    validation: pd.DataFrame  # each kind of input in both runs
    speed: pd.DataFrame  # the recommended choice and its time in both runs
    pins: pd.DataFrame  # gained and lost
    layers: pd.DataFrame  # layers whose error changed
    matched: int  # number of layers in both runs
    measure: str  # column of the layer errors compared
    unmatched_before: tuple[str, ...]  # layers of the first run only
    unmatched_after: tuple[str, ...]  # layers of the second run only
    changed: pd.DataFrame  # other differences, such as versions

    @property
    def gained(self) -> list[str]:
        """The layers that only the second run pins."""
        return [name for name in self.after.pinned if name not in self.before.pinned]

    @property
    def lost(self) -> list[str]:
        """The layers that only the first run pins."""
        return [name for name in self.before.pinned if name not in self.after.pinned]

    @property
    def rules_gained(self) -> list[str]:
        """The repair rules that only the second answer's graph was made by."""
        return [r for r in self.after.graph_rules if r not in self.before.graph_rules]

    @property
    def rules_lost(self) -> list[str]:
        """The repair rules that only the first answer's graph was made by."""
        return [r for r in self.before.graph_rules if r not in self.after.graph_rules]


def diff_runs(
    before: Record,
    after: Record,
    limits_before: Sequence[JudgedLimit] = (),
    limits_after: Sequence[JudgedLimit] = (),
) -> RunDiff:
    """Compares two runs of one model, and the time limits that a gate held each to.

    Raises:
        BadInputError: fewer than a tenth of the layers are in both runs.
    """
    first, second = (dict.fromkeys(map(str, r.layers["layer"])) for r in (before, after))
    both, fewer = len(first.keys() & second.keys()), min(len(first), len(second))
    if both < 0.1 * fewer or not both:  # runs of two models
        raise BadInputError(
            f"cannot be compared: of {fewer} layers {both} in both {before.folder} and "
            f"{after.folder}; give two runs of one model"
        )
    measure = next((m for m in _MEASURES if m in before.layers and m in after.layers), "")
    limits = _limits(limits_before, limits_after)
    requirements = pd.DataFrame([*_requirements(before, after), *limits])
    eased = (*_eased(before, after), *_not_judged(limits))
    # Open: a requirement that the second run dropped, or a new one that it misses.
    new = (requirements["before"] == _NOT_ASKED) & (requirements["after"] != "met")
    may_be_worse = bool(((requirements["after"] == _NOT_ASKED) | new).any())
    return RunDiff(
        before,
        after,
        worse=tuple(_worse(before, after, requirements)),
        not_compared=(*_in_one_run(before, after, requirements), *eased),
        may_be_worse=bool(eased) or may_be_worse,
        requirements=requirements,
        validation=_validation(before, after),
        speed=_speeds(before, after),
        pins=_pins(before, after),
        layers=_layers(before, after, measure),
        matched=both,
        measure=measure,
        unmatched_before=tuple(name for name in first if name not in second),
        unmatched_after=tuple(name for name in second if name not in first),
        changed=_changed(before, after),
    )


def _scores(result: Record) -> dict[str, float]:
    """Each requirement's score under the plan, else with everything reduced."""
    table = result.by_requirement
    if table.empty:
        return dict.fromkeys(result.requirements, math.nan)
    scores = table["plan_score"].fillna(table["reduced_score"])
    return dict(zip(table["requirement"].map(str), scores.map(float), strict=True))


def _requirements(before: Record, after: Record) -> list[dict[str, object]]:
    """A row per requirement, with its outcome and score in both runs."""
    old, new = _scores(before), _scores(after)
    # 2e-3 and 0.002 are one requirement; the second run's spelling is shown.
    spelling = {_normalised(text): text for text in (*old, *new)}
    old = {spelling[_normalised(text)]: score for text, score in old.items()}
    new = {spelling[_normalised(text)]: score for text, score in new.items()}
    rows: list[dict[str, object]] = []
    for text in dict.fromkeys((*old, *new)):
        row: dict[str, object] = {"requirement": text}
        row |= {"before": _outcome(text, old, before), "after": _outcome(text, new, after)}
        row |= {"score before": old.get(text, math.nan), "score after": new.get(text, math.nan)}
        rows.append(row)
    return rows


def _limits(before: Sequence[JudgedLimit], after: Sequence[JudgedLimit]) -> list[dict[str, object]]:
    """A row per time limit, with its outcome in both runs."""
    old, new = ({limit.text: limit.outcome for limit in limits} for limits in (before, after))
    return [
        {
            "requirement": text,
            "before": old.get(text, _NOT_ASKED),
            "after": new.get(text, _NOT_ASKED),
        }
        for text in dict.fromkeys((*old, *new))
    ]


def _not_judged(limits: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Time limits that were met and cannot be judged any more, a sentence each."""
    for row in limits:
        if (row["before"], row["after"]) == ("met", "not judged"):
            yield f"{row['requirement']} is met before, and could not be judged after"


def _speeds(before: Record, after: Record) -> pd.DataFrame:
    """The recommended choice, its latency and what it keeps of the saving; empty without times."""
    old, new = _speed_in_words(before), _speed_in_words(after)
    rows = [
        {"what": name, "before": old[name], "after": new[name], "change": ""}
        for name in old
        if old[name] or new[name]
    ]
    first, second = (_speed_json(result)["latency_ms"] for result in (before, after))
    for row in rows:
        if row["what"] == _LATENCY and first is not None and second is not None:
            row["change"] = f"{100.0 * (second / first - 1.0):+.1f} %"
    return pd.DataFrame([row for row in rows if len(rows) > 1])


def _speed_in_words(result: Record) -> dict[str, str]:
    """The recommended choice and its time, blank where it is not known."""
    chosen = recommended(result.choice_rows)
    ms = chosen.latency_ms if chosen is not None else None
    return {
        "recommended": chosen.name if chosen is not None else "",
        _LATENCY: "" if ms is None else f"{ms:.3f}",
        "saving kept": share_kept(chosen) if chosen is not None else "",
    }


def _speed_json(result: Record) -> dict[str, Any]:
    """The recommended choice and its time for machines."""
    chosen = recommended(result.choice_rows)
    return {
        "recommended": chosen.name if chosen is not None else None,
        "latency_ms": chosen.latency_ms if chosen is not None else None,
        "saving_kept": chosen.saving_kept if chosen is not None else None,
        "estimated_latency": chosen is not None and chosen.is_estimated,
    }


def _normalised(text: str) -> str:
    """A requirement with its bounds written in one way, without blanks."""
    close = re.sub(r"\s*([<>=,]+)\s*", r"\1", text.strip())
    return _BOUND.sub(lambda bound: f"={float(bound[1])!r}", close)


def _outcome(text: str, scores: dict[str, float], result: Record) -> str:
    if text not in scores:
        return _NOT_ASKED
    if math.isnan(scores[text]):
        return "met" if result.passed else "not known"
    return "met" if scores[text] <= 1.0 else "missed"


def _in_one_run(before: Record, after: Record, requirements: pd.DataFrame) -> Iterator[str]:
    """Requirements that only one run has, a sentence each."""
    for row in requirements.to_dict(orient="records"):
        for here, there, run in (("before", "after", after), ("after", "before", before)):
            if row[there] == _NOT_ASKED:
                yield f"{row['requirement']} is {row[here]} {here}, and not asked in {run.folder}"


def _eased(before: Record, after: Record) -> Iterator[str]:
    """Shares of inputs that the second run lowered and does not reach anyway, a sentence each."""
    was, now = before.validation, after.validation
    if was is None or now is None:
        return
    below = now.given.passed < at_least(was.wanted_of_given, now.given.tested)
    if now.wanted_of_given < was.wanted_of_given and below:
        old, new = per_cent(was.wanted_of_given), per_cent(now.wanted_of_given)
        yield f"{old} of the given inputs had to pass before, and {new} in {after.folder}"
    copied = ((now.perturbed, was.wanted), (now.augmented, was.wanted_of_augmented))
    below = any(kind.tested and kind.lower_bound < wanted for kind, wanted in copied)
    if not was.fitted and (now.fitted or now.wanted < was.wanted) and below:
        old, new = per_cent(was.wanted), "none" if now.fitted else per_cent(now.wanted)
        yield f"{old} of unseen inputs had to pass before, and {new} in {after.folder}"


def _worse(before: Record, after: Record, requirements: pd.DataFrame) -> Iterator[str]:
    """Reasons not to release the second run, a sentence each."""
    missed = (requirements["before"] == "met") & (requirements["after"] == "missed")
    for text in requirements.loc[missed, "requirement"]:
        yield f"{text} was met and is missed."
    if before.passed and not after.passed:
        yield f"A plan met the requirements and none does now: {after.sentence}"
    elif before.is_met and not after.is_met:
        yield "The run ended with 0 and now with 1: its budget left a plan that a test refutes."
    if before.validation is not None and after.validation is not None:
        was, now = before.validation.word, after.validation.word
        if _FROM_WORST.index(now) < _FROM_WORST.index(was):
            what = now if now is not None else "not even right on the given inputs"
            yield f"The plan was {was} and is {what}."


def _validation(before: Record, after: Record) -> pd.DataFrame:
    rows = []
    for kind in InputKind:
        tallies = [
            r.validation.of(kind) if r.validation is not None else Tally() for r in (before, after)
        ]
        if not any(tally.tested for tally in tallies):
            continue
        row: dict[str, object] = {"inputs": kind.value}
        for when, tally in zip(("before", "after"), tallies, strict=True):
            row[when] = f"{tally.passed} of {tally.tested}" if tally.tested else ""
            row[f"at least {when}"] = tally.lower_bound or math.nan
            row[f"worst score {when}"] = tally.worst_score
        rows.append(row)
    return pd.DataFrame(rows)


def _pins(before: Record, after: Record) -> pd.DataFrame:
    """Pins gained, lost, or lost with the layer, each with its sensitivity."""
    present = {*map(str, after.layers["layer"]), *after.pinned}
    lost = {n: "lost" if n in present else "lost, no such layer" for n in before.pinned}
    gained = dict.fromkeys(after.pinned, "gained")
    rows = []
    for result, changes, other in ((before, lost, after), (after, gained, before)):
        scores = result.layers.set_index("layer").get("sensitivity", pd.Series(dtype=float))
        for name, change in changes.items():
            if name not in other.pinned:
                score = scores.get(name, math.nan)
                rows.append({"layer": name, "change": change, "sensitivity": score})
    return pd.DataFrame(rows, columns=["layer", "change", "sensitivity"])


def _layers(before: Record, after: Record, measure: str) -> pd.DataFrame:
    """Layers whose error changed, the worsened first, each part by the size of the change."""
    columns = ["layer", "op", "change", "before", "after", "ratio"]
    if not measure:
        return pd.DataFrame(columns=columns)
    finite = f"{measure.removesuffix('rel_range')}finite"
    kept = ["layer", "op", measure, finite]
    both = before.layers[kept].merge(after.layers[kept[:1] + kept[2:]], on="layer")
    old, new = (both[f"{measure}_{side}"].astype(float) for side in ("x", "y"))
    was, now = (both[f"{finite}_{side}"].astype("boolean").fillna(True) for side in ("x", "y"))
    # Errors of non-finite layers cover their finite values only, so flags outrank the ratio.
    ratio = (new / old).where(old != new, 1.0)  # 0 / 0 is no change
    # Other inputs of the same kind move errors by up to half.
    tolerated = 1.5
    change = pd.Series("same", index=both.index)
    change[(ratio > tolerated)] = "worse"
    change[(ratio < 1.0 / tolerated)] = "better"
    change[(was & ~now).astype(bool)] = "worse, not finite any more"
    change[(~was & now).astype(bool)] = "better, finite now"
    table = both[["layer", "op"]].assign(change=change, before=old, after=new, ratio=ratio)
    better = change.str.startswith("better")
    table = table.assign(better=better, size=ratio.where(~better, 1.0 / ratio))[change != "same"]
    by = ["better", "size"]
    return table.sort_values(by, ascending=[True, False], kind="stable")[columns]


def _changed(before: Record, after: Record) -> pd.DataFrame:
    """The settings and versions that differ."""
    old, new = _made_with(before), _made_with(after)
    names = dict.fromkeys((*old, *new))
    rows = [{"what": n, "before": old.get(n, ""), "after": new.get(n, "")} for n in names]
    return pd.DataFrame([row for row in rows if row["before"] != row["after"]])


def _made_with(result: Record) -> dict[str, str]:
    validation = result.validation
    unseen = "" if validation is None or validation.fitted else per_cent(validation.wanted)
    return {
        "model": result.model,
        "precision": result.precision.value,
        "runner": result.runner,
        "cause": result.cause.value,
        "graph": _graph(result),
        "plan's base": result.plan.base.value,
        "pins": str(len(result.pinned)),
        "layers": str(result.layer_count),
        "inputs": some_of([printable(name) for name in result.samples], 4),
        "of the given inputs": per_cent(result.given_share),
        "of unseen inputs": unseen,
        "threads": str(result.threads),
        **result.versions,
    }


MARKDOWN = "diff.md"
RECORD = "diff.json"
FOLDER = OwnedFolder("bisect-trt diff", frozenset({"diff.html", MARKDOWN, RECORD}), RECORD)
"""diff.html is here because version 0.4.0 wrote it."""


def as_page(found: RunDiff) -> Page:
    """The comparison as a page, the most important section first."""
    sections = [
        Section("Requirements", found.requirements),
        Section("Validation", found.validation),
        Section("Time", found.speed),
        Section("Pins", found.pins, [_pins_line(found)]),
        Section("Layers", found.layers, list(_layer_lines(found))),
        Section("What else differs", found.changed),
    ]
    shown = [s for s in sections if len(s.table) or s.lines]
    title = f"bisect-trt: {found.before.folder} and {found.after.folder}"
    good = not (found.worse or found.not_compared)
    return Page(title, headline(found), good, shown, [*found.worse[1:], *_graph_lines(found)])


def headline(found: RunDiff) -> str:
    """Says in one sentence whether the second run is worse, and why."""
    limits = f"cannot be compared: {'; '.join(found.not_compared)}." if found.not_compared else ""
    if found.worse:
        return f"Worse: {found.worse[0]}" + (f" The rest {limits}" if limits else "")
    if limits:
        return limits
    if found.after.passed and not found.before.passed:
        return "Better: no plan met the requirements, and now one does."
    return "Not worse: every requirement that was met still is."


def diff_record(found: RunDiff) -> dict[str, Any]:
    """The content of diff.json."""
    return {
        "kind": FOLDER.command,
        "before": str(found.before.folder),
        "after": str(found.after.folder),
        "worse": list(found.worse),
        "not_compared": list(found.not_compared),
        "requirements": found.requirements.to_dict(orient="records"),
        "validation": found.validation.to_dict(orient="records"),
        "time_before": _speed_json(found.before),
        "time_after": _speed_json(found.after),
        "pins_gained": found.gained,
        "pins_lost": found.lost,
        "graph_before": _word(found.before),
        "graph_after": _word(found.after),
        "rules_gained": found.rules_gained,
        "rules_lost": found.rules_lost,
        "measure": found.measure,
        "layers": found.layers.to_dict(orient="records"),
        "matched": found.matched,
        "unmatched_before": list(found.unmatched_before),
        "unmatched_after": list(found.unmatched_after),
    }


def write_diff(found: RunDiff, folder: Path) -> None:
    """Writes diff.md and diff.json into a folder of their own."""
    FOLDER.check(folder)
    with FOLDER.written(folder) as draft:
        markdown = page_as_markdown(as_page(found), more=RECORD)
        (draft / MARKDOWN).write_text(markdown, encoding="utf-8", errors="replace")
        (draft / RECORD).write_text(to_json(diff_record(found)) + "\n", encoding="utf-8")


def _word(result: Record) -> str:
    return "repaired" if result.is_repaired else "original"


def _graph(result: Record) -> str:
    """The graph of a run's answer, such as "repaired (fold-bn)"."""
    rules = ", ".join(result.graph_rules)
    return f"{_word(result)} ({rules})" if rules else _word(result)


def _graph_lines(found: RunDiff) -> Iterator[str]:
    """Says that the two answers are for other graphs, where they are."""
    before, after = found.before, found.after
    if before.is_repaired != after.is_repaired:
        yield f"The first answer is for the {_graph(before)} graph, the second for the " + (
            f"{_graph(after)} one: their layers are compared by name."
        )
    elif found.rules_gained or found.rules_lost:
        came, went = (", ".join(r) or "none" for r in (found.rules_gained, found.rules_lost))
        yield f"Both answers are for a repaired graph; rules that came: {came}, that went: {went}."


def _pins_line(found: RunDiff) -> str:
    old, new = len(found.before.pinned), len(found.after.pinned)
    kept = new - len(found.gained)
    return f"{old} before, {new} after: {kept} kept, {len(found.gained)} gained, {old - kept} lost."


def _layer_lines(found: RunDiff) -> Iterator[str]:
    if found.measure:
        worse = int(found.layers["change"].str.startswith("worse").sum())
        yield (
            f"Of {found.matched} layers with the same name in both, {worse} are worse and "
            f"{len(found.layers) - worse} better by more than half, by {found.measure} with "
            "everything reduced."
        )
    else:
        yield "The layers' errors are not known in both runs, so they are not compared."
    for names, run in ((found.unmatched_before, "first"), (found.unmatched_after, "second")):
        if names:
            yield (
                f"{counted(len(names), 'layer')} of the {run} run could not be matched by name "
                f"with any of the other: {some_of(names, 8)}."
            )
