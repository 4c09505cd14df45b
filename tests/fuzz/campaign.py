"""Runs of many random networks, and the line that each failure leaves."""

from __future__ import annotations

import base64
import json
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime as ort

from tests.fuzz.faults import FAULTS
from tests.fuzz.graphs import Recipe, generate
from tests.fuzz.relations import Case, Failure, cases, failures
from tests.fuzz.searches import searched
from tests.fuzz.shrink import fewer_blocks, fewer_nodes

KINDS = (*FAULTS, *("",) * 6)
"""What consecutive seeds plant: each fault once, and nothing in six of them."""

SEARCH_EVERY = 15
"""One network of so many is searched: both parts of a campaign then take as long."""

MAX_MODEL_BYTES = 40_000
"""A larger model is not put into a line: its seed gives it."""


@dataclass
class Tally:
    """What a campaign has run and found."""

    graphs: int = 0
    plans: int = 0
    searches: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    named: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Adds what another process counted."""
        self.graphs += other.graphs
        self.plans += other.plans
        self.searches += other.searches
        self.seconds += other.seconds
        self.failures.update(other.failures)
        self.named.update(other.named)

    def lines(self) -> Iterator[str]:
        """The tally as text: numbers, failures by relation, planted faults by kind."""
        yield (
            f"{self.graphs} graphs, {self.plans} plans, {self.searches} searches, "
            f"{self.seconds:.0f} s of one core"
        )
        for relation, count in self.failures.most_common():
            yield f"  {count} x {relation}"
        words = ("named", "partly", "missed", "harmless", "wrong", "")
        for kind in FAULTS:
            counts = {word: self.named[kind, word] for word in words if self.named[kind, word]}
            if counts:
                yield f"  {kind}: " + ", ".join(
                    f"{n} {w or 'not blamed'}" for w, n in counts.items()
                )


def quiet() -> None:
    """Keeps the warnings of ONNX Runtime, and the time of others, out of a process's campaign."""
    os.nice(10)
    ort.set_default_logger_severity(4)
    warnings.simplefilter("ignore")


def recipe_for(number: int) -> Recipe:
    """The recipe of a seed."""
    return Recipe(number, KINDS[number % len(KINDS)])


def plan_failures(recipe: Recipe) -> list[tuple[Case, Failure]]:
    """The relations without a search that do not hold of a network."""
    return [(case, failure) for case in cases(generate(recipe)) for failure in failures(case)]


def search_failures(recipe: Recipe, tally: Tally) -> list[Failure]:
    """The relations of searches that do not hold of a network; counts what it names."""
    with tempfile.TemporaryDirectory() as folder:
        found = searched(generate(recipe), Path(folder))
    tally.searches += 1
    if recipe.fault:
        tally.named[recipe.fault, found.named] += 1
    return found.failures


def campaign(first: int, step: int, ends: float, out: Path, *, shrinks: bool = True) -> Tally:
    """Runs seeds from ``first`` in steps of ``step`` until the monotonic clock is at ``ends``.

    Each failure is a line of JSON in the file ``out``.
    """
    tally, number, begun = Tally(), first, time.monotonic()
    while time.monotonic() < ends:
        turn, place = divmod(number // step, SEARCH_EVERY)
        is_searched = place == 0
        recipe = Recipe(number, KINDS[turn % len(KINDS)]) if is_searched else recipe_for(number)
        lines: list[dict[str, Any]] = []
        if is_searched:
            for failure in search_failures(recipe, tally):
                tally.failures[failure.relation] += 1
                smaller = _smaller_search(recipe, failure) if shrinks else recipe
                lines.append(_line(smaller, failure))
        else:
            for case, failure in plan_failures(recipe):
                tally.failures[failure.relation] += 1
                if shrinks:
                    recipe, case = _smaller_plan(recipe, case, failure)
                lines.append(_line(recipe, failure, case))
            tally.plans += 2
        tally.graphs += 1
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        number += step
    tally.seconds = time.monotonic() - begun
    return tally


def _smaller_search(recipe: Recipe, failure: Failure) -> Recipe:
    def fails(smaller: Recipe) -> bool:
        found = search_failures(smaller, Tally())
        return any(f.is_like(failure) for f in found)

    return fewer_blocks(recipe, fails)


def _smaller_plan(recipe: Recipe, case: Case, failure: Failure) -> tuple[Recipe, Case]:
    base = case.plan.base

    def found(smaller: Recipe) -> Iterator[Case]:
        for other, told in plan_failures(smaller):
            if other.plan.base is base and told.is_like(failure):
                yield other

    least = fewer_blocks(recipe, lambda smaller: any(found(smaller)))
    smaller = next(found(least), None)
    if smaller is None:
        return recipe, case
    return least, fewer_nodes(smaller, failure)


def _line(recipe: Recipe, failure: Failure, case: Case | None = None) -> dict[str, Any]:
    """One failure for a file of JSON lines."""
    line: dict[str, Any] = {
        "seed": recipe.text(),
        "relation": failure.relation,
        "detail": failure.detail,
    }
    if case is not None:
        content = case.model.SerializeToString()
        line["plan"] = json.loads(case.plan.to_json())
        line["nodes"] = [f"{node.op_type} {node.name}" for node in case.model.graph.node]
        if len(content) <= MAX_MODEL_BYTES:
            line["model"] = base64.b64encode(content).decode()
    return line
