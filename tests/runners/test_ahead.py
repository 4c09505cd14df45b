"""Engines built ahead: by the real builder, which needs no GPU, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.save import file_form
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.tensorrt.profile import profile_of
from bisect_trt.runners.tensorrt.records import EngineAnswer, EngineRequest
from bisect_trt.runners.tensorrt.runner import TIMES_NOTHING, EnginesAhead, TensorRTRunner
from fixtures.models import healthy

FIXTURE = healthy()
SAMPLE = Sample("s", FIXTURE.inputs)
FP16, FP32 = PrecisionPlan(Precision.FP16), PrecisionPlan(Precision.FP32)


def asked(plan: PrecisionPlan) -> Callable[[], AbstractContextManager[EngineRequest]]:
    @contextmanager
    def request() -> Iterator[EngineRequest]:
        with file_form(to_typed(FIXTURE.model, plan)) as form:
            profile = profile_of(FIXTURE.model, [SAMPLE], ())
            yield EngineRequest(form.source, profile, False, key=form.key)

    return request


@contextmanager
def unreadable() -> Iterator[EngineRequest]:
    yield EngineRequest(b"no model", {}, False)


@pytest.fixture
def ahead() -> Iterator[EnginesAhead]:
    made = EnginesAhead(TIMES_NOTHING, None, 1)
    yield made
    made.close()


def test_what_was_begun_is_taken_once(ahead: EnginesAhead) -> None:
    ahead.begin("one", asked(FP16))
    ahead.begin("one", asked(FP16))  # is on its way
    ahead.begin("both", asked(FP32), copies=2)
    request = ahead.take("one")
    assert request is not None and request.prebuilt is not None and request.model == b""
    assert Path(request.prebuilt.path).stat().st_size > 1000
    assert not request.prebuilt.built.engine and request.prebuilt.built.seconds["build"] > 0.0
    assert ahead.take("one") is None and ahead.take("nothing") is None
    both = [ahead.take("both"), ahead.take("both")]
    assert len({b.prebuilt.path for b in both if b is not None and b.prebuilt is not None}) == 2
    assert ahead.take("both") is None


def test_what_does_not_build_is_left_to_whoever_asks(ahead: EnginesAhead) -> None:
    ahead.begin("bad", lambda: unreadable())
    ahead.begin("good", asked(FP16))
    assert ahead.take("bad") is None
    assert ahead.take("good") is not None


def test_what_is_given_up_leaves_no_engine(ahead: EnginesAhead) -> None:
    ahead.begin("refused", asked(FP16), copies=5)
    ahead.begin("other", asked(FP32))
    ahead.give_up("nothing of it")
    assert ahead.take("refused") is None and ahead.take("other") is None
    ahead.begin("other", asked(FP32))
    request = ahead.take("other")
    assert request is not None and request.prebuilt is not None
    engine = Path(request.prebuilt.path)
    assert list(engine.parent.iterdir()) == [engine], "builds in work were removed when they ended"


def test_what_is_wanted_again_is_not_given_up(ahead: EnginesAhead) -> None:
    ahead.begin("refused", asked(FP16))
    ahead.begin("wanted", asked(FP32), copies=2)
    ahead.give_up("wanted")
    assert ahead.take("refused") is None
    assert ahead.take("wanted") is not None and ahead.take("wanted") is not None


def test_the_end_does_not_wait_for_builds_and_leaves_nothing() -> None:
    ahead = EnginesAhead(TIMES_NOTHING, None, 1)
    ahead.begin("all", asked(FP16), copies=50)
    first = ahead.take("all")
    assert first is not None and first.prebuilt is not None
    folder = Path(first.prebuilt.path).parent
    ahead.close()
    assert not folder.exists() and ahead.take("all") is None
    assert all(worker.pid is None for worker in ahead._workers)


class Recording:
    """In the place of the process that runs engines, which needs a GPU: keeps what it is asked, and
    the engine last asked for.
    """

    def __init__(self, *_: Any) -> None:
        self.asked: list[tuple[str, EngineRequest, int]] = []
        self.sizes: list[int] = []
        self._kept = ""

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if method == "describe":
            return {TIMES_NOTHING: "1"}
        request, samples, _ = arguments
        self.asked.append((method, request, len(samples)))
        if method == "again" and request.key != self._kept:
            return None
        self._kept = request.key
        if request.prebuilt is not None:
            self.sizes.append(Path(request.prebuilt.path).stat().st_size)
        answers = [[({"y": SAMPLE.arrays["x"]}, 1)] for _ in samples]
        return EngineAnswer(answers, {}, 1, 1.0, {}, [], [])

    def close(self) -> None:
        pass


def answered(runner: TensorRTRunner, plan: PrecisionPlan, count: int = 1) -> None:
    assert len(list(runner.outputs(plan, [SAMPLE] * count))) == count


def runner_of(remote: Recording, builders: int) -> TensorRTRunner:
    def hire(_: str, __: Mapping[str, Any]) -> Recording:
        return remote

    return TensorRTRunner(FIXTURE.model, [SAMPLE], hire=hire, builders=builders)


def test_an_engine_built_ahead_is_handed_over_and_kept_for_more_samples() -> None:
    remote = Recording()
    runner = runner_of(remote, 1)
    runner.build_ahead(FP16)
    answered(runner, FP16)
    (method, request, _) = remote.asked[-1]
    assert method == "evaluate" and request.prebuilt is not None and remote.sizes[0] > 1000
    assert not Path(request.prebuilt.path).exists(), "loaded engines need no room on the disk"
    answered(runner, FP16, 3)
    assert remote.asked[-1][0] == "again" and remote.asked[-1][1].model == b""
    answered(runner, FP32)
    assert remote.asked[-1][0] == "evaluate" and remote.asked[-1][1].model
    answered(runner, FP16)  # another engine was built since
    assert remote.asked[-1][0] == "evaluate" and remote.asked[-1][1].model
    runner.close()


def test_an_engine_that_another_process_lost_is_built_again() -> None:
    remote = Recording()
    runner = runner_of(remote, 0)
    runner.build_ahead(FP16)  # nobody there to do it
    answered(runner, FP16)
    remote._kept = ""
    answered(runner, FP16, 2)
    assert [method for method, _, _ in remote.asked] == ["evaluate", "again", "evaluate"]
    assert all(request.prebuilt is None for _, request, _ in remote.asked)
    runner.close()


def test_marked_engines_are_others_than_unmarked_ones() -> None:
    remote = Recording()
    runner = runner_of(remote, 1)
    runner.build_ahead(FP16)
    tensor = next(n.output[0] for n in FIXTURE.model.graph.node)
    runner.build_ahead(FP16, [tensor])
    runner.marked(FP16, [SAMPLE], [tensor])
    answered(runner, FP16)
    marked, plain = (request for _, request, _ in remote.asked)
    assert marked.prebuilt is not None and plain.prebuilt is not None and marked.key != plain.key
    assert not marked.measure_latency and plain.measure_latency
    runner.close()
