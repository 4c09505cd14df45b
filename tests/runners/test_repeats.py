"""Running a sample several times: how often, in which order, and when to go on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.errors import farthest_apart
from bisect_trt.runners.tensorrt.execute import ENOUGH, run_repeatedly, same_bits


def sample(value: float) -> dict[str, NDArray[Any]]:
    return {"x": np.full(3, value, np.float32)}


def test_enough_is_what_clopper_and_pearson_say() -> None:
    assert ENOUGH == 59


def test_contexts_take_turns_and_the_order_turns() -> None:
    seen: list[tuple[str, float]] = []

    def context(name: str) -> Any:
        def run(arrays: Arrays) -> Arrays:
            seen.append((name, float(arrays["x"][0])))
            return {"y": arrays["x"] * 2}

        return run

    found = run_repeatedly([sample(1), sample(2)], [context("a"), context("b")], 3)
    assert seen == [("a", 1), ("a", 2), ("b", 2), ("b", 1), ("a", 1), ("a", 2)]
    assert [[count for _, count in answers] for answers in found] == [[3], [3]]


@pytest.mark.parametrize("every", [2, 3, 7])
def test_answers_that_differ_are_run_on_and_counted(every: int) -> None:
    """The seventh run comes after the third: it is never seen, and that is why processes differ."""
    calls = 0

    def run(arrays: Arrays) -> Arrays:
        nonlocal calls
        calls += 1
        return {"y": arrays["x"] + (1.0 if calls % every == 0 else 0.0)}

    (answers,) = run_repeatedly([sample(0)], [run], 3)
    if every == 7:
        assert calls == 3 and [c for _, c in answers] == [3]
        return
    assert calls == ENOUGH and sum(c for _, c in answers) == ENOUGH
    assert [c for _, c in answers] == [ENOUGH - ENOUGH // every, ENOUGH // every]
    assert float(answers[0][0]["y"][0]) == 0.0, "the most frequent comes first"


def test_one_run_is_one_run() -> None:
    calls = iter(range(100))
    (answers,) = run_repeatedly([sample(0)], [lambda a: {"y": a["x"] + next(calls)}], 1)
    assert len(answers) == 1 and next(calls) == 1


def test_an_answer_that_is_new_each_time_ends_early() -> None:
    calls = iter(range(1000))
    (answers,) = run_repeatedly([sample(0)], [lambda a: {"y": a["x"] + next(calls)}], 3)
    assert len(answers) == 16 and next(calls) == 16


def test_bits_are_compared_and_not_values() -> None:
    zero, minus = np.zeros(2, np.float32), -np.zeros(2, np.float32)
    nan = np.full(2, np.nan, np.float16)
    assert not same_bits({"y": zero}, {"y": minus})
    assert same_bits({"y": nan}, {"y": nan.copy()})
    assert not same_bits({"y": zero}, {"y": zero.astype(np.float64)})
    assert not same_bits({"y": zero}, {"z": zero})
    assert not same_bits({"y": zero}, {"y": zero[:1]})
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert same_bits({"y": turned}, {"y": np.ascontiguousarray(turned)})


def test_how_far_answers_lie_apart() -> None:
    exact = {"a": np.array([0.0, 2.0], np.float32), "b": np.array([1, 5])}
    same = {"a": exact["a"], "b": exact["b"]}
    assert farthest_apart(exact, [same]) == ("", 0.0)
    assert farthest_apart(exact, [same, same]) == ("", 0.0)
    other = {"a": np.array([0.5, 2.0], np.float32), "b": exact["b"]}
    assert farthest_apart(exact, [same, other]) == ("a", 0.25)
    worse = {"a": other["a"], "b": np.array([1, 7])}
    assert farthest_apart(exact, [same, other, worse]) == ("b", 0.5)
    under = {"a": np.array([-0.5, 2.0], np.float32), "b": exact["b"]}
    assert farthest_apart(exact, [same, other, under]) == ("a", 0.5)  # of any two
    broken = {"a": np.array([np.nan, 2.0], np.float32), "b": exact["b"]}
    assert farthest_apart(exact, [same, broken]) == ("a", math.inf)
    assert farthest_apart(exact, [broken, broken]) == ("", 0.0)
    endless = {"a": np.array([np.inf, 2.0], np.float32), "b": exact["b"]}
    assert farthest_apart(exact, [endless, endless]) == ("", 0.0)
    assert farthest_apart(exact, [endless, same]) == ("a", math.inf)
    longer = {"a": np.zeros(3, np.float32), "b": exact["b"]}
    assert farthest_apart(exact, [same, longer]) == ("a", math.inf)
