"""What a run would cost, said before it starts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from bisect_trt.base.atomic_files import scratch
from bisect_trt.base.interrupt import Observer, TimeBudget
from bisect_trt.base.limits import in_words, peak_bytes, room_bytes
from bisect_trt.evaluate.cache import Cache
from bisect_trt.evaluate.references import References
from bisect_trt.inputs.samples import ALIKE, NOT_COVERED
from bisect_trt.settings import Settings, within_threads
from bisect_trt.steps.baselines import quickest_s
from bisect_trt.steps.context import Context
from bisect_trt.steps.given_checks import check_decisions, check_reference
from bisect_trt.steps.golden import check_golden
from bisect_trt.steps.memory_need import PROCESS, need_of_samples
from bisect_trt.steps.open_runners import baseline_plans, emulator_device, open_emulator
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import movable, wants_augmented

_EVALUATIONS_A_PIN = 8
"""About as many find, shrink and prove a pin of a set that is fitted to the given inputs."""

_FITTED_SHARE = 0.02
"""The pins of such a set, of all layers."""

_COPIES_A_KIND = 100
"""Copies that a search and the validation of its plan make, of each kind."""

_REPORT_S = 1.5
"""For imports, figures and files."""


@dataclass(frozen=True)
class Estimate:
    """What a run would cost, for ``samples`` inputs by ``workers`` workers.

    ``memory_bytes`` is about the peak of all processes, ``free_bytes`` what it may take, 0 where
    nobody says. ``evaluations`` and ``copies`` are expected; ``seconds`` follows roughly from them
    and one timed inference, engines apart. ``notes`` say what the inputs do not cover.
    """

    layers: int
    samples: int
    workers: int
    memory_bytes: int
    free_bytes: int
    evaluations: int
    copies: int
    seconds_per_evaluation: float
    seconds: float
    notes: Sequence[str] = ()

    @property
    def sentence(self) -> str:
        """The estimate for a person."""
        inputs = "1 input" if self.samples == 1 else f"{self.samples} inputs"
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        memory = f"about {in_words(self.memory_bytes)} of memory"
        if self.free_bytes:
            memory += f" (there is room for {in_words(self.free_bytes)})"
        return (
            f"{self.layers} layers, {inputs}, {workers}: about {self.evaluations} evaluations and "
            f"{self.copies} copies, roughly {self.seconds:.0f} s, {memory}."
        )


def expected_sets(problem: Problem) -> int:
    """About how many sets of pins a search asks about, baselines apart."""
    layers = len(problem.names)
    if problem.settings.fitted:
        return _EVALUATIONS_A_PIN * max(2, round(_FITTED_SHARE * layers))
    return 10 + round(2 * math.log2(max(2, layers)))


@within_threads
def estimate(settings: Settings, observer: Observer) -> Estimate:
    """Price a run without searching or writing anything.

    Raises:
        BadInputError: what a run would refuse too.
    """
    began = time.perf_counter()
    problem = load(settings, observer)
    need = need_of_samples(problem.graph, settings, [*problem.samples, *problem.holdout]).bytes
    room = room_bytes(PROCESS) or 0  # before what is timed takes some of it
    observer.step("timed inferences")
    inference = _timed_inference(problem, observer)
    opened = time.perf_counter() - began
    given, evaluations = len(problem.samples), len(baseline_plans(problem)) + expected_sets(problem)
    copies = _COPIES_A_KIND * (movable(problem, emulated=True) + wants_augmented(problem))
    searched = given if settings.fitted else given + copies / 4
    # An evaluation that fails ends early. A copy takes a reference and one by each emulator, a
    # layer alone on average half of a network.
    inferences = 0.3 * evaluations * searched + 3 * copies + 0.5 * len(problem.names)
    allowed = math.inf if settings.budget is None else 60.0 * settings.budget
    return Estimate(
        layers=len(problem.layers),
        samples=given,
        workers=settings.workers,
        memory_bytes=max(need, peak_bytes()),  # shapes that follow from values are not in the need
        free_bytes=room,
        evaluations=evaluations,
        copies=copies,
        seconds_per_evaluation=inference,
        seconds=min(allowed, _REPORT_S + opened + inference * inferences / settings.workers),
        notes=[f.message for f in problem.findings if f.kind in (NOT_COVERED, ALIKE)],
    )


def _timed_inference(problem: Problem, observer: Observer) -> float:
    """The seconds of an inference on one input, by the quickest; refuses what a run does."""
    emulator = open_emulator(problem, emulator_device(problem.settings))
    problem = replace(problem, samples=problem.samples[:1])
    with (
        scratch("estimate") as folder,
        closing(Cache(Path(folder))) as cache,
        closing(References(problem.reference, Path(folder) / "references")) as references,
    ):
        context = Context(
            problem=problem,
            observer=observer,
            folder=Path(folder),
            cache=cache,
            opened=None,
            emulator=emulator,
            emulator_pool=None,
            time=TimeBudget(None),
            references=references,
        )
        check_golden(problem, context)
        found = [context.evaluator.evaluate(plan) for plan in baseline_plans(problem)]
        check_reference(found[0], problem.requirements)
        check_decisions(problem, context, found[0])
        return min(quickest_s(found, 1), context.pace.timed_again())
