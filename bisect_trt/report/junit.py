"""Writes the result for CI: a test case per requirement and kind of input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from bisect_trt.base.display import xml_text
from bisect_trt.base.outcomes import InputKind, Validation, word_of
from bisect_trt.metrics.requirements import times
from bisect_trt.metrics.time_limits import JudgedLimit
from bisect_trt.report.first_lines import NOT_VALIDATED
from bisect_trt.report.headline import headline
from bisect_trt.report.record import Record
from bisect_trt.report.tables import judged_scores
from bisect_trt.report.text import validation_sentences, verdict
from bisect_trt.steps.verify import Verification


class _Case(NamedTuple):
    """A test case; ``failure``, ``error``, ``skipped`` give the reason, blank where it passed."""

    name: str
    failure: str = ""
    error: str = ""
    skipped: str = ""
    shown: str = ""


def as_junit(result: Record, limits: Sequence[JudgedLimit] = ()) -> str:
    """The suite of one run, with failures where the exit code is 1 or the plan overfitted.

    A gate adds its time ``limits``; one that could not be judged is an error.
    """
    cases = [*_requirements(result), *(_limit(limit, result) for limit in limits)]
    return _written(result, headline(result), cases)


def verification_as_junit(found: Verification) -> str:
    """The suite of one verification: each check, and each kind of input that was tested."""
    cases = []
    for check in found.checks:
        field = {False: "failure", None: "skipped", True: "shown"}[check.validation]
        cases.append(_Case(check.what, **{field: check.detail}))
    return _written(found, verdict(found), cases)


def _written(suite: Record | Verification, summary: str, own: Iterable[_Case]) -> str:
    """The suite as XML: its own cases, then those of the validation."""
    cases = [*own, *_validation(suite.validation)]
    counts = {
        "tests": len(cases),
        "failures": sum(bool(case.failure) for case in cases),
        "errors": sum(bool(case.error) for case in cases),
        "skipped": sum(bool(case.skipped) for case in cases),
    }
    attributes = {"name": "bisect-trt", "time": f"{suite.seconds:.3f}"}
    attributes |= {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuite", attributes)
    properties = {"summary": summary}
    if suite.validation is not None:
        properties["robustness"] = word_of(suite.validation) or "not tested"
        properties["validation"] = " ".join(validation_sentences(suite.validation))
    listed = ElementTree.SubElement(root, "properties")
    for name, value in properties.items():
        ElementTree.SubElement(listed, "property", {"name": name, "value": xml_text(value)})
    for case in cases:
        names = {"classname": xml_text(suite.model), "name": xml_text(case.name)}
        written = ElementTree.SubElement(root, "testcase", names)
        reasons = {"failure": case.failure, "error": case.error, "skipped": case.skipped}
        for tag, why in reasons.items():
            if why:
                ElementTree.SubElement(written, tag, message=xml_text(why))
        if case.shown:
            ElementTree.SubElement(written, "system-out").text = xml_text(case.shown)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _requirements(result: Record) -> Iterator[_Case]:
    """A case per requirement; all fail where the missed one is unknown."""
    scores = judged_scores(result.by_requirement)
    missed = [r for r, score in scores.items() if score > 1.0] or list(result.requirements)
    for text in result.requirements:
        score = f"Score: {times(scores.get(text, result.score))}"
        fails = not result.passed and text in missed
        failure = f"{result.sentence} {score}" if fails else ""
        yield _Case(f"requirement {text}", failure, shown=score)
    if result.strict and result.is_met:
        yield _Case("validated (--strict)", "" if result.is_validated else NOT_VALIDATED)


def _limit(limit: JudgedLimit, result: Record) -> _Case:
    """The case of a time limit."""
    # Where no plan passes, there was nothing to time.
    unknown = "error" if result.passed else "skipped"
    field = {True: "shown", False: "failure", None: unknown}[limit.met]
    return _Case(limit.text, **{field: limit.found})


def _validation(validation: Validation | None) -> Iterator[_Case]:
    """A case per kind of input; it fails where more miss than chance explains."""
    if validation is None:
        return
    for kind, tally in validation.tested:
        given = kind is InputKind.GIVEN
        # By identity: two kinds may have equal tallies.
        missed = any(tally is other for other in validation.missed)
        fails = not validation.given_hold if given else missed
        passed = f"{tally.passed} of {tally.tested} meet the requirement"
        if tally.worst:
            passed += f"; the worst, {tally.worst}, is at {times(tally.worst_score)}"
        bound = f", at least {100.0 * tally.lower_bound:.1f} % with 95 % confidence"
        shown = passed if given else passed + bound
        yield _Case(f"holds on {kind.words}", passed if fails else "", shown=shown)
