"""Answers in order from several threads, whatever becomes of the work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bisect_trt.base import limits
from bisect_trt.base.limits import in_order


@pytest.fixture(params=[1, 2, 5], autouse=True)
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(limits, "thread_count", lambda: count)
    return count


@pytest.mark.parametrize("size", [0, 1, 2, 3, 40])
def test_answers_come_in_order(size: int) -> None:
    assert list(in_order(lambda x: x * x, range(size))) == [x * x for x in range(size)]


def test_what_one_raises_is_raised_in_its_turn() -> None:
    def work(x: int) -> int:
        if x == 7:
            raise KeyError(x)
        return x

    seen = []
    with pytest.raises(KeyError, match="7"):
        for answer in in_order(work, range(30)):
            seen.append(answer)
    assert seen == list(range(7))
    assert list(in_order(work, range(5))) == list(range(5)), "the threads are still there"


def test_no_more_is_read_than_there_are_threads(several: int) -> None:
    read = []

    def items() -> Iterator[int]:
        for x in range(100):
            read.append(x)
            yield x

    answers = in_order(lambda x: x, items())
    assert next(answers) == 0
    assert len(read) <= several + 2
    answers.close()
    assert len(read) <= several + 2


def test_who_leaves_early_leaves_no_work_behind(several: int) -> None:
    release, begun = threading.Event(), []

    def work(x: int) -> int:
        begun.append(x)
        if x:
            release.wait(10.0)
        return x

    answers = in_order(work, range(50))
    assert next(answers) == 0
    answers.close()
    release.set()
    assert list(in_order(lambda x: x, range(50))) == list(range(50))
    assert len(begun) <= several + 2
