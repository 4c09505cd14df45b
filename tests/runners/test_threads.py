"""Answers in order from several threads, whatever becomes of the work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bisect_trt.runners.concurrency import side_by_side


@pytest.fixture(params=[1, 2, 5])
def several(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.mark.parametrize("size", [0, 1, 2, 3, 40])
def test_answers_come_in_order(size: int, several: int) -> None:
    answers = side_by_side(lambda x: x * x, range(size), lambda _: several)
    assert list(answers) == [x * x for x in range(size)]


def test_what_one_raises_is_raised_in_its_turn(several: int) -> None:
    def work(x: int) -> int:
        if x == 7:
            raise KeyError(x)
        return x

    seen = []
    with pytest.raises(KeyError, match="7"):
        for answer in side_by_side(work, range(30), lambda _: several):
            seen.append(answer)
    assert seen == list(range(7))


def test_no_more_is_read_than_there_are_threads(several: int) -> None:
    read = []

    def items() -> Iterator[int]:
        for x in range(100):
            read.append(x)
            yield x

    answers = side_by_side(lambda x: x, items(), lambda _: several)
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

    answers = side_by_side(work, range(50), lambda _: several)
    assert next(answers) == 0
    release.set()
    answers.close()
    assert len(begun) <= several + 2
