"""Time limits: how they are written, and when one is met."""

from __future__ import annotations

import pytest

from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.parser import check_requirements
from bisect_trt.metrics.time_limits import (
    PlanSpeed,
    TimeLimit,
    judged_from_json,
    parse_time_limits,
    saving_kept,
)


def test_limits_are_read_as_they_are_written() -> None:
    found = parse_time_limits([" latency_ms <= 4.50 ", "saving_kept>=.9", "latency_ms<=1e-1"])
    assert found[0] == TimeLimit("latency_ms", 4.5)
    assert [limit.text for limit in found] == [
        "latency_ms<=4.5",
        "saving_kept>=0.9",
        "latency_ms<=0.1",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency_ms", "has no bound; write latency_ms<=MS or saving_kept>=SHARE"),
        ("", "has no bound"),
        ("latency<=4", "unknown 'latency'"),
        ("<=4", "unknown ''"),
        ("latency_ms>=4.5", "latency_ms is bounded with <="),
        ("saving_kept<=0.9", "saving_kept is bounded with >="),
        ("latency_ms<4.5", "bounded with <="),
        ("latency_ms=4.5", "bounded with <="),
        ("latency_ms<=fast", "'fast' is no number"),
        ("latency_ms<=4.5ms", "'4.5ms' is no number"),
        ("latency_ms<=", "'' is no number"),
        ("latency_ms<=nan", "'nan' is no number"),
        ("latency_ms<=1e999", "'1e999' is no number"),
        ("latency_ms<=-1", "must be more than 0"),
        ("saving_kept>=0", "must be more than 0"),
        ("saving_kept>=90", "a share is at most 1; 90 % is written 0.9"),
    ],
)
def test_a_wrong_limit_is_refused_with_what_to_write(text: str, words: str) -> None:
    with pytest.raises(BadInputError) as refused:
        parse_time_limits([text])
    assert str(refused.value).startswith(f"--hold {text!r}: ") and words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "speed", "met", "found"),
    [
        ("latency_ms<=4.5", PlanSpeed(4.5), True, "4.5 ms"),
        ("latency_ms<=4.5", PlanSpeed(4.5004), False, "4.5004 ms"),
        ("latency_ms<=4.5", PlanSpeed(None, 0.9), None, "its engine was not timed"),
        ("saving_kept>=0.9", PlanSpeed(9.0, 0.9), True, "0.9"),
        ("saving_kept>=0.9", PlanSpeed(None, 0.89, is_estimated=True), False, "0.89, estimated"),
        ("saving_kept>=0.9", PlanSpeed(4.5), None, "not timed, or is nothing"),
    ],
)
def test_a_limit_is_met_at_its_bound_and_not_judged_without_a_value(
    text: str, speed: PlanSpeed, met: bool | None, found: str
) -> None:
    (limit,) = parse_time_limits([text])
    judged = limit.judged(speed)
    assert judged.met is met and judged.found.endswith(found) and judged.text == text
    assert judged_from_json(judged.as_json()) == judged


def test_a_limit_among_the_requirements_is_told_its_place() -> None:
    with pytest.raises(BadInputError, match="a time limit, not a metric; write it as hold"):
        check_requirements(["latency_ms<=4.5"], [])


def test_a_saving_is_shared_only_where_there_is_one() -> None:
    assert saving_kept(2.5, 2.0, 4.0) == 0.75
    assert saving_kept(4.0, 3.97, 4.0) is None and saving_kept(4.0, 5.0, 4.0) is None
