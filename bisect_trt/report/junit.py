"""The result for CI: a test case for each requirement, each kind of input it holds on, each pin."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from bisect_trt.core.holds import Holding, Holds, at_least
from bisect_trt.core.names import xml_text
from bisect_trt.numerics.requirements import times
from bisect_trt.report.requirement_scores import judged_scores
from bisect_trt.report.result import Result

Case = tuple[str, str]
"""A name, and why it fails; '' where it does not."""


def as_junit(result: Result) -> str:
    """A suite of one run; it has a failure where the exit code is 1, and where the plan holds by
    luck.
    """
    suite = ElementTree.Element("testsuite", name="bisect-trt", time=f"{result.seconds:.3f}")
    cases = list(_cases(result))
    failures = 0
    for name, failure in cases:
        attributes = {"classname": xml_text(result.model), "name": xml_text(name)}
        case = ElementTree.SubElement(suite, "testcase", attributes)
        if failure:
            failures += 1
            ElementTree.SubElement(case, "failure", message=xml_text(failure))
    for name, count in (("tests", len(cases)), ("failures", failures), ("errors", 0)):
        suite.set(name, str(count))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _cases(result: Result) -> Iterator[Case]:
    yield from _requirements(result)
    if result.holds is not None:
        yield from _holds(result.holds)
    for row in result.pins.itertuples() if not result.ranked else ():
        if not row.held:
            yield f"pin {row.layer} is needed", "" if row.proved else "not proved"


def _requirements(result: Result) -> Iterator[Case]:
    """Which requirement is missed; all of them where that cannot be told apart."""
    scores = judged_scores(result.by_requirement)
    missed = [r for r, score in scores.items() if score > 1.0] or list(result.requirements)
    for text in result.requirements:
        score = scores.get(text, result.score)
        failure = "" if result.passed or text not in missed else result.sentence
        yield f"requirement {text}", f"{failure} Score: {times(score)}" if failure else ""


def _holds(holds: Holds) -> Iterator[Case]:
    """Of each kind of input that was tested: a failure where fewer pass than chance explains."""
    few = holds.given.passed < at_least(holds.wanted_of_given, holds.given.tested)
    kinds = (
        ("the given inputs", holds.given, few),
        ("redrawn roundings", holds.redrawn, holds.redrawn.misses(holds.wanted)),
        ("variants of the inputs", holds.variants, holds.variants.misses(holds.wanted_of_variants)),
        ("inputs kept apart", holds.holdout, holds.holdout.misses(holds.wanted)),
    )
    for words, kind, misses in kinds:
        if kind.tested:
            yield f"holds on {words}", _shortfall(kind) if misses else ""


def _shortfall(kind: Holding) -> str:
    worst = f"; the worst, {kind.worst}, is at {times(kind.worst_score)}" if kind.worst else ""
    return f"{kind.passed} of {kind.tested} meet the requirement{worst}"
