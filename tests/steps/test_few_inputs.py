"""What is said of other inputs where few were given, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import bisect_trt
from bisect_trt.base.sample import LazyArrays, RecentArrays, Sample
from bisect_trt.inputs.augmentations import augmented_input, check_kinds
from bisect_trt.report.record import read_run
from bisect_trt.report.text import is_least, score_without
from fixtures.build import GraphBuilder
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture, waves
from fixtures.models import conv_clip, healthy, residual
from tests.command import call, run_of
from tests.conftest import Finished
from tests.copies import FEW

FIXTURE = residual()


def halved(inputs: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """An augmented input that is always the same."""
    return {name: np.float32(array * 0.5) for name, array in inputs.items()}


def inputs_of(shares: Any, step: int = 0) -> list[dict[str, Any]]:
    """Copies of the one input; rolled by ``step``, for those of like outputs are no eight."""
    return [
        {n: np.float32(np.roll(a, step * place, -1) * by) for n, a in FIXTURE.inputs.items()}
        for place, by in enumerate(shares)
    ]


def messages(result: bisect_trt.Result) -> str:
    return " ".join(finding.message for finding in result.findings)


def run(out: Path, shares: Any, step: int = 0, **options: Any) -> bisect_trt.Result:
    its = {"require": FIXTURE.require, "runner": "emulated", "weights": "nearest", "out": out}
    chosen = {**its, **options}
    return bisect_trt.bisect(FIXTURE.model, inputs_of(shares, step), **chosen)


@pytest.mark.slow
def test_two_inputs_that_are_nearly_one_are_no_word_on_others(tmp_path: Path) -> None:
    two = run(tmp_path / "two", (1.0, 1.0001))
    assert (
        two.validation is not None
        and two.validation.word.value == "inconclusive"
        and two.validation.prediction_limit > 1.0
    )
    assert (
        two.validation.perturbed.lower_bound >= 0.95
        and two.validation.augmented.lower_bound >= 0.95
    )
    again = read_run(tmp_path / "two").validation
    assert (
        again.prediction_limit == two.validation.prediction_limit
        and again.word is two.validation.word
    )
    eight = run(tmp_path / "eight", np.linspace(0.85, 1.0, 8), step=5)
    assert eight.validation.word.value == "validated" and eight.validation.prediction_limit <= 1.0


def test_a_decision_that_never_changed_tells_nothing_of_the_next_input(tmp_path: Path) -> None:
    one = run(tmp_path / "one", (1.0,), require="top1>=1", limits=FEW)
    assert one.passed and not one.pinned and one.validation.word.value == "inconclusive"
    assert (
        one.validation.prediction_limit == np.inf
        and one.validation.augmented.passed == one.validation.augmented.tested
    )
    some = run(tmp_path / "some", np.linspace(0.8, 1.0, 40), require="top1>=1", limits=FEW)
    assert (
        some.validation.word.value == "inconclusive" and some.validation.prediction_limit == np.inf
    )
    many = run(tmp_path / "many", np.linspace(0.8, 1.0, 59), require="top1>=1", limits=FEW)
    assert many.validation.given.passed + many.validation.holdout.passed == 59
    assert many.validation.word.value == "validated"


def test_a_class_tells_nothing_of_the_next_input_by_any_metric(tmp_path: Path) -> None:
    """The default requirement on an integer output is a decision as ``argmax`` is."""
    b = GraphBuilder(3)
    b.rename_output(b.op("ArgMax", b.op("MatMul", "x", b.normal(32, 6)), axis=1), "best")
    model = b.model({"x": [1, 32]}, {"best": [1, 1]}, integers=["best"])
    inputs = [{"x": waves(seed, 1, 32)} for seed in (1, 2)]
    for place, require in enumerate(("rel_range<=1e-2", "argmax>=1")):
        options = {"require": require, "runner": "emulated", "out": tmp_path / str(place)}
        validation = bisect_trt.bisect(model, inputs, **options, limits=FEW).validation
        assert validation.word.value == "inconclusive" and validation.prediction_limit == np.inf


def test_copies_without_any_error_tell_nothing_of_the_next_input(tmp_path: Path) -> None:
    """Nothing was at stake in them; of many inputs without one, less is said by chance."""
    b = GraphBuilder(3)
    b.rename_output(b.op("Relu", b.op("Relu", "x")), "y")
    model = b.model({"x": [1, 32]}, {"y": [1, 32]})
    dark = [{"x": waves(seed, 1, 32) - 2.0} for seed in range(59)]
    for count, word in ((2, "inconclusive"), (59, "validated")):
        options = {"runner": "emulated", "holdout": "none", "out": tmp_path / str(count)}
        result = bisect_trt.bisect(
            model, dark[:count], require="max_abs<=1e-5", **options, limits=FEW
        )
        assert result.validation.word.value == word
    report = (tmp_path / "2" / "report.md").read_text()
    assert "another input may use any multiple of the tolerance: no copy shows any error" in report


@pytest.mark.slow
def test_a_set_of_inputs_is_one_observation(tmp_path: Path) -> None:
    require = FIXTURE.require.replace("<=", "@mean<=")
    few = run(tmp_path / "few", np.linspace(0.85, 1.0, 8), require=require)
    assert few.validation.set_size == 8 and few.validation.word.value == "inconclusive"
    assert few.validation.prediction_limit == np.inf
    assert (
        "another set of inputs may use any multiple of the tolerance"
        in (tmp_path / "few" / "report.md").read_text()
    )
    near = run(tmp_path / "near", np.linspace(0.99, 1.0, 59), require=require, holdout="none")
    assert (
        near.validation.word.value == "validated" and 0.0 < near.validation.prediction_limit <= 1.0
    )
    apart = run(
        tmp_path / "apart", np.linspace(0.05, 1.0, 59) ** 4, require=require, holdout="none"
    )
    assert apart.validation.prediction_limit > near.validation.prediction_limit


@pytest.mark.slow
def test_what_other_inputs_may_score_is_no_less_than_a_given_one(tmp_path: Path) -> None:
    eight = run(tmp_path, (*np.linspace(0.1, 0.11, 7), 1.0))
    assert eight.validation.prediction_limit >= eight.validation.given.worst_score


def test_copies_of_one_input_are_no_word_on_others_however_small_their_error(
    tmp_path: Path,
) -> None:
    fixture = healthy()
    one = run_of(fixture, tmp_path, require="max_abs<=1e3", limits=FEW)
    assert (
        one.passed
        and one.validation.word.value == "inconclusive"
        and one.validation.prediction_limit == np.inf
    )
    assert one.validation.perturbed.passed == one.validation.perturbed.tested >= 59


@pytest.mark.slow
def test_variants_that_are_all_the_same_are_said_to_be(tmp_path: Path) -> None:
    same = run(tmp_path, (1.0, 0.9), augmented=f"{__name__}:halved")
    assert same.validation.augmented.tested == 0 and same.validation.spent
    assert "no more than 0 augmented inputs could be made that the search" in messages(same)
    assert "could be made" not in messages(run(tmp_path / "auto", (1.0, 0.9)))


def test_kinds_may_be_listed_with_blanks() -> None:
    check_kinds("shift, flip")


@pytest.mark.slow
def test_a_set_that_was_kept_apart_is_called_one(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        np.linspace(0.9, 1.0, 3),
        require=FIXTURE.require.replace("<=", "@mean<="),
        holdout=inputs_of((0.7, 0.8)),
        allow_misses=0.5,
    )
    assert result.validation.set_size == 3 and result.validation.holdout_size == 2
    assert "1 of 1 sets of 2 held out" in (tmp_path / "report.md").read_text()
    assert "--allow-misses 0.5 does nothing here" in messages(result)


def test_what_a_spared_input_does_is_in_the_answer_and_in_the_frontier(tmp_path: Path) -> None:
    """Two of fifty inputs are so large that they miss; the trade-off curve is judged on 24."""
    fixture, shares = healthy(), np.linspace(0.9, 1.0, 50)
    shares[[1, 3]] = 30.0, 40.0
    result = bisect_trt.bisect(
        fixture.model,
        [{n: np.float32(a * by) for n, a in fixture.inputs.items()} for by in shares],
        require="max_abs<=5e-4",
        holdout="none",
        allow_misses=0.1,
        runner="emulated",
        out=tmp_path,
    )
    given = result.validation.given
    assert (given.passed, given.tested) == (48, 50) and given.worst_score > 1.0
    row = result.tradeoff[result.tradeoff["set"] == "answer"].iloc[0]
    assert (row["given_passed"], row["given_tested"]) == (48, 50)
    rest = result.tradeoff[result.tradeoff["set"] == "ranking"]
    assert (rest["given_tested"] == 26).all()
    assert "on 48 of the 50 given inputs" in (tmp_path / "report.md").read_text()


def test_verify_says_that_a_plan_is_lucky_before_anything_else(tmp_path: Path) -> None:
    fitted = run(tmp_path / "run", (1.0,), robust=0)
    assert fitted.passed
    model = tmp_path / "run" / "model.typed.onnx"
    assert model.exists()
    names = [tmp_path / f"{i}.npz" for i in range(2)]
    for name, arrays in zip(names, inputs_of((1.0, 1e6)), strict=True):
        np.savez(name, **arrays)
    source = tmp_path / "source.onnx"
    source.write_bytes(FIXTURE.model.SerializeToString())
    found = call(
        *("verify", source, "--input", names[0], "--holdout", names[1]),
        *("--plan", tmp_path / "run" / "plan.json", "--runner", "emulated"),
        limits=FEW,
    )
    assert found.exit_code == 0, found.output
    assert "The plan passes your inputs and fails on similar ones (overfitted)." in found.output


@pytest.mark.parametrize(("make", "share"), [(encoder_decomposed, 0.95), (conv_clip, 0.9)])
def test_what_a_set_scores_without_a_pin_is_in_tolerances(
    make: Callable[[], Fixture], share: float, finished: Finished
) -> None:
    """A set is held to less than the tolerance while it is made smaller: what it then misses it may
    still meet, and its score says so; ``proof_evaluation`` is the one of the set's evaluations that
    shows it.
    """
    result = finished(make, share)
    proved = result.pins[result.pins["proved"]]
    assert len(proved) and (proved["tolerance_share"] < 1.0).any()
    for pin in proved.itertuples():
        probe = result.search.iloc[pin.proof_evaluation]
        assert pin.score_without == pytest.approx(probe["score"], rel=1e-9)
        assert pin.score_without > pin.tolerance_share
        assert pin.missed_on in probe["note"] or pin.missed_on.startswith("sample")
    pin = next(proved.itertuples())
    assert score_without(pin) == f"{pin.score_without:.3g} times the tolerance"
    assert is_least(pin), "its search set ended with the first that told"
    assert not is_least(pin._replace(of_all_given=True))
    just = pin._replace(score_without=0.86)
    assert score_without(just) == "0.86 times the tolerance (held to 0.8)"


def rarely_raising(
    inputs: Mapping[str, NDArray[Any]], random: np.random.Generator
) -> dict[str, NDArray[Any]]:
    if random.random() < 0.04:
        raise ValueError("no such augmentation")
    return {name: a * np.float32(random.uniform(0.9, 1.1)) for name, a in inputs.items()}


def test_a_variant_that_cannot_be_made_late_costs_no_answer(tmp_path: Path) -> None:
    """The search was made, and ended with wrong usage and nothing written, each time again."""
    result = run(tmp_path, (1.0, 0.9), augmented=f"{__name__}:rarely_raising", limits=FEW)
    assert result.validation.augmented.tested > 50
    assert "no such augmentation" in messages(result) and "are left out" in messages(result)


CALLS = list[int]()


def soon_raising(
    inputs: Mapping[str, NDArray[Any]], random: np.random.Generator
) -> dict[str, NDArray[Any]]:
    CALLS.append(1)
    if len(CALLS) > 80:
        raise ValueError("no more augmentations")
    return {name: a * np.float32(random.uniform(0.9, 1.1)) for name, a in inputs.items()}


def test_a_function_that_makes_none_any_more_ends(tmp_path: Path) -> None:
    """It was asked for ever, and no budget ended it."""
    CALLS.clear()
    result = run(tmp_path, (1.0, 0.9), augmented=f"{__name__}:soon_raising", limits=FEW)
    assert "no more augmentations" in messages(result) and len(CALLS) < 1000
    assert result.validation.word.value == "inconclusive"


def test_of_many_inputs_a_mixture_reads_one(tmp_path: Path) -> None:
    loads, recent = list[int](), RecentArrays()

    def of(number: int) -> Sample:
        def load() -> dict[str, NDArray[Any]]:
            loads.append(number)
            # More than are kept, so that each is loaded anew.
            return {"x": np.full((1, 1 << 20), number, np.float32)}

        return Sample(str(number), LazyArrays(load, recent))

    samples = [of(n) for n in range(12)]
    assert len({s.digest for s in samples}) == 12
    loads.clear()
    given, *others = (sample.arrays for sample in samples)
    for seed in range(8):
        made = augmented_input("mix", given, others, np.random.default_rng(seed))
        assert made["x"].size == 1 << 20
    assert len(loads) <= 24
