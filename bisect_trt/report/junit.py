"""Writes the result for CI: a test case per requirement, kind of input and pin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from xml.etree import ElementTree

from bisect_trt.base.display import xml_text
from bisect_trt.base.outcomes import Tally, Validation, word_of
from bisect_trt.metrics.requirements import times
from bisect_trt.report.headline import headline
from bisect_trt.report.record import Record
from bisect_trt.report.tables import judged_scores
from bisect_trt.report.text import validation_sentences, verdict
from bisect_trt.steps.verify import Verification


class _Case(NamedTuple):
    """A test case; ``failure`` and ``skipped`` give the reason, blank where it passed."""

    name: str
    failure: str = ""
    skipped: str = ""
    shown: str = ""


class _Suite(NamedTuple):
    model: str
    seconds: float
    summary: str
    validation: Validation | None


def as_junit(result: Record) -> str:
    """The suite of one run, with failures where the exit code is 1 or the plan overfitted.

    Pins without a proof are skipped cases.
    """
    suite = _Suite(result.model, result.seconds, headline(result), result.validation)
    cases = [*_requirements(result), *_validation(result.validation)]
    for row in result.pins.itertuples() if not result.ranked else ():
        if not row.held:
            skipped = "" if row.proved else "not proved"
            cases.append(_Case(f"pin {row.layer} is needed", skipped=skipped))
    return _written(suite, cases)


def verification_as_junit(found: Verification) -> str:
    """The suite of one verification: each check, and each kind of input that was tested."""
    cases = []
    for check in found.checks:
        field = {False: "failure", None: "skipped", True: "shown"}[check.validation]
        cases.append(_Case(check.what, **{field: check.detail}))
    suite = _Suite(found.model, found.seconds, verdict(found), found.validation)
    return _written(suite, [*cases, *_validation(found.validation)])


def _written(suite: _Suite, cases: list[_Case]) -> str:
    """The suite as XML."""
    counts = {
        "tests": len(cases),
        "failures": sum(bool(case.failure) for case in cases),
        "errors": 0,
        "skipped": sum(bool(case.skipped) for case in cases),
    }
    attributes = {"name": "bisect-trt", "time": f"{suite.seconds:.3f}"}
    attributes |= {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuite", attributes)
    properties = {"summary": suite.summary}
    if suite.validation is not None:
        properties["robustness"] = word_of(suite.validation) or "not tested"
        properties["validation"] = " ".join(validation_sentences(suite.validation)[:2])
    listed = ElementTree.SubElement(root, "properties")
    for name, value in properties.items():
        ElementTree.SubElement(listed, "property", {"name": name, "value": xml_text(value)})
    for case in cases:
        names = {"classname": xml_text(suite.model), "name": xml_text(case.name)}
        written = ElementTree.SubElement(root, "testcase", names)
        for tag, why in (("failure", case.failure), ("skipped", case.skipped)):
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


def _validation(validation: Validation | None) -> Iterator[_Case]:
    """A case per kind of input; it fails where more miss than chance explains."""
    if validation is None:
        return
    kinds = (
        ("the given inputs", validation.given),
        ("perturbed inputs", validation.perturbed),
        ("augmented inputs", validation.augmented),
        ("inputs kept apart", validation.holdout),
    )
    missed = {id(kind) for kind in validation.missed}
    if not validation.given_hold:
        missed.add(id(validation.given))
    for words, kind in kinds:
        if kind.tested:
            passed = _passed(kind)
            bound = f", at least {100.0 * kind.lower_bound:.1f} % with 95 % confidence"
            shown = passed if kind is validation.given else passed + bound
            yield _Case(f"holds on {words}", passed if id(kind) in missed else "", shown=shown)


def _passed(kind: Tally) -> str:
    worst = f"; the worst, {kind.worst}, is at {times(kind.worst_score)}" if kind.worst else ""
    return f"{kind.passed} of {kind.tested} meet the requirement{worst}"
