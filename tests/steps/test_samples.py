"""Copies are made no further ahead than needed, whatever the number of cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bisect_trt.base.interrupt import Observer
from bisect_trt.base.limits import Limits
from bisect_trt.base.sample import Sample
from bisect_trt.runners import concurrency as module
from bisect_trt.settings import Settings
from bisect_trt.steps.context import Context, open_context
from bisect_trt.steps.problem import load
from bisect_trt.steps.samples import usable
from fixtures.models import residual
from tests.conftest import Sessions
from tests.networks import parsed


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """Of a machine of many cores."""
    monkeypatch.setattr(module, "thread_count", lambda *_: 8)
    fixture = residual()
    settings = Settings(fixture.model, [fixture.inputs], require=[fixture.require], out=tmp_path)
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as opened:
        yield opened


def copied(read: list[int]) -> Iterator[Sample]:
    """Without end; every third has no finite reference."""
    (given,) = [residual().inputs]
    for number in range(1000):
        read.append(number)
        # NaNs of different bits: equal samples are one, whoever of several threads is sooner.
        undefined = np.uint32(0x7FC00000 + number).view(np.float32)
        by = np.float32(1 - number / 1000)
        arrays = {
            name: np.full_like(array, undefined) if number % 3 == 1 else array * by
            for name, array in given.items()
        }
        yield Sample(str(number), arrays)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
def test_no_more_are_read_than_are_needed(context: Context, count: int) -> None:
    read: list[int] = []
    expected = [number for number in range(1000) if number % 3 != 1][:count]
    assert [int(s.name) for s in usable(context, copied(read), count)] == expected
    assert read == list(range(max(expected, default=-1) + 1))
    fewer = list(usable(context, iter(list(copied([]))[:3]), 12))
    assert [s.name for s in fewer] == ["0", "2"], "there may be fewer than asked for"


def test_before_a_plan_is_run_its_references_are_there_where_sessions_take_turns(
    tmp_path: Path, sessions_opened: Sessions
) -> None:
    fixture, limits = residual(), Limits(large_bytes=1)
    settings = Settings(
        fixture.model, [fixture.inputs], require=[fixture.require], out=tmp_path, limits=limits
    )
    problem = load(settings, Observer())
    for plan in (problem.base, problem.base.with_pins(problem.names[:1])):
        # The second time the cache knows that they fit.
        with open_context(problem, Observer()) as context:
            samples = list(usable(context, copied([]), 6))
            problem.reference.release()
            opened = len(sessions_opened)
            context.second.judge(plan, samples)
    assert len(sessions_opened) == opened + 2, "the reference's, once, and the second emulator's"


def test_a_copy_that_leaves_what_the_model_is_made_for_is_refused(context: Context) -> None:
    """NaN beside NaN was a pass, where the given input has none."""
    (given,) = [residual().inputs]
    spoilt = {name: array.copy() for name, array in given.items()}
    for array in spoilt.values():
        array.flat[0] = np.nan
    copies = [Sample("spoilt", spoilt, True), Sample("fine", {**given}, True)]
    assert [s.name for s in usable(context, iter(copies), 2)] == ["fine"]


def test_which_outputs_may_be_undefined_is_asked_of_every_given_input(tmp_path: Path) -> None:
    """A masked row is NaN in the reference too; of four inputs alone the order would decide."""
    model = parsed("[div] y = Div(x, x)", "float[4] x", "float[4] y")
    inputs = [{"x": np.arange(1, 5, dtype=np.float32) + n} for n in range(8)]
    inputs[3]["x"][1] = 0.0
    for number, given in enumerate((inputs, inputs[:3])):
        settings = Settings(model, given, require=["max_abs<=1"], out=tmp_path / str(number))
        problem = load(settings, Observer())
        with open_context(problem, Observer()) as context:
            assert context.undefined == (() if number else ("y",))
            assert len(list(usable(context, iter([Sample("c", inputs[3], True)]), 1))) == 1 - number
