"""Writes the answer as a verdict and labelled lines, which the screen and report.md share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.outcomes import AS_IS, BF16, VANISHING, Cause, ValidationVerdict
from bisect_trt.base.plan import Precision
from bisect_trt.report.build import build_command, why_no_tf32
from bisect_trt.report.choices import recommended
from bisect_trt.report.headline import (
    FIRST_KINDS,
    cause_sentence,
    next_steps,
    not_covered,
    of_given,
    proof_words,
)
from bisect_trt.report.record import Record
from bisect_trt.report.tables import pins_by_effect
from bisect_trt.report.text import (
    given_layers,
    layers_in_words,
    tested_words,
    validation_sentences,
)

SEPARATOR = " \u00b7 "

_VERDICTS: Mapping[ValidationVerdict, str] = {
    ValidationVerdict.VALIDATED: "VALIDATED",
    ValidationVerdict.OVERFITTED: "PASSES YOUR INPUTS ONLY",
    ValidationVerdict.INCONCLUSIVE: "NEEDS MORE DATA",
}
_NOT_JUDGED = {
    Cause.GOLDEN_MISMATCH: "the reference differs from the golden outputs",
    Cause.NOT_REPRODUCIBLE: "the engine is not reproducible",
    Cause.ENGINE_FAILED: "TensorRT does not build or run the model",
}


NOT_VALIDATED = "exit code 1, since --strict asks for a validated answer"


@dataclass(frozen=True)
class Line:
    """A line with its ``label``; the text is to be copied, and never broken, if ``is_code``."""

    label: str
    text: str
    is_code: bool = False


def verdict_name(result: Record) -> str:
    """The verdict in capitals, such as ``NEEDS MORE DATA``."""
    if not result.passed:
        return "NOT JUDGED" if result.cause in _NOT_JUDGED else "CANNOT BE MET"
    word = result.validation.word if result.validation is not None else None
    return "NOT VALIDATED" if word is None else _VERDICTS[word]


def verdict_line(result: Record) -> str:
    """The verdict and what it is of, such as ``VALIDATED after repair``."""
    if not result.passed:
        return ": ".join([verdict_name(result), *filter(None, [_NOT_JUDGED.get(result.cause)])])
    unfinished = result.out_of_time or result.interrupted
    so_far = " (search unfinished)" if unfinished else ""
    return f"{verdict_name(result)} {_how(result)}{of_given(result)}{so_far}"


def _how(result: Record) -> str:
    """What was done to pass."""
    chosen = recommended(result.choice_rows)
    pins = len(result.pinned)
    if result.cause is Cause.TF32:
        return "in FP32 with TF32 off"
    if chosen is not None and chosen.name == BF16:
        return "in BF16"
    if result.plan.base is Precision.FP32 or pins == result.layer_count:
        return "in FP32"
    changed = ["after repair"] if result.is_repaired else []
    changed += ["with weights fitted"] if result.is_fitted else []
    if pins:
        joined = "and" if result.is_fitted else "with"
        changed.append(f"{joined} {pins} of {layers_in_words(result)} in FP32")
    return " ".join(changed) or f"in {result.precision.value.upper()} as it is"


def facts_line(result: Record) -> str:
    """The model, its size, the inputs, who judged and the requirements."""
    name = PurePath(result.model).name.removesuffix(".onnx")
    judge = "emulated (no engine timed)"
    if result.engine is not None:
        is_timed = any(row.latency_ms is not None for row in result.choice_rows)
        judge = f"judged {'and timed ' if is_timed else ''}on {result.runner}"
    counts = [counted(given_layers(result), "layer"), counted(len(result.samples), "input")]
    return SEPARATOR.join([name, *counts, judge, ", ".join(result.requirements)])


def cause_line(result: Record) -> Line | None:
    """The cause and its share of the error; None where nothing is wrong."""
    chosen = recommended(result.choice_rows)
    is_right = result.passed and result.cause is Cause.NONE and not result.out_of_time
    is_right = is_right and chosen is not None and chosen.name == AS_IS
    sentence = cause_sentence(result)
    return Line("Cause", sentence) if sentence and not is_right else None


def lines_below(result: Record, *, on_page: bool = False) -> list[Line]:
    """What stands below the choices: layers, validation, build, report and what is next.

    A page in the run's folder names no path of it (``on_page``), as the folder may be moved.
    """
    lines = []
    if result.passed and result.pinned and len(result.pinned) < result.layer_count:
        names = [str(name) for name in pins_by_effect(result)["layer"]]
        lines.append(Line("In FP32", f"{some_of(names, 3)}; {proof_words(result)}"))
    validation = result.validation
    if validation is not None and validation.tested:
        is_sure = validation.word is ValidationVerdict.VALIDATED
        lines.append(Line("Validated" if is_sure else "Tested", tested_words(validation)))
    if result.passed:
        lines.append(Line("Build", build_command(result, in_folder=on_page), is_code=True))
        if reason := why_no_tf32(result):
            lines.append(Line("", f"--noTF32 is required: {reason}"))
    if not on_page:
        lines.append(Line("Report", f"{result.folder}/report.html", is_code=True))
    if result.strict and result.is_met and not result.is_validated:
        lines.append(Line("Strict", NOT_VALIDATED))
    lines += [Line("Next", "; ".join(steps))] if (steps := next_steps(result)) else []
    return lines


def note_lines(result: Record) -> list[Line]:
    """What limits the answer, the weightiest first."""
    said = [*validation_sentences(result.validation)[1:], *not_covered(result)]
    return [Line("Note", text) for text in dict.fromkeys([*_weighty(result), *said])]


def _weighty(result: Record) -> list[str]:
    """The findings without which the answer misleads."""
    return [finding.message for finding in result.findings if finding.weighty]


def finding_lines(result: Record, whole: str) -> list[str]:
    """The findings that may matter, at most two of a kind; ``whole`` has the others."""
    vanishing = sum(f.kind == VANISHING for f in result.findings)
    # What the line below the command to build says already is left out.
    said = (VANISHING, *FIRST_KINDS, *(["tf32"] if result.passed and why_no_tf32(result) else []))
    others = [f for f in result.findings if f.kind not in said]
    others.sort(key=lambda f: (not f.weighty, f.kind == "input"))
    kinds = Counter[str]()
    lines = []
    for finding in others:
        kinds[finding.kind] += 1
        if finding.weighty or kinds[finding.kind] <= 2:
            lines.append(finding.message)
    lines = lines[:5]
    if more := len(others) - len(lines):
        lines.append(f"{counted(more, 'more finding')} in {whole}")
    if vanishing:
        lines.append(
            f"values below {result.precision.value}'s smallest number become zero in {vanishing} "
            f"of the constants; {whole} names them"
        )
    return lines


def answer_lines(result: Record, *, on_page: bool = False) -> list[str]:
    """The first lines: verdict, facts, cause, then what stands below the choices, and notes."""
    cause = cause_line(result)
    below = lines_below(result, on_page=on_page)
    lines = [*([cause] if cause is not None else []), *below, *note_lines(result)]
    labelled = [f"{line.label}: {line.text}" if line.label else line.text for line in lines]
    return [verdict_line(result), facts_line(result), *labelled]
