"""Times plans on engines beside each other, and says which differences are real.

Candidates take turns in rounds, so that a drifting GPU hurts all alike. Two plans are compared
round by round: they are equal where the median difference is within the spread of the differences.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bisect_trt.base.errors import RunnerFailedError, one_line
from bisect_trt.base.outcomes import ChoiceTimes
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import file_form
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.device import GpuCondition
from bisect_trt.runners.process import IsolatedWorker, Remote, WorkerPool
from bisect_trt.runners.tensorrt.profile import profile_of, values_of
from bisect_trt.runners.tensorrt.records import EngineRequest
from bisect_trt.runners.tensorrt.timing import (
    STORING_WORKER,
    TIMING_WORKER,
    RoundTimes,
    StoredEngine,
    TimedEngines,
)

ROUNDS = 9
"""Turns that each engine takes."""
LAUNCH_BOUND = 0.7
"""The ratio of graph replay to plain enqueues under which a model's time is launches."""
RESOLUTION_MS = 0.002
"""Differences up to this say nothing: CUDA's events count half microseconds."""
SLOW_CLOCK = 0.8
"""The share of its highest clock under which a GPU is said to be slowed down."""


@dataclass(frozen=True)
class Spread:
    """The median of an engine's rounds and their quartiles, in ms."""

    median_ms: float
    low_ms: float
    high_ms: float


def spread_of(rounds_ms: Sequence[float]) -> Spread | None:
    """The median and quartiles of rounds; None where there are none or one has no time."""
    if not rounds_ms or any(math.isnan(ms) for ms in rounds_ms):
        return None
    low, median, high = np.percentile(rounds_ms, [25, 50, 75]).tolist()
    return Spread(median, low, high)


@dataclass(frozen=True)
class PlanTime:
    """The times of the engine built from one plan, or why there are none.

    ``graph`` is the replay of a captured CUDA graph, None where it cannot be captured. ``plain``
    is one enqueue at a time. ``rounds`` are the times that both were made from.
    """

    rounds: RoundTimes

    @cached_property
    def graph(self) -> Spread | None:
        """The replay of a CUDA graph."""
        return spread_of(self.rounds.graph_ms)

    @cached_property
    def plain(self) -> Spread | None:
        """Single enqueues."""
        return spread_of(self.rounds.plain_ms)

    @property
    def failure(self) -> str:
        """Why there are no times, '' where there are."""
        return self.rounds.failure


@dataclass(frozen=True)
class Timing:
    """The times of plans by name, what ran them, and what the GPU did meanwhile.

    ``own_processes`` are those of this run on the GPU, the timing one included.
    """

    plans: Mapping[str, PlanTime]
    versions: Mapping[str, str]
    condition: GpuCondition | None = None
    own_processes: int = 1

    @cached_property
    def by_graph(self) -> bool:
        """Whether plans are compared by graph replay: every engine that runs can be captured."""
        timed = [plan for plan in self.plans.values() if plan.plain is not None]
        return all(plan.graph is not None for plan in timed)

    def ms(self, name: str) -> float:
        """The median time of a plan in ms, by graph replay where all have it; NaN without times."""
        plan = self.plans[name]
        used = plan.graph if self.by_graph else plan.plain
        return used.median_ms if used is not None else math.nan

    def difference(self, name: str, other: str) -> Spread:
        """How much longer ``name`` takes than ``other``: over the rounds, in ms.

        Raises:
            ValueError: one of the two has no times.
        """
        one, two = (self.plans[n].rounds for n in (name, other))
        pairs = (one.graph_ms, two.graph_ms) if self.by_graph else (one.plain_ms, two.plain_ms)
        found = spread_of(np.subtract(*map(np.asarray, pairs)).tolist()) if all(pairs) else None
        if found is None:
            raise ValueError(f"{name!r} or {other!r} has no times")
        return found

    def equal(self, name: str, other: str) -> bool:
        """Whether two plans take the same time, as far as the rounds can tell."""
        found = self.difference(name, other)
        spread = max(found.high_ms - found.low_ms, RESOLUTION_MS)
        return abs(found.median_ms) <= spread

    def fastest(self) -> tuple[str, ...]:
        """The fastest plan, then those that take the same time; empty where none was timed."""
        timed = [name for name in self.plans if not math.isnan(self.ms(name))]
        if not timed:
            return ()
        first = min(timed, key=self.ms)
        return (first, *(n for n in timed if n != first and self.equal(n, first)))

    def notes(self) -> tuple[str, ...]:
        """Sentences about the launches, the GPU's clock and other processes on it."""
        found = []
        if self.condition is not None:
            clock, limit = self.condition.clock_mhz, self.condition.max_clock_mhz
            if clock < SLOW_CLOCK * limit:
                found.append(f"The GPU ran at {clock} of {limit} MHz while engines were timed.")
            others = (self.condition.processes or 0) - self.own_processes
            if others > 0:
                count = "Another process" if others == 1 else f"{others} other processes"
                found.append(f"{count} used the GPU while engines were timed.")
        return tuple(found)

    def as_data(self) -> dict[str, Any]:
        """The times as JSON takes them, which :meth:`from_data` reads."""
        plans = {name: asdict(plan.rounds) for name, plan in self.plans.items()}
        for rounds in plans.values():
            rounds["graph_ms"] = [None if math.isnan(ms) else ms for ms in rounds["graph_ms"]]
        condition = asdict(self.condition) if self.condition is not None else None
        own = self.own_processes
        return {"plans": plans, "versions": dict(self.versions), "on": condition, "own": own}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Timing:
        """The times that :meth:`as_data` wrote."""
        plans = dict[str, PlanTime]()
        for name, rounds in data["plans"].items():
            graph = tuple(math.nan if ms is None else ms for ms in rounds["graph_ms"])
            plans[name] = PlanTime(RoundTimes(graph, tuple(rounds["plain_ms"]), rounds["failure"]))
        condition = GpuCondition(**data["on"]) if data["on"] is not None else None
        return cls(plans, data["versions"], condition, data["own"])

    def of_choices(self) -> tuple[ChoiceTimes, ...]:
        """The times of each name that has some, for a record."""
        found = []
        for name, plan in self.plans.items():
            graph, plain = plan.graph, plan.plain
            if plain is not None:
                used = graph or plain
                ms = graph.median_ms if graph is not None else None
                found.append(ChoiceTimes(name, ms, plain.median_ms, used.high_ms - used.low_ms))
        return tuple(found)

    def advice(self, name: str) -> str:
        """Says that CUDA graphs are worth it for a plan; '' where they are not."""
        graph, plain = self.plans[name].graph, self.plans[name].plain
        if graph is None or plain is None or graph.median_ms >= LAUNCH_BOUND * plain.median_ms:
            return ""
        return (
            f"Most of the time is launches: use CUDA graphs ({graph.median_ms:.3g} ms instead of "
            f"{plain.median_ms:.3g} ms)."
        )


