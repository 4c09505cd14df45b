"""The answer's first words, their colour and what they send the reader to do."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO

import pandas as pd
import pytest
from rich.console import Console

from bisect_trt.base.outcomes import Cause, CauseFound, ErrorShare, Finding, Tally
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.metrics.requirements import NOTHING_ALLOWED
from bisect_trt.metrics.statistics import lower_bound
from bisect_trt.report.first_lines import answer_lines
from bisect_trt.report.headline import cause_sentence, headline, next_step, proof_words
from bisect_trt.report.html import as_html
from bisect_trt.report.markdown import as_markdown
from bisect_trt.report.repairs import RepairFacts, RepairRow
from bisect_trt.report.summarise import Result
from bisect_trt.report.tables import repairs_table
from bisect_trt.report.terminal import print_verdict
from bisect_trt.report.text import (
    of_one_input,
    search_sentences,
    validation_sentences,
    verdict_words,
)
from bisect_trt.search.find import Regime
from tests.report.synthetic import synthetic_result, with_choices

RESULT = synthetic_result(200)
EDIT = RepairRow(
    rule="fold-bn",
    nodes=("a",),
    sources=(),
    sentence="folds",
    identity="x",
    constants=tuple((f"c{n}", "1", "2") for n in range(5)),
    largest_before=None,
    largest_after=None,
    nodes_added=0,
    score_without=None,
    missed_without=None,
)


def test_of_many_changed_constants_three_are_named() -> None:
    (said,) = repairs_table(RepairFacts((EDIT,)))["constants"]
    assert said == "c0: 1, then 2; c1: 1, then 2; c2: 1, then 2 and 2 more"


def pinning(share: float) -> Result:
    """A validated plan that pins so many of 20 layers."""
    result = synthetic_result(20)
    count = round(20 * share)
    pins = pd.concat([result.pins] * count, ignore_index=True)
    names = frozenset(map(str, result.layers["layer"][:count]))
    return replace(result, pins=pins, plan=PrecisionPlan(Precision.FP16, names))


def test_the_page_says_what_the_plan_was_tested_on() -> None:
    validation = RESULT.validation
    assert validation is not None
    undecided = replace(validation, holdout=Tally(11, 12, 0.66, 1.2, "/pages/page_034.npz"))
    page = as_html(replace(RESULT, validation=undecided))
    assert "<caption>Inconclusive</caption>" in page and "<bdi>page_034.npz</bdi>" in page


def test_a_held_out_input_that_misses_is_named_and_no_smaller_limit_told() -> None:
    """ "May use up to 1.43 times the tolerance" stood beside one that used 1,578."""
    assert RESULT.validation is not None
    bounded = replace(RESULT.validation, given=Tally(8, 8), prediction_limit=1.43, has_margin=True)
    bounded = replace(bounded, perturbed=Tally(72, 72, 0.96, 0.9, "x"), augmented=Tally())
    missed = replace(bounded, holdout=Tally(12, 13, 0.66, 1578.0, "page_034"))
    met = replace(bounded, holdout=Tally(13, 13, 0.79, 0.9, "page_034"))
    said = "The worst of those held out is page_034: 1.58e+03 times the tolerance."
    assert said in validation_sentences(missed)[1:2] and "1.43" not in " ".join(
        validation_sentences(missed)
    )
    assert "up to 1.43 times" in " ".join(validation_sentences(met))


def test_a_miss_where_none_is_allowed_is_no_number() -> None:
    """A decision that changed scores 1e9: nobody has such a tolerance."""
    decided = replace(RESULT, base_score=NOTHING_ALLOWED)
    decided = replace(decided, layers=decided.layers.assign(sensitivity=NOTHING_ALLOWED))
    decided = replace(decided, inputs=decided.inputs.assign(plan_score_emulated=NOTHING_ALLOWED))
    decided = replace(decided, pins=decided.pins.assign(score_without=NOTHING_ALLOWED))
    console = Console(file=StringIO(), width=200)
    print_verdict(console, decided, verbose=True)
    assert isinstance(console.file, StringIO)
    shown = [console.file.getvalue(), as_markdown(decided)]
    shown.append(as_html(decided).partition("<script")[0])
    for text in shown:
        assert "none" in text and "allowed" in text
        assert "e+09" not in text and "000000000" not in text


def test_a_ranking_that_no_layer_was_measured_for_is_called_so() -> None:
    ranked = replace(RESULT, ranked=True)
    assert "chosen by measured impact; whether each" in headline(ranked)
    unmeasured = replace(ranked, layers=ranked.layers.assign(sensitivity=math.nan))
    assert "chosen by its own error; whether each" in headline(unmeasured)


def repaired(pins: int, layers: int, **more: object) -> Result:
    """A result whose recommended row is a graph of 20 layers, repaired to have so many."""
    result = with_choices(synthetic_result(20))
    names = frozenset(map(str, result.layers["layer"][:pins]))
    plan = replace(result.plan, pinned=names, **more)  # type: ignore[arg-type]
    rows = [replace(row, repaired=row.recommended) for row in result.choice_rows]
    table = pd.concat([result.pins] * pins, ignore_index=True) if pins else result.pins.head(0)
    # No held layer has a proof.
    table = table.assign(layer=sorted(names), held=bool(plan.held), proved=not plan.held)
    repair = RepairFacts((replace(EDIT, rule="scale"),))
    return replace(
        result, plan=plan, pins=table, choice_rows=rows, repair=repair, layer_count=layers
    )


def test_a_repair_is_told_and_not_asked_for() -> None:
    assert headline(repaired(0, 20)).startswith(
        "The graph is repaired (scale): no layer needs FP32 and the requirement is met."
    )
    assert headline(repaired(4, 20)).startswith(
        "The graph is repaired (scale). Keep 4 of 20 layers in FP32 and the requirement is met; "
        "each proved to be needed."
    )


def test_layers_of_a_repaired_graph_are_called_so_where_it_has_another_number() -> None:
    """ "4 of 68 layers" stood beside "63 layers"."""
    other, same = answer_lines(repaired(4, 24)), answer_lines(repaired(4, 20))
    assert other[0] == "VALIDATED after repair with 4 of the repaired graph's 24 layers in FP32"
    assert same[0] == "VALIDATED after repair with 4 of 20 layers in FP32"
    assert " 20 layers " in other[1] and " 20 layers " in same[1]


def test_what_was_held_is_not_said_to_be_proved() -> None:
    held = frozenset(map(str, synthetic_result(20).layers["layer"][:4]))
    kept = repaired(4, 20, held=held)
    assert proof_words(kept) == "kept by the repair"
    assert headline(kept).startswith("The graph is repaired (scale): 4 layers stay in FP32 and")
    asked = replace(kept, command="bisect-trt run m.onnx --input x.npz --keep-fp32 Pow")
    assert proof_words(asked) == "held from the start"  # whose they are is not known
    rows = [replace(row, repaired=False) for row in asked.choice_rows]
    given = replace(asked, choice_rows=rows)
    assert proof_words(given) == "held by --keep-fp32"
    assert headline(given).startswith(
        "Keep 4 of 20 layers in FP32 (held by --keep-fp32) and the requirement is met."
    )
    some = replace(given, plan=replace(given.plan, held=frozenset([min(held)])))
    assert proof_words(some) == "each of the others proved to be needed"
    assert "(1 of them held by --keep-fp32) and" in headline(some)
    # What stands between held layers is chosen by no search either.
    moved = replace(some, pins=some.pins.assign(inherited=~some.pins["layer"].isin([min(held)])))
    assert proof_words(moved) == "held by --keep-fp32"
    engine = replace(given, command="", findings=[Finding("held", "a", "no FP16 kernel")])
    assert proof_words(engine) == "held for the engine"


def test_a_proof_at_less_than_the_tolerance_says_so() -> None:
    pins = RESULT.pins.assign(tolerance_share=0.8)
    assert proof_words(replace(RESULT, pins=pins)) == (
        "each proved to be needed at 0.8 of the tolerance"
    )


def test_a_model_that_is_reduced_already_asks_for_its_source() -> None:
    lifted = [Finding("lifted", "", "59 nodes of 90 run in FP16 in the source already")]
    source = "What next: give the FP32 model that it was made from"
    assert next_step(replace(RESULT, findings=lifted)) == f"{source}."
    assert next_step(replace(pinning(0.95), findings=lifted)).startswith(f"{source}; run every")
    assert next_step(replace(RESULT, findings=lifted, passed=False)) == f"{source}."
    assert source not in next_step(replace(RESULT, findings=lifted, interrupted=True))


def test_where_no_plan_passes_an_fp32_engine_that_does_is_named() -> None:
    """FP32 that is TF32 may pass by a hair where pins of TF32 do not."""
    outputs = RESULT.outputs[RESULT.outputs["baseline"] == "fp32"]
    fp32 = outputs.assign(baseline="tensorrt fp32")
    failed = replace(RESULT, passed=False, runner="tensorrt", outputs=fp32)
    assert failed.cause is Cause.OVERFLOW and failed.engine is not None
    assert next_step(failed).startswith("What next: ship it in FP32, whose engine meets")
    missed = replace(failed, outputs=fp32.assign(outcome="fail"))
    for other in (
        missed,
        replace(failed, outputs=outputs),
        replace(failed, cause=Cause.NOT_REPRODUCIBLE),
    ):
        assert next_step(other) == ""


def test_an_input_that_asks_for_most_pins_is_named() -> None:
    """Also beside a plan that holds: one near tie asked for 86 of 252 layers, and nobody said."""
    found = pinning(0.5)
    kinds = ("given", "perturbed", "augmented")
    rows = [
        {"pins": 2, "given_passed": 7, "perturbed_passed": 7, "augmented_passed": 7, "odd": "c4"},
        {"pins": 4, "given_passed": 7, "perturbed_passed": 7, "augmented_passed": 8, "odd": "c4"},
        {"pins": 10, "given_passed": 8, "perturbed_passed": 8, "augmented_passed": 8, "odd": None},
    ]
    table = pd.DataFrame(rows).rename(columns={"odd": "given_missed"})
    for kind in kinds:
        table[f"{kind}_tested"], table[f"{kind}_share"] = 8, table[f"{kind}_passed"] / 8
    table["worst_score"] = [90.0, 8.0, 0.9]
    named = replace(found, tradeoff=table)
    said = "look at c4: with 2 layers in FP32 no other of 8 given inputs misses (if it is a near"
    assert next_step(named).startswith(f"What next: {said}")
    # Fewer than half of the pins that hold on all that was looked at are worth a try.
    less = table.assign(
        given_passed=8, perturbed_passed=8, augmented_passed=8, given_missed=None, worst_score=0.9
    )
    assert next_step(replace(found, tradeoff=less)) == (
        "What next: try fewer: with 2 layers in FP32 all of 24 inputs and copies passed "
        "(tradeoff.csv)."
    )
    # Where copies of the others miss as well, or it misses by little, it is no odd input.
    spread, near = table.assign(perturbed_share=[0.2, 0.4, 1.0]), table.assign(worst_score=1.4)
    for other in (spread, near):
        assert next_step(replace(found, tradeoff=other)) == next_step(found) == ""


def test_few_inputs_are_advised_to_be_more() -> None:
    validation = RESULT.validation
    assert validation is not None
    augmented, advice = Tally(80, 80, 0.95, 0.9, "x"), "give 20 inputs or more"
    for given, apart, told in ((8, 0, True), (16, 0, True), (16, 4, False), (20, 0, False)):
        few = replace(
            validation,
            given=Tally(given, given),
            holdout=Tally(apart, apart, lower_bound(apart, apart) if apart else 0.0),
            augmented=augmented,
        )
        (line,) = (line for line in validation_sentences(few) if "no substitute" in line)
        assert (advice in line) == told
    none = replace(validation, augmented=Tally())
    assert not any("no substitute" in line for line in validation_sentences(none))
    still = replace(validation, perturbed=Tally(), augmented=augmented)
    for found, told in (
        (still, True),
        (none, False),
        (replace(validation, augmented=augmented), False),
    ):
        assert any(s.startswith("No perturbed") for s in validation_sentences(found)) == told


def test_with_one_input_the_answer_says_so_before_anything_else() -> None:
    result = synthetic_result(4)
    assert result.validation is not None and result.validation.given.tested > 1
    several, word = result.validation, result.validation.word
    assert word is not None
    called = f"{word.value.capitalize()}. Passed:"
    assert validation_sentences(several)[0].startswith(f"{called} 64 of 64 inputs ")
    for passed, said in ((1, called), (0, "Passed:")):
        one = replace(several, given=Tally(passed, 1), wanted_of_given=1.0)
        assert validation_sentences(one)[0].startswith(f"{said} {passed} of 1 ")
        assert of_one_input("The plan holds.", one) == "With one input: The plan holds."
        page = as_html(replace(result, validation=one))
        assert headline(replace(result, validation=one)).startswith("With one input: Keep ")
        assert f"<caption>{verdict_words(one) or 'What it holds on'}</caption>" in page
    alone = replace(several, given=Tally(1, 1), prediction_limit=math.inf)
    assert validation_sentences(alone)[0].startswith("Inconclusive. Passed: 1 of 1 inputs")
    assert validation_sentences(alone)[1] == (
        "Copies of your input pass often enough, but one input is not enough."
    )
    unknown = replace(alone, given=Tally(2, 2), has_margin=False)
    assert (
        "any multiple of the tolerance: the metric says whether" in validation_sentences(unknown)[1]
    )
    exact = replace(unknown, has_margin=True)
    assert "no copy shows any error, so" in validation_sentences(exact)[1]
    beyond = replace(exact, perturbed=replace(exact.perturbed, worst_score=math.inf))
    assert "some copies give NaN or infinite values" in validation_sentences(beyond)[1]
    few = replace(several, given=Tally(3, 3), prediction_limit=1.25)
    assert validation_sentences(few)[0].startswith("Inconclusive. Passed: 3 of 3 inputs")
    assert validation_sentences(few)[1] == (
        "Copies pass often enough, but another input may use up to 1.25 times the tolerance. With "
        "few inputs we also require a safety margin."
    )
    assert validation_sentences(replace(few, given=Tally(59, 59)))[0].startswith("Validated. ")
    assert validation_sentences(alone)[1] in as_html(replace(result, validation=alone))
    together = replace(several, given=Tally(1, 1), set_size=4)
    assert of_one_input("The plan holds.", together) == "The plan holds."


@pytest.mark.parametrize(
    ("passed", "word", "tone"),
    [(64, "validated", "ok"), (63, "inconclusive", "unsure"), (20, "overfitted", "unsure")],
)
def test_only_what_holds_on_more_than_the_given_inputs_is_green(
    passed: int, word: str, tone: str
) -> None:
    result = synthetic_result(4)
    assert result.validation is not None
    bound = lower_bound(passed, 64, 0.95)
    perturbed = replace(result.validation.perturbed, passed=passed, tested=64, lower_bound=bound)
    held = replace(result, validation=replace(result.validation, perturbed=perturbed))
    assert held.validation is not None and held.validation.word.value == word
    assert f'id="answer" class="answer {tone}"' in as_html(held)
    assert f'answer {tone}"' in held._repr_html_()
    failed = replace(held, passed=False)
    assert 'id="answer" class="answer bad"' in as_html(failed)


def test_a_plan_that_leaves_hardly_a_layer_is_no_plain_success() -> None:
    most, half = pinning(0.95), pinning(0.5)
    assert headline(most).startswith("Hardly any layer can leave FP32: keep 19 of 20 there")
    assert headline(half).startswith("Keep 10 of 20 layers in FP32") and next_step(half) == ""
    assert 'id="answer" class="answer unsure"' in as_html(most)
    assert next_step(most) == (
        "What next: run everything in TF32, which meets it on the given inputs; keep fewer layers "
        "in FP32, which is enough for some inputs (tradeoff.csv, --allow-misses SHARE)."
    )
    assert next_step(most) in as_html(most) and "Next: run everything" in as_markdown(most)
    missed = replace(most, outputs=most.outputs.assign(outcome="fail"))
    assert next_step(missed) == (
        "What next: keep fewer layers in FP32, which is enough for some inputs (tradeoff.csv, "
        "--allow-misses SHARE)."
    )
    for unfinished in ({"out_of_time": True}, {"complete": False, "ranked": False}):
        assert headline(replace(most, **unfinished)).startswith("Keep 19 of 20 layers")
    none = missed.tradeoff.assign(given_passed=0)
    assert next_step(replace(missed, tradeoff=none)).endswith("or loosen the requirement.")
    unmeasured = replace(missed, tradeoff=pd.DataFrame())
    assert next_step(unmeasured) == "What next: ship it in FP32, or loosen the requirement."


def test_what_is_not_shown_to_hold_says_what_to_do_next() -> None:
    validation = RESULT.validation
    assert validation is not None
    undecided = replace(
        RESULT, validation=replace(validation, holdout=Tally(11, 12, 0.66, 1.2, "x"))
    )
    plan = f"--start-from {RESULT.folder}/plan.json"
    assert next_step(undecided) == (
        f"What next: give more inputs of the kind that it will meet and search on with {plan}."
    )
    assert undecided.validation is not None
    unpinned = replace(undecided, pins=pd.DataFrame())
    assert next_step(unpinned) == "What next: give more inputs of the kind that it will meet."
    fitted = replace(undecided, validation=replace(undecided.validation, fitted=True))
    assert next_step(fitted) == "What next: search without --robust 0."
    assert next_step(replace(undecided, out_of_time=True)).startswith("What next: run the same")
    assert next_step(RESULT) == next_step(replace(undecided, passed=False)) == ""


def test_the_terminal_s_colours_are_the_page_s() -> None:
    for result, colour in (
        (RESULT, "\x1b[1;32m"),
        (pinning(0.95), "\x1b[1;33m"),
        (replace(RESULT, passed=False), "\x1b[1;31m"),
    ):
        written = StringIO()
        print_verdict(Console(file=written, force_terminal=True, width=200), result)
        assert written.getvalue().startswith(colour)


def test_what_some_layers_do_alone_is_not_called_an_accumulation() -> None:
    result = synthetic_result(20)
    assert result.search_facts is not None
    facts = replace(result.search_facts, regime=Regime.DIFFUSE.value, spread_over=15)
    for cause, said in (
        (Cause.ACCUMULATION, "diffuse accumulation over"),
        (Cause.ROUNDING, "spread"),
    ):
        lines = search_sentences(replace(result, search_facts=facts, cause=cause))
        assert lines[0].startswith(said) and " over 15 layers; the pins are " in lines[0]


@pytest.mark.parametrize(
    ("layers", "share", "left", "said"),
    [
        (("a",), 0.925, 0.075, "92 % of the error is made by 1 layer: a."),
        (("a", "b"), 0.9999, 0.01, "99 % of the error is made by 2 layers: a, b."),
        (("a",), 1.0, 0.0, "100 % of the error is made by 1 layer: a."),
        (("named",), 0.9, 0.1, "It makes 90 % of the error."),
        (
            ("a",),
            math.nan,
            0.514,
            "1 layer makes the error infinite: a. With it in FP32, 0.514 times the tolerance is "
            "left.",
        ),
        (
            ("a", "b"),
            math.nan,
            30.0,
            "2 layers make the error infinite: a, b. With them in FP32, 30 times the tolerance is "
            "left.",
        ),
    ],
)
def test_few_layers_that_make_nearly_all_of_the_error_are_said_with_the_cause(
    layers: tuple[str, ...], share: float, left: float, said: str
) -> None:
    cause = CauseFound(Cause.OVERFLOW, ("named",), "FP16 overflows in named.")
    found = replace(RESULT, sentence=cause.sentence, causes=[cause])
    found = replace(found, error_share=ErrorShare(layers, share, left))
    line = f"FP16 overflows in named. {said}"
    assert f"Cause: {line}" in answer_lines(found) and line in as_html(found)
    assert line in as_markdown(found).replace("\\", "")
    assert not any(word in " ".join(answer_lines(RESULT)) for word in ("of the error", "infinite:"))


def test_layers_named_by_the_cause_among_others_are_named_again() -> None:
    cause = CauseFound(Cause.OVERFLOW, ("a", "b"), "FP16 overflows in a, b.")
    found = replace(RESULT, causes=[cause], error_share=ErrorShare(("a",), 0.95, 0.5))
    assert cause_sentence(found).endswith(" 95 % of the error is made by 1 layer: a.")
    both = replace(found, error_share=ErrorShare(("b", "a"), 0.95, 0.5))
    assert cause_sentence(both).endswith(" They make 95 % of the error.")
    more = replace(both, causes=[cause, CauseFound(Cause.ROUNDING, ("c",), "Rounding in c.")])
    assert cause_sentence(more).endswith(" 95 % of the error is made by 2 layers: b, a.")
