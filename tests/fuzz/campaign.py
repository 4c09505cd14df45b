"""Runs of many random networks, and the line that each failure leaves."""

from __future__ import annotations

import base64
import json
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from bisect_trt.base.plan import Precision, PrecisionPlan
from tests.fuzz.faults import FAULTS
from tests.fuzz.graphs import Network, Recipe, generate
from tests.fuzz.relations import Case, Failure, cases, failures
from tests.fuzz.searches import searched
from tests.fuzz.shrink import fewer_blocks, fewer_nodes

KINDS = (*FAULTS, *("",) * 6)
"""What consecutive seeds plant: each fault once, and nothing in six of them."""

SEARCH_EVERY = 11
"""One network of so many is searched: ten are judged by plans alone for each search."""

MAX_MODEL_BYTES = 40_000
"""A larger model is not put into a line: its seed gives it."""

SHRINK_S = 60.0
"""The longest time that making a failure smaller begins another try after."""

WORDS = ("named", "partly", "missed", "wrong", "harmless", "unjudged", "")
"""What is said of a planted fault; empty: it harms nothing and is not blamed.

Unjudged: the outputs are so flat that FP32 itself is too coarse for the tolerance. Or a layer
of a chain misses alone: no chain.
"""


@dataclass
class Tally:
    """What a campaign has run and found: numbers by relation, by fault and word, by form and
    outcome of lists.
    """

    graphs: int = 0
    plans: int = 0
    searches: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    lists: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Adds what another process counted."""
        self.graphs += other.graphs
        self.plans += other.plans
        self.searches += other.searches
        self.seconds += other.seconds
        self.failures.update(other.failures)
        self.named.update(other.named)
        self.lists.update(other.lists)

    def as_json(self) -> str:
        """The tally as JSON, which :meth:`of_json` reads."""
        return json.dumps(vars(self), indent=1)

    @staticmethod
    def of_json(text: str) -> Tally:
        """The tally that :meth:`as_json` wrote."""
        data = json.loads(text)
        data |= {key: Counter(data[key]) for key in ("failures", "named", "lists")}
        return Tally(**data)

    def lines(self) -> Iterator[str]:
        """The tally as text: numbers, failures by relation, lists by form, planted faults."""
        yield (
            f"{self.graphs} graphs, {self.plans} plans, {self.searches} searches, "
            f"{self.seconds:.0f} s of one core"
        )
        for relation, count in self.failures.most_common():
            yield f"  {count} x {relation}"
        yield "lists: " + ", ".join(f"{n} {what}" for what, n in sorted(self.lists.items()))
        head = ("planted", *(word or "not blamed" for word in WORDS))
        yield "".join(f"{cell:>{20 if cell == 'planted' else 11}}" for cell in head)
        total = Counter[str]()
        for kind in FAULTS:
            counts = Counter({word: self.named[f"{kind}: {word}"] for word in WORDS})
            total.update(counts)
            yield f"{kind:>20}" + "".join(f"{counts[word]:>11}" for word in WORDS)
        yield f"{'all':>20}" + "".join(f"{total[word]:>11}" for word in WORDS)
        harmful = sum(total[word] for word in WORDS[:3])
        if harmful:
            yield f"{100 * total['named'] / harmful:.2f} % of {harmful} harmful faults are named"


def quiet() -> None:
    """Keeps the warnings of ONNX Runtime, and the time of others, out of a process's campaign."""
    os.nice(10)
    ort.set_default_logger_severity(4)
    warnings.simplefilter("ignore")


def recipe_for(number: int) -> Recipe:
    """The recipe of a seed."""
    return Recipe(number, KINDS[number % len(KINDS)])


def plan_failures(recipe: Recipe, tally: Tally | None = None) -> list[tuple[Case, Failure]]:
    """The relations without a search that do not hold of a network; counts what was read back."""
    found = []
    for case in cases(generate(recipe)):
        found += [(case, failure) for failure in failures(case)]
        if tally is not None:
            tally.plans += 1
            tally.lists.update(f"{r.form} {r.outcome}" for r in case.lists)
    return found


def search_failures(recipe: Recipe, tally: Tally) -> list[Failure]:
    """The relations of searches that do not hold of a network; counts what it names."""
    return _searched(generate(recipe), tally)


def _searched(network: Network, tally: Tally) -> list[Failure]:
    with tempfile.TemporaryDirectory() as folder:
        found = searched(network, Path(folder))
    tally.searches += found.is_run
    if network.recipe.fault:
        tally.named[f"{network.recipe.fault}: {found.named}"] += 1
    return found.failures