@dataclass(frozen=True)
class Build:
    """A plan of a graph, of which an engine is built. Variants may be of several graphs."""

    graph: Graph
    plan: PrecisionPlan


Timer = Callable[[Mapping[str, Build], Sample], Timing]
"""Builds what it is given for a sample's shapes and times it beside each other."""


def time_engines(
    builds: Mapping[str, Build],
    sample: Sample,
    *,
    module: str | None = None,
    builders: int = 1,
    rounds: int = ROUNDS,
    timeout_s: float | None = None,
    own_processes: int = 1,
    hire: Callable[[str, Mapping[str, Any]], Remote] = IsolatedWorker,
) -> Timing:
    """Builds an engine for each of ``builds`` and times them beside each other.

    Args:
        builds: what to build, by name.
        sample: the input to time, of the shapes to build for.
        module: the TensorRT module, None for the installed one.
        builders: processes that build at the same time. TensorRT picks kernels by timing them, so
            more than one disturbs it; TensorRT for RTX does not.
        rounds: how many turns each engine takes.
        timeout_s: the limit of each build, and of the timing for each plan.
        own_processes: how many of this run's are on the GPU while engines are timed.
        hire: makes a worker process.

    Returns:
        The times. What cannot be built or run has a failure in their place.

    Raises:
        RunnerUnavailableError: TensorRT, cuda-python or a GPU is missing.
        RunnerFailedError: the process that times was lost.
    """
    with tempfile.TemporaryDirectory(prefix="bisect-trt-timing-") as folder:
        # Opened first: without a GPU nothing is built.
        timer = hire(TIMING_WORKER, {"module": module})
        try:
            versions = timer.call("describe", timeout_s=timeout_s)
            built = store_engines(
                builds,
                sample,
                Path(folder),
                module=module,
                builders=builders,
                timeout_s=timeout_s,
                hire=hire,
            )
            stored = {n: found for n, found in built.items() if isinstance(found, StoredEngine)}
            limit = None if timeout_s is None else timeout_s * max(1, len(stored))
            timed: TimedEngines = timer.call(
                "time", stored, dict(sample.arrays), rounds, timeout_s=limit
            )
        finally:
            timer.close()
    times = {
        name: PlanTime(
            timed.times[name] if isinstance(found, StoredEngine) else RoundTimes(failure=found)
        )
        for name, found in built.items()
    }
    return Timing(times, versions, timed.condition, own_processes)


def store_engines(
    builds: Mapping[str, Build],
    sample: Sample,
    folder: Path,
    *,
    module: str | None = None,
    builders: int = 1,
    run: bool = True,
    timeout_s: float | None = None,
    hire: Callable[[str, Mapping[str, Any]], Remote] = IsolatedWorker,
) -> dict[str, StoredEngine | str]:
    """Builds an engine for each of ``builds`` into ``folder``; see :func:`time_engines`.

    With ``run`` each is run once, which compiles its kernels. Without it no GPU is needed.

    Returns:
        The engine by name, or why it could not be built.
    """
    values = values_of([sample])
    arrays = dict(sample.arrays) if run else None
    pool = WorkerPool([hire(STORING_WORKER, {"module": module}) for _ in range(builders)])

    def store(number: int, build: Build) -> StoredEngine | str:
        profile = profile_of(build.graph.proto, [sample], ())
        with file_form(to_typed(build.graph, build.plan)) as source:
            tf32 = build.plan.base is Precision.TF32
            request = EngineRequest(source, profile, tf32, values=values)
            file = str(folder / f"{number}.engine")
            try:
                stored: StoredEngine = pool.call(
                    "store", request, file, arrays, timeout_s=timeout_s
                )
            except RunnerFailedError as error:
                return one_line(error)
        return stored

    try:
        with ThreadPoolExecutor(builders) as threads:
            found = threads.map(store, range(len(builds)), builds.values())
            return dict(zip(builds, found, strict=True))
    finally:
        pool.close()
