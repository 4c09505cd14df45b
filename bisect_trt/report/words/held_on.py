"""On what a plan was tested and with what confidence, in sentences."""

from __future__ import annotations

import math

from bisect_trt.core.holds import Holds, Robustness, word_of
from bisect_trt.numerics.scores import times
from bisect_trt.stations.case.given_inputs import FEW_INPUTS
from bisect_trt.stations.draws.fresh_test import WANTED


def holds_sentences(holds: Holds | None) -> list[str]:
    """On what the plan was tested, and with what confidence: what is claimed is what was tested."""
    if holds is None:
        return []
    given, size = holds.given, holds.set_size
    told = [f"given {given.passed} of {given.tested} {_inputs(size)}"]
    for kind, words in (
        (holds.redrawn, "redrawn {} of {} roundings"),
        (holds.variants, "variants {} of {}"),
        (holds.holdout, f"held out {{}} of {{}} {_inputs(holds.holdout_size)}"),
    ):
        if kind.tested:
            counted = words.format(kind.passed, kind.tested)
            counted += f" (sets of {size})" if size > 1 and kind is not holds.holdout else ""
            told.append(f"{counted}, at least {100.0 * kind.lower_bound:.1f} %")
    sure = {1: "", 2: " with 95 % confidence"}.get(len(told), ", each with 95 % confidence")
    said = f"{holds.word.value}{_asked_for(holds)}. Holds on" if holds.word else "holds on"
    if holds.word is Robustness.ROBUST:
        said = said.replace(". Holds on", ", of inputs like yours. Holds on")
    lines = [f"{said[0].upper()}{said[1:]} {'; '.join(told)}{sure}."]
    if holds.fitted:  # before what else is said: it is no claim on other inputs
        lines.append("Searched on the given inputs only (--robust 0): the set is fitted to them.")
    out = holds.holdout
    if out.worst and out.worst_score > 1.0:
        lines.append(f"The worst of those held out is {out.worst}: {times(out.worst_score)}.")
    if beyond := _beyond(holds):
        lines.append(beyond)
    if holds.unfinished:
        lines.append(
            "The run ended before the plan's test on fresh draws, and on inputs kept apart if "
            "there are any, was done; search.csv has what the search saw."
        )
    elif not holds.redrawn.tested:
        else_ = "" if holds.variants.tested else ", nor variants"
        lines.append(f"No copies with redrawn roundings were tested{else_}.")
    if holds.variants.tested:
        apart = holds.holdout.tested * holds.holdout_size
        few = given.tested * size + apart < FEW_INPUTS
        advice = ": give 20 inputs or more" if few else ""
        lines.append(f"Variants of the given inputs are no substitute for real ones{advice}.")
    return lines


def of_one_input(answer: str, holds: Holds | None) -> str:
    """``answer``, which says before anything else where it is by one input: that says little of
    others.
    """
    return f"With one input: {answer}" if holds is not None and holds.of_one else answer


def _inputs(size: int) -> str:
    """What is counted where ``size`` inputs are judged together."""
    return "inputs" if size == 1 else f"sets of {size} inputs"


def _asked_for(holds: Holds) -> str:
    """The share that the word is about, where the user asked for less than usual."""
    return f" for the {100.0 * holds.wanted:.3g} % asked for" if holds.wanted < WANTED else ""


def caption_of(holds: Holds | None) -> str:
    """What stands above a table of what the plan was tested on."""
    word = word_of(holds) or ""
    said = f"with one input, {word}" if holds is not None and holds.of_one else word
    if holds is not None and holds.word is Robustness.ROBUST:
        said = f"{said.rstrip(', ')}, of inputs like yours"
    return f"{said.rstrip(', ')}: on what it holds".removeprefix(": ").capitalize()


def meaning_of(holds: Holds | None) -> str:
    """What the word for a plan's tests means, where it is not plain."""
    if holds is None or holds.word in (None, Robustness.ROBUST):
        return ""
    wanted = f"{100.0 * holds.wanted:.3g} %"
    if holds.word is Robustness.LUCKY:
        return f"Lucky: some kind of input misses the {wanted} asked for by more than chance."
    if _beyond(holds):
        return ""  # it is among the sentences
    return (
        f"Undecided: the tests neither show the {wanted} asked for of every kind of input, nor "
        "refute it."
    )


def _beyond(holds: Holds) -> str:
    """Why a plan of which as many copies of the few inputs hold as were asked for is not called
    robust; blank for others.
    """
    if not holds.is_bounded or holds.leaves_room or holds.word is None:
        return ""
    if holds.holdout.worst_score > holds.reach:  # what was seen is more than what was expected
        return ""
    copies = "Copies" if holds.redrawn.tested else "Variants"
    if holds.of_one:
        return (
            f"{copies} of the one input hold as often as was asked; how far other inputs are from "
            "it one input does not tell."
        )
    whose, other = f"{holds.given.tested} inputs", "another input"
    far = "by how far their copies lie apart and how few inputs they are"
    if holds.set_size > 1:
        whose, other = f"set of {holds.set_size} inputs", "another set"
        far = "by how far its inputs lie apart"
    copies = f"{copies} of the {whose} hold as often as was asked, but {other} may use"
    if holds.set_size > 1 and math.isinf(holds.reach):
        return f"{copies} anything: so few inputs, or such a metric, do not tell."
    if math.isinf(holds.reach) and holds.has_margin:
        if not any(math.isinf(kind.worst_score) for kind in (holds.redrawn, holds.variants)):
            return f"{copies} anything: no copy shows any error, so nothing was at stake in them."
        return f"{copies} anything: some copies miss it by more than any number of tolerances."
    if math.isinf(holds.reach):  # a decision that never changed, or one that did; or no error
        return f"{copies} anything: what they show is whether they hold, not how nearly."
    return f"{copies} up to {times(holds.reach)}, {far}."
