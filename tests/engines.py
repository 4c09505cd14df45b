"""Engines that err in known ways, in the place of real ones: the emulator amplified, offset,
failing, or not making up its mind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import bisect_trt
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.emulator import EmulatedRunner
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import residual
from tests.copies import FEW


class Engine:
    """An engine whose errors are ``gain`` times the emulated ones, plus ``offset``; its FP32 may be
    TF32.
    """

    name = "engine"
    versions: Mapping[str, str] = {"engine": "1"}

    def __init__(
        self,
        fixture: Fixture,
        gain: float = 1.0,
        offset: float = 0.0,
        *,
        tf32: bool = False,
        breaks: Callable[[PrecisionPlan], bool] = lambda _: False,
    ) -> None:
        self._emulator = EmulatedRunner(fixture.model)
        self._gain, self._offset, self._tf32, self._breaks = gain, offset, tf32, breaks
        self.built: list[PrecisionPlan] = []

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        if plan not in self.built:  # a real one is kept for further samples of its plan
            self.built.append(plan)
        if self._breaks(plan):
            raise RunnerFailedError("no tactic", Verdict.BUILD_FAILED, ["[E] no tactic"])
        if self._tf32:
            plan = (
                PrecisionPlan(Precision.TF32)
                if plan.base is Precision.FP32
                else PrecisionPlan(plan.base, plan.pinned, Precision.TF32)
            )
        exactly = self._emulator.outputs(PrecisionPlan("fp32"), samples)
        both = zip(exactly, self._emulator.outputs(plan, samples), strict=True)
        for exact, outputs in both:
            yield {
                n: (exact[n] + self._gain * (a - exact[n]) + self._offset).astype(np.float32)
                for n, a in outputs.items()
            }

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def takes(self, sample: Sample) -> bool:
        return True

    def close(self) -> None:
        pass


class Unsteady(Engine):
    """An engine that runs each input ``runs`` times, of which ``bad`` in a process give an answer
    that is ``off`` away: ``bad`` tells how many, from the plan and the number of the process.
    ``drawn_in`` are the processes in which copies were run.
    """

    name = "engine"

    def __init__(
        self,
        fixture: Fixture,
        bad: Callable[[PrecisionPlan, int], int],
        off: float = 100.0,
        runs: int = 6,
    ) -> None:
        super().__init__(fixture)
        self._bad, self._off, self._runs = bad, off, runs
        self.process = 1
        self.drawn_in: set[int] = set()

    def start_afresh(self) -> None:
        self.process += 1

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        bad = self._bad(plan, self.process)
        if any(sample.copied for sample in samples):
            self.drawn_in.add(self.process)
        for outputs in super().outputs(plan, samples):
            wrong = {n: (a + self._off).astype(np.float32) for n, a in outputs.items()}
            counted = [(outputs, self._runs - bad), (wrong, bad)]
            (most, _), *others = sorted((c for c in counted if c[1]), key=lambda c: -c[1])
            yield Repeated(most, self._runs, others)


class Timed(Engine):
    """An engine that takes 4 ms in FP32, 2 ms reduced, and a tenth of a millisecond more a pin."""

    def takes(self, sample: Sample) -> bool:
        return True

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        is_fp32 = plan.base is Precision.FP32
        ms = 4.0 if is_fp32 else 2.0 + 0.1 * len(plan.pinned)
        return {"latency_ms": ms, "engine_bytes": 2**20, "seconds": {"build": 1.0}}


class WorseOnDraws(Engine):
    """An engine that errs like the emulator on what was given, and 1.5 times as much on copies."""

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        for sample in samples:
            self._gain = 1.5 if sample.copied else 1.0
            yield from super().outputs(plan, [sample])


EngineRun = tuple[bisect_trt.Result, Any]
"""A run and the engine that decided it."""

Judged = Callable[..., EngineRun]


def run_on(engine: Engine, fixture: Fixture, out: Path, **options: Any) -> EngineRun:
    """A run of ``fixture`` that ``engine`` decides, without a validated search.

    The engine knows the graph of the fixture only, so that is not repaired.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bisect_trt.steps.context.open_engine", lambda *_: engine)
        return bisect_trt.bisect(
            fixture.model,
            fixture.inputs,
            precision=fixture.precision,
            require=fixture.require,
            **{
                "robust": 0,
                "repair": "none",
                "weights": "nearest",
                "out": out,
                "limits": FEW,
                **options,
            },
        ), engine


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    """Runs a fixture on an engine."""

    def run(fixture: Fixture, engine: Engine, **options: Any) -> EngineRun:
        return run_on(engine, fixture, **{"out": tmp_path / "run", **options})

    return run


@pytest.fixture(scope="session")
def on_engine(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """A run of the encoder on an engine that errs like the emulator; to be read only."""
    fixture = encoder_decomposed()
    return run_on(Engine(fixture), fixture, tmp_path_factory.mktemp("on_engine") / "run")


@pytest.fixture(scope="session")
def reproducible(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """A run of the residual network on a reproducible engine; to be read only."""
    fixture = residual()
    engine = Unsteady(fixture, lambda *_: 0)
    return run_on(engine, fixture, tmp_path_factory.mktemp("reproducible") / "run")
