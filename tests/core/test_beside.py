"""Work beside the caller's."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, get_ident

import pytest

from bisect_trt.base.interrupt import Beside


def test_the_answer_is_there_when_it_is_asked_for() -> None:
    beside = Beside()
    answer = beside.begin(lambda ended: (get_ident(), ended()))
    thread, ended = answer.result(60.0)
    assert thread != get_ident() and not ended
    failed = beside.begin(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(60.0)
    beside.close()


def test_work_hears_that_nobody_wants_it_and_is_not_waited_for() -> None:
    beside, begun, go_on = Beside(), Event(), Event()

    def work(ended: Callable[[], bool]) -> bool:
        begun.set()
        assert go_on.wait(60.0)
        return ended()

    answer, later = beside.begin(work), beside.begin(work)
    assert begun.wait(60.0)
    beside.close()
    go_on.set()
    assert answer.result(60.0) and later.cancelled()
