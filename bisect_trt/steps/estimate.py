"""The cost of a run, estimated before it starts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bisect_trt.base.atomic_files import scratch
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.limits import in_words, peak_bytes, room_bytes
from bisect_trt.base.plan import Precision
from bisect_trt.inputs.images import IMAGES
from bisect_trt.inputs.samples import ALIKE, NOT_COVERED
from bisect_trt.repair.rules import rules_of
from bisect_trt.settings import Settings, within_threads
from bisect_trt.steps.baselines import quickest_s
from bisect_trt.steps.context import open_context
from bisect_trt.steps.given_checks import check_decisions, check_reference
from bisect_trt.steps.golden import check_golden
from bisect_trt.steps.memory_need import PROCESS, need_of
from bisect_trt.steps.open_runners import baseline_plans
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import movable, wants_augmented


@dataclass(frozen=True)
class Estimate:
    """The cost of a run for ``samples`` inputs and ``workers`` workers.

    ``memory_bytes``: about the peak of all processes; ``free_bytes``: what it may take, 0 if
    unknown.
    ``evaluations``, ``copies``: how many are expected.
    ``seconds``: the least; follows from them and one timed inference, without engines, repairs and
    fitted weights.
    ``notes``: what the inputs do not cover.
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
            f"{self.copies} copies, at least {self.seconds:.0f} s, {memory}."
        )


REPAIR_NOTE = "where the graph can be repaired, that form is searched too: up to twice the time"
FIT_NOTE = (
    "where layers that multiply matrices stay in FP32, weights are rounded to fit and that network "
    "is searched too: up to twice the time"
)


def expected_sets(problem: Problem) -> int:
    """About how many sets of pins a search evaluates, baselines apart."""
    layers = len(problem.names)
    if problem.settings.fitted:
        # A fitted set has about 2 % of the layers; each is found, shrunk and proved.
        return 8 * max(2, round(0.02 * layers))
    return 10 + round(2 * math.log2(max(2, layers)))


@within_threads
def estimate(settings: Settings, observer: Observer) -> Estimate:
    """Estimate the cost of a run without searching or writing anything.

    Raises:
        BadInputError: a run would refuse it too.
    """
    began, rules = time.perf_counter(), rules_of(settings.repair)
    problem = load(settings, observer)
    need = need_of(problem.graph, settings, [*problem.samples, *problem.holdout]).bytes
    room = room_bytes(PROCESS) or 0  # before what is timed takes some of it
    observer.step("timed inferences")
    inference = _timed_inference(problem)
    opened = time.perf_counter() - began
    given, evaluations = len(problem.samples), len(baseline_plans(problem)) + expected_sets(problem)
    copies = 100 * (movable(problem, emulated=True) + wants_augmented(problem))
    searched = given if settings.fitted else given + copies / 4
    # An evaluation that fails ends early. A copy takes a reference and one by each emulator, a
    # layer alone on average half of a network.
    inferences = 0.3 * evaluations * searched + 3 * copies + 0.5 * len(problem.names)
    allowed = math.inf if settings.budget is None else 60.0 * settings.budget
    report_s = 1.5  # imports, figures and files
    is_fp16 = settings.precision is Precision.FP16
    return Estimate(
        layers=len(problem.layers),
        samples=given,
        workers=settings.workers,
        # Shapes that follow from values are not in the need.
        memory_bytes=max(need, peak_bytes()),
        free_bytes=room,
        evaluations=evaluations,
        copies=copies,
        seconds_per_evaluation=inference,
        seconds=min(allowed, report_s + opened + inference * inferences / settings.workers),
        notes=[
            *(f.message for f in problem.findings if f.kind in (IMAGES, NOT_COVERED, ALIKE)),
            *([REPAIR_NOTE] if rules and is_fp16 else []),
            *([FIT_NOTE] if settings.weights == "fit" and is_fp16 else []),
        ],
    )


def _timed_inference(problem: Problem) -> float:
    """The seconds of the quickest inference on one input; refuses what a run refuses."""
    with scratch("estimate") as folder:
        # An engine would take a build, and workers a start, for one inference.
        settings = replace(
            problem.settings, runner="emulated", workers=1, ray=None, out=Path(folder) / "run"
        )
        one = replace(problem, settings=settings, samples=problem.samples[:1])
        with open_context(one, Observer()) as context:
            one = context.problem
            check_golden(one, context)
            found = [context.evaluator.evaluate(plan) for plan in baseline_plans(one)]
            check_reference(found[0], one.requirements)
            check_decisions(one, context, found[0])
            return min(quickest_s(found, 1), context.pace.timed_again())
