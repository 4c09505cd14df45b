"""``verify``: does a plan still hold, for new weights or new inputs? One answer, made for release
gates.

The plan is executed by both emulators and, where one can run, by the engine; the typed model's
types are checked against it, by ONNX's own inference and by TensorRT's parser where that is
installed; and the forms in which older versions are told of the pins are read back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bisect_trt.core.disk.run_files import VERIFY_FILES
from bisect_trt.core.holds import Holds, word_of
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.passes.lifted import load_source
from bisect_trt.numerics.scores import times
from bisect_trt.probe.result import ProbeResult
from bisect_trt.stations.answer.plan_forms import Check, check_forms
from bisect_trt.stations.asked.saved_plan import SavedPlan
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.asked.thread_limit import within_threads
from bisect_trt.stations.baselines.baselines import quickest_s
from bisect_trt.stations.baselines.golden import check_golden
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.bench.open_bench import open_bench
from bisect_trt.stations.case.case import Case, load
from bisect_trt.stations.draws.by_lot import SEARCH_STREAM
from bisect_trt.stations.draws.fresh_test import VERIFYING, WANTED, planned_test
from bisect_trt.stations.draws.holds import measure_holds
from bisect_trt.stations.draws.varied import variants

GOLDEN = "golden outputs"
"""The check of the reference, not of the plan."""


@dataclass(frozen=True)
class Verification:
    """``passed`` if the runner that decides meets the requirements and nothing that was looked at
    contradicts the plan. ``notes`` say what became of the inputs that were given. ``folder`` is
    where its journal is, ``seconds`` what it took.
    """

    plan: PrecisionPlan
    checks: Sequence[Check]
    requirements: Sequence[str] = field(default_factory=tuple)
    holds: Holds | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    model: str = ""
    folder: Path = Path()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """No check failed."""
        return all(check.holds is not False for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def as_json(self) -> dict[str, Any]:
        """The answer for machines."""
        return {
            "passed": self.passed,
            "model": self.model,
            "plan": {"base": self.plan.base.value, "pinned": sorted(self.plan.pinned)},
            "requirements": list(self.requirements),
            "checks": [vars(c) for c in self.checks],
            "holds": self._holds_json(),
            "robust": word_of(self.holds),
            "notes": list(self.notes),
        }

    def _holds_json(self) -> dict[str, Any] | None:
        if self.holds is None:
            return None
        return {name: value for name, value in asdict(self.holds).items() if name != "draws"}


@within_threads
def verify(settings: Settings, saved: SavedPlan, observer: Observer) -> Verification:
    """Check a plan on the settings' model and inputs, by its own requirements where the settings
    name none. Nothing is searched, so that every input counts: none is kept apart by itself.

    Args:
        settings: the model, the inputs and what is asked for.
        saved: the plan.
        observer: hears of the progress.

    Raises:
        BadInputError: it is no plan of this model.
    """
    began = time.perf_counter()
    settings = _as_saved(settings, saved)
    if settings.rewrite is None:  # refused before a folder is made
        saved.check_model(load_source(settings.model).graph)
    case = load(settings, observer, searches=False)
    if case.judged:  # layers behind the judged part are in FP32 in the model to ship
        judged = replace(saved.plan, pinned=saved.plan.pinned.intersection(case.graph.names))
        saved = replace(saved, plan=judged)
    saved.check_model(case.graph)
    if saved.scales:  # what the plan was found for, whatever these inputs' are
        case = replace(case, requirements=replace(case.requirements, scales=saved.scales))
    with open_bench(case, observer, "-verify") as bench:
        case = replace(bench.case, on_engine=bench.engine is not None)
        for name in VERIFY_FILES:  # an earlier answer must not outlive what is asked anew
            (bench.folder / name).unlink(missing_ok=True)
        observer.station("verify")
        if settings.variants != "auto":  # kinds that were named and make none are refused now
            next(variants(case, bench, SEARCH_STREAM, 1), None)
            bench.variants_of(SEARCH_STREAM).clear()  # no search has it
        # Before the emulators have sessions: of many nodes ONNX's own checks take as much as one.
        forms = check_forms(case, saved.plan)
        checks = [*_golden(case, bench), *_judgements(bench, saved.plan), *forms]
        others = (PrecisionPlan(Precision.FP32), case.base)
        probes = [bench.prober.probe(plan) for plan in (saved.plan, *others)]
        bench.pace.took(quickest_s(probes, len(case.samples)))
        test = planned_test(case, VERIFYING, bench.pace.usual_seconds, last=True)
        holds = measure_holds(case, bench, bench.judges, saved.plan, test)
        holds = replace(holds, fitted=saved.fitted)
        # What was said when it was loaded is not in the answer: a plan of a model that is reduced
        # already holds whatever is wrong with it.
        notes = [f.message for f in case.findings if f.kind == "copies" or f.weighty]
        return Verification(
            saved.plan,
            checks,
            case.requirements.texts,
            holds,
            notes,
            case.model.name,
            bench.folder,
            time.perf_counter() - began,
        )


def _as_saved(settings: Settings, saved: SavedPlan) -> Settings:
    """The settings, with what the plan was found for in place of each that says nothing."""
    if settings.robust is None and settings.holds_on is None:
        settings = replace(settings, robust=saved.robust or WANTED)
    if settings.holds_on is None:
        settings = replace(settings, holds_on=saved.holds_on)
    if not settings.require and saved.requirements:
        metrics = settings.metrics or saved.metrics
        settings = replace(settings, require=saved.requirements, metrics=metrics)
    outputs = settings.outputs or saved.outputs
    return replace(settings, outputs=outputs, holdout=settings.holdout or ("none",))


def _golden(case: Case, bench: Bench) -> list[Check]:
    """Whether the reference gives the golden outputs, where there are some."""
    if case.golden is None:
        return []
    differs = check_golden(case, bench)
    said = differs.sentence if differs is not None else "the reference gives them"
    return [Check(GOLDEN, differs is None, said)]


def _judgements(bench: Bench, plan: PrecisionPlan) -> list[Check]:
    """The engine decides where there is one; the emulators' word is then shown, but an engine may
    do better than they say.
    """
    emulators = (bench.prober, bench.second)
    if bench.engine is None:
        return [_judged(prober.probe(plan), counts=True) for prober in emulators]
    decided = _judged(bench.engine.probe(plan), counts=True)
    return [decided, *(_judged(prober.probe(plan), counts=False) for prober in emulators)]


def _judged(result: ProbeResult, *, counts: bool) -> Check:
    what = f"requirements on {result.runner}"
    note = f" ({result.note})" if result.note else ""
    detail = f"{result.verdict.value}: {times(result.score, result.verdict)}{note}"
    if counts:
        return Check(what, result.verdict.passed, detail)
    return Check(what, None, f"{detail}; the engine decides")
