"""Signs of life: on a terminal and in a log."""

from __future__ import annotations

import io
import re
import time

import pytest

from bisect_trt.report.terminal import ProgressObserver, plain


def said(seconds: float, lines: int = 0, **options: bool) -> str:
    """What is said within some time; ``lines`` of it are waited for, on a machine however busy."""
    text = io.StringIO()
    console = plain(file=text, width=200)
    given = {"quiet": False, "verbose": False, **options}
    with ProgressObserver(console, interval_s=0.05, **given) as observer:
        observer.step("bisect")
        observer.progress(3, 10, "6 pins: pass")
        time.sleep(seconds)
        while len(text.getvalue().splitlines()) < lines:
            time.sleep(0.01)
    return text.getvalue()


def test_a_log_has_a_line_every_few_seconds_though_nothing_is_heard() -> None:
    lines = said(0.0, lines=2).splitlines()
    assert len(lines) >= 2
    assert all("bisect, 3 of 10" in line and "6 pins: pass" in line for line in lines)
    assert all(line.startswith("[") and "MB at most]" in line for line in lines)


@pytest.mark.parametrize("options", [{"quiet": True}, {"quiet": True, "verbose": True}])
def test_quiet_is_quiet(options: dict[str, bool]) -> None:
    assert said(0.2, **options) == ""


def test_a_short_run_writes_no_line() -> None:
    assert said(0.0) == ""


def test_a_reader_who_went_away_does_not_matter() -> None:
    class Gone(io.StringIO):
        asked = 0

        def write(self, text: str) -> int:
            self.asked += 1
            raise BrokenPipeError

    gone = Gone()
    with ProgressObserver(plain(file=gone), quiet=False, interval_s=0.01) as observer:
        observer.step("bisect")
        while gone.asked < 2:  # it goes on after the first line that nobody read
            time.sleep(0.01)


def test_a_line_has_the_best_plan_and_what_is_left_of_the_budget() -> None:
    text = io.StringIO()
    console = plain(file=text, width=200)
    with ProgressObserver(console, quiet=False, interval_s=0.05, budget=1000.0) as observer:
        observer.step("bisect")
        observer.best(7)
        observer.best(12)  # the smaller one was refused
        while "budget" not in text.getvalue():
            time.sleep(0.01)
    assert re.search(
        r"\] bisect; best so far: 12 layers in FP32; \d{5} s of the budget left", text.getvalue()
    )


def test_what_is_left_goes_by_the_pace_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "About 1 s left" stood there for half a minute; the time before the first item counted."""
    now, text = [100.0], io.StringIO()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def line() -> str:
        """The next line of the log that is begun from now on."""
        before = text.getvalue().count("\n")
        while text.getvalue().count("\n") < before + 2:
            time.sleep(0.001)
        return text.getvalue().splitlines()[before + 1]

    with ProgressObserver(plain(file=text, width=200), quiet=False, interval_s=0.001) as observer:
        observer.step("baselines")
        now[0] += 50.0  # opens a session
        for done in (1, 2, 3):
            observer.progress(done, 10, "layer")
            now[0] += 2.0
        assert "baselines, 3 of 10, about 12 s left: layer" in line()
        now[0] += 10.0
        assert "about 2 s left" in line()
        now[0] += 10.0
        assert "baselines, 3 of 10: layer" in line()
        for done in (1, 2):
            observer.progress(done, 4, "another row")  # counts anew
            now[0] += 3.0
        assert "2 of 4, about 3 s left: another row" in line()
        observer.progress(0, 4, "nothing yet")
        assert "0 of 4: nothing yet" in line()


def test_verbose_tells_that_it_lives_where_no_step_is_told() -> None:
    lines = said(0.0, lines=3, verbose=True).splitlines()
    assert lines[0] == "3 of 10: 6 pins: pass"
    assert lines[1].startswith("[") and "bisect, 3 of 10" in lines[1]
