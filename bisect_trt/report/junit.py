"""The result for CI: a test case for each requirement, each kind of input it holds on, each pin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from bisect_trt.base.display import xml_text
from bisect_trt.base.outcomes import Tally, Validation, word_of
from bisect_trt.metrics.requirements import times
from bisect_trt.report.headline import headline
from bisect_trt.report.record import Record
from bisect_trt.report.summarise import judged_scores
from bisect_trt.report.text import validation_sentences, verdict
from bisect_trt.steps.verify import Verification


@dataclass(frozen=True)
class _Case:
    """``failure`` is why it fails, '' where it does not; ``shown`` what was seen, if that tells
    more; ``skipped`` why nothing is said of it.
    """

    name: str
    failure: str = ""
    shown: str = ""
    skipped: str = ""


def as_junit(result: Record) -> str:
    """A suite of one run; it has a failure where the exit code is 1, and where the plan holds by
    luck. A pin that nothing proves, as where a budget ended the search, is skipped. The properties
    are the sentence, the word and what it rests on.
    """
    properties = list(_properties(headline(result), result.validation))
    return _suite(result.model, result.seconds, properties, list(_cases(result)))


def verification_as_junit(found: Verification) -> str:
    """A suite of one verification: each way in which the plan was looked at, and each kind of input
    that it was tested on; it has a failure where the exit code is 1, and where the plan holds by
    luck.
    """
    cases = [
        _Case(
            check.what,
            check.detail if check.validation is False else "",
            check.detail if check.validation else "",
            check.detail if check.validation is None else "",
        )
        for check in found.checks
    ]
    cases += _validation(found.validation) if found.validation is not None else []
    properties = list(_properties(verdict(found), found.validation))
    return _suite(found.model, found.seconds, properties, cases)


def _suite(
    model: str, seconds: float, properties: Sequence[tuple[str, str]], cases: Sequence[_Case]
) -> str:
    suite = ElementTree.Element("testsuite", name="bisect-trt", time=f"{seconds:.3f}")
    listed = ElementTree.SubElement(suite, "properties")
    for name, value in properties:
        attributes = {"name": name, "value": xml_text(value)}
        ElementTree.SubElement(listed, "property", attributes)
    for one in cases:
        attributes = {"classname": xml_text(model), "name": xml_text(one.name)}
        problem = ElementTree.SubElement(suite, "testcase", attributes)
        if one.failure:
            ElementTree.SubElement(problem, "failure", message=xml_text(one.failure))
        if one.skipped:
            ElementTree.SubElement(problem, "skipped", message=xml_text(one.skipped))
        if one.shown:
            ElementTree.SubElement(problem, "system-out").text = xml_text(one.shown)
    counts = {"tests": len(cases), "failures": sum(bool(one.failure) for one in cases)}
    counts |= {"errors": 0, "skipped": sum(bool(one.skipped) for one in cases)}
    for name, count in counts.items():
        suite.set(name, str(count))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _properties(summary: str, validation: Validation | None) -> Iterator[tuple[str, str]]:
    yield "summary", summary
    if validation is not None:
        yield "robustness", word_of(validation) or "not tested"
        yield "validation", " ".join(validation_sentences(validation)[:2])


def _cases(result: Record) -> Iterator[_Case]:
    yield from _requirements(result)
    if result.validation is not None:
        yield from _validation(result.validation)
    for row in result.pins.itertuples() if not result.ranked else ():
        if not row.held:
            yield _Case(f"pin {row.layer} is needed", skipped="" if row.proved else "not proved")


def _requirements(result: Record) -> Iterator[_Case]:
    """Which requirement is missed; all of them where that cannot be told apart."""
    scores = judged_scores(result.by_requirement)
    missed = [r for r, score in scores.items() if score > 1.0] or list(result.requirements)
    for text in result.requirements:
        score = scores.get(text, result.score)
        failure = "" if result.passed or text not in missed else result.sentence
        failure = f"{failure} Score: {times(score)}" if failure else ""
        yield _Case(f"requirement {text}", failure, f"Score: {times(score)}")


def _validation(validation: Validation) -> Iterator[_Case]:
    """Of each kind of input that was tested: a failure where fewer pass than chance explains."""
    kinds = (
        ("the given inputs", validation.given),
        ("perturbed inputs", validation.perturbed),
        ("augmented inputs of the inputs", validation.augmented),
        ("inputs kept apart", validation.holdout),
    )
    missed = {id(kind) for kind in validation.missed}
    if not validation.given_hold:
        missed.add(id(validation.given))
    for words, kind in kinds:
        if kind.tested:
            shown = _counted(kind)
            if kind is not validation.given:
                shown += f", at least {100.0 * kind.lower_bound:.1f} % with 95 % confidence"
            yield _Case(f"holds on {words}", _counted(kind) if id(kind) in missed else "", shown)


def _counted(kind: Tally) -> str:
    worst = f"; the worst, {kind.worst}, is at {times(kind.worst_score)}" if kind.worst else ""
    return f"{kind.passed} of {kind.tested} meet the requirement{worst}"