def campaign(
    first: int, step: int, ends: float, out: Path, done: Callable[[Tally], None], *, shrinks: bool
) -> None:
    """Runs seeds from ``first`` in steps of ``step`` until the monotonic clock is at ``ends``.

    Each failure is a line of JSON in the file ``out``, and the first of a network made smaller is
    another one. ``done`` gets the tally of each network.
    """
    number = first
    while time.monotonic() < ends:
        begun, tally = time.monotonic(), Tally(graphs=1)
        recipe, is_searched = chosen(number, step)
        lines, smaller = (_searched_lines if is_searched else _judged_lines)(recipe, tally)
        tally.failures.update(line["relation"] for line in lines)
        write_lines(out, lines)
        # Behind it: what crashes while it is made smaller has its line already.
        if lines and shrinks and time.monotonic() < ends:
            least = smaller(min(time.monotonic() + SHRINK_S, ends))
            write_lines(out, [least | {"smaller": True}])
        tally.seconds = time.monotonic() - begun
        done(tally)
        number += step


def chosen(number: int, step: int) -> tuple[Recipe, bool]:
    """The recipe of a seed of one of ``step`` processes, and whether it is searched."""
    turn, place = divmod(number // step, SEARCH_EVERY)
    if place:
        return recipe_for(number), False
    return Recipe(number, KINDS[turn % len(KINDS)]), True


def write_lines(out: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Adds lines of JSON to the file ``out``; a last line that was cut off stays one of its own."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with out.open("a+b", buffering=0) as file:  # at once: other processes write too
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())


Lines = list[dict[str, Any]]
Smaller = Callable[[float], dict[str, Any]]
"""Makes the first line smaller until the clock is at the time given."""


def _searched_lines(recipe: Recipe, tally: Tally) -> tuple[Lines, Smaller]:
    """The failures of a search, and what makes the first one smaller."""
    found = search_failures(recipe, tally)
    lines = [line_of(recipe, failure) for failure in found]
    return lines, lambda until: smaller_search(recipe, found[0], until)


def _judged_lines(recipe: Recipe, tally: Tally) -> tuple[Lines, Smaller]:
    """The failures of plans, and what makes the first one smaller."""
    found = plan_failures(recipe, tally)
    lines = [line_of(recipe, failure, case.model, case.plan) for case, failure in found]
    return lines, lambda until: _smaller_plan(recipe, *found[0], until)


def smaller_search(recipe: Recipe, failure: Failure, until: float) -> dict[str, Any]:
    """The line of a failed search, with fewer blocks, then nodes; what was planted stays."""

    def fails(network: Network) -> bool:
        return any(f.is_like(failure) for f in _searched(network, Tally()))

    least = fewer_blocks(recipe, lambda smaller: fails(generate(smaller)), until)
    network = generate(least)
    whole = Case(network.model, network.feeds, PrecisionPlan(Precision.FP16))
    # Without its layers the fault is not there, and another answer would be right.
    needed = {name for planted in network.planted for name in planted.layers}
    case = fewer_nodes(
        whole, lambda c: fails(replace(network, model=c.model, feeds=c.feeds)), until, needed
    )
    return line_of(least, failure, case.model)


def _smaller_plan(recipe: Recipe, case: Case, failure: Failure, until: float) -> dict[str, Any]:
    def found(smaller: Recipe) -> Iterator[Case]:
        for other, told in plan_failures(smaller):
            if other.plan.base is case.plan.base and told.is_like(failure):
                yield other

    least = fewer_blocks(recipe, lambda smaller: any(found(smaller)), until)
    whole = next(found(least), case)
    smaller = fewer_nodes(whole, lambda c: any(f.is_like(failure) for f in failures(c)), until)
    return line_of(least, failure, smaller.model, smaller.plan)


def line_of(
    recipe: Recipe,
    failure: Failure,
    model: onnx.ModelProto | None = None,
    plan: PrecisionPlan | None = None,
) -> dict[str, Any]:
    """One failure for a file of JSON lines."""
    line: dict[str, Any] = {
        "seed": recipe.text(),
        "relation": failure.relation,
        "detail": failure.detail,
    }
    if plan is not None:
        line["plan"] = json.loads(plan.to_json())
    if model is not None:
        content = model.SerializeToString()
        line["nodes"] = [f"{node.op_type} {node.name}" for node in model.graph.node]
        if len(content) <= MAX_MODEL_BYTES:
            line["model"] = base64.b64encode(content).decode()
    return line
