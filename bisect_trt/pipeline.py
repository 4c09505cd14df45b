"""The main job as a list of steps:

load -> reference -> baselines -> triage -> bisect -> verify on the engine -> report
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bisect_trt.base.interrupt import (
    BudgetSpentError,
    Observer,
    StoppedError,
    TimeBudget,
    TimedObserver,
    is_stop,
)
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision
from bisect_trt.model.roundings import check_can_be_written
from bisect_trt.reduction.cures import Cures, cure_model
from bisect_trt.reduction.oracle import Observation
from bisect_trt.reduction.reduce import (
    Reduced,
    files_read,
    reduce_model,
    result_folder,
    subgraph_to_blame,
)
from bisect_trt.report import reduced
from bisect_trt.report.files import discard, write_report, write_tables
from bisect_trt.report.headline import left_behind
from bisect_trt.report.reduced import headline, nothing_bad, write_cures, write_reproducer
from bisect_trt.report.summarise import Result, summarise, summarise_interrupted
from bisect_trt.settings import Settings, within_threads
from bisect_trt.steps.answer import (
    RunState,
    end_search,
    inputs_table,
    looked_at_again,
    validation_of_answer,
    with_reproducibility,
    with_set_in_hand,
)
from bisect_trt.steps.baselines import (
    holding_stepped,
    measure_baselines,
    nothing_to_pin,
    tf32_to_blame,
)
from bisect_trt.steps.confirm import decide_on_engine
from bisect_trt.steps.context import Context, open_context, plans_of
from bisect_trt.steps.diagnosis import Triage, find_cause
from bisect_trt.steps.engine_baselines import (
    keeping_unsupported,
    measure_engine,
    unsupported_by_trial,
)
from bisect_trt.steps.estimate import expected_sets
from bisect_trt.steps.failing_inputs import look_beyond
from bisect_trt.steps.golden import check_golden
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.run_folder import refuse_answer
from bisect_trt.steps.samples import check_runs
from bisect_trt.steps.select_fitted import bisect

REDUCED = "reduced"
CURED = "cured"
"""What the default folders of :func:`reduce` and :func:`cure` end with."""

REPRODUCER = "reproducer"
"""The folder within the run's."""


@within_threads
def cure(
    settings: Settings,
    precision: Precision,
    subgraph: Path | None,
    observer: Observer | None = None,
) -> Cures:
    """What makes an engine right and reproducible; writes the table and the cured model.

    Raises:
        BisectError: something that the user can mend.
    """
    folder = result_folder(settings, CURED)
    reduced.CURE_FOLDER.check(folder, files_read(settings))
    cures = cure_model(settings, precision, subgraph, observer or Observer())
    if cures.tried:
        write_cures(cures, folder)
    if cures.interrupted:
        raise StoppedError(
            f"the table so far is in {folder}" if cures.tried else "nothing was kept"
        )
    return cures


@within_threads
def reduce(
    settings: Settings,
    precision: Precision,
    check: str | None,
    made_by: str,
    observer: Observer | None = None,
) -> Reduced | Observation:
    """The smallest bad subgraph of a model; writes its reproducer into the settings' ``out``.

    Raises:
        BisectError: something that the user can mend.
        StoppedError: the user ended it; the smallest subgraph so far is written.
    """
    folder = result_folder(settings, REDUCED)
    reduced.FOLDER.check(folder, files_read(settings))
    found = reduce_model(settings, precision, check, observer or Observer())
    if isinstance(found, Reduced):
        write_reproducer(found, folder, made_by)
        if found.interrupted:
            raise StoppedError(f"the smallest subgraph so far is in {folder}")
    return found


@within_threads
def run(settings: Settings, observer: Observer | None = None) -> Result:
    """The main job; writes the run's folder.

    Raises:
        BisectError: something that the user can mend.
        StoppedError: the user ended it; the message says what there is.
    """
    began, time_budget = time.perf_counter(), TimeBudget(settings.budget)
    observer = observer or Observer()
    problem = load(settings, TimedObserver(observer, time_budget))
    time_budget.keep(time.perf_counter() - began)  # writing takes about as long as reading
    check_can_be_written(problem.graph, problem.base)
    with open_context(problem, observer, time_budget=time_budget) as context:
        problem = replace(context.problem, on_engine=context.engine is not None)
        discard(context.folder)
        reduced.FOLDER.remove(context.folder / REPRODUCER)

        def seconds() -> float:
            return time.perf_counter() - began

        latest = RunState(problem)
        try:
            try:
                for known in _search(problem, context):
                    latest = known
                latest = latest.with_(out_of_time=time_budget.cut_short)
            except BudgetSpentError:
                latest = end_search(latest, context)
            time_budget.search_ended()
            for known in _look_into(latest, context):
                latest = known
        except (KeyboardInterrupt, Exception) as error:
            partial = _best_so_far(latest, context, seconds()) if is_stop(error) else None
            if partial is None:
                raise
            write_report(partial, latest.problem)
            raise StoppedError(left_behind(partial)) from error
        try:
            result = _written(latest, context, seconds())
        except (KeyboardInterrupt, Exception) as error:
            if not is_stop(error):
                raise
            # All is known: it takes moments, and is what was asked.
            _written(latest, context, seconds())
            raise StoppedError(f"the answer is in {context.folder}") from error
        # Its search may take long, and an interruption of it finds the report written.
        subgraph = subgraph_to_blame(latest, context)
        if subgraph is not None:
            _note_subgraph(subgraph, context)
            result = _written(latest, context, seconds())
        if isinstance(subgraph, Reduced) and subgraph.interrupted:
            raise StoppedError(
                f"the answer is in {context.folder}, with the smallest subgraph so far"
            )
        return result


def _look_into(known: RunState, context: Context) -> Iterator[RunState]:
    """The validation, reproducibility and trade-off of the answer, one after the other."""
    # Before further processes take the place of the answer's engine.
    validation = validation_of_answer(known, context)
    known = with_reproducibility(known, context)
    known = known.with_(validation=validation if known.not_reproducible is None else None)
    yield known
    yield looked_at_again(known, context)


def _best_so_far(known: RunState, context: Context, seconds: float) -> Result | None:
    """What an interrupted run leaves; None where no plan is known to pass yet."""
    known = with_set_in_hand(known, context).with_(interrupted=True)
    found = summarise_interrupted(known, context.run_statistics(), seconds)
    if found is None:
        return None
    plan = known.base.with_pins(found.plan.pinned)
    return replace(found, inputs=inputs_table(known, context, plan))


def _note_subgraph(subgraph: Reduced | Observation, context: Context) -> None:
    """Write the reproducer of what is wrong on the engine, or say that no subgraph of it is."""
    if isinstance(subgraph, Reduced):
        write_reproducer(subgraph, context.folder / REPRODUCER, "bisect-trt run")
        words = f"{headline(subgraph)} {REPRODUCER}/ is ready for a bug report."
        context.note(Finding("reduced", subgraph.nodes[0][0], words))
    elif subgraph.runs:
        context.note(Finding("reduced", "", nothing_bad(subgraph)))


def _written(known: RunState, context: Context, seconds: float) -> Result:
    result = summarise(known, context.run_statistics(), seconds)
    write_report(result, known.problem)
    return result


@within_threads
def compare(settings: Settings, observer: Observer | None = None) -> Result:
    """The error tables of the baselines and layers, without a search; writes layers.csv and
    outputs.csv.

    Raises:
        BisectError: something that the user can mend.
    """
    began = time.perf_counter()
    observer = observer or Observer()
    problem = load(settings, observer)
    with open_context(problem, observer, "-compare") as context:
        problem = context.problem
        refuse_answer(context.folder)
        discard(context.folder)
        latest = RunState(problem)
        for known in _measure(problem, context):
            latest = known
        result = summarise(latest, context.run_statistics(), time.perf_counter() - began, "compare")
        write_tables(result)
        return result


def _measure(problem: Problem, context: Context) -> Iterator[RunState]:
    """The whole network at each precision, on the emulator and on the engine."""
    known = RunState(problem)
    settled = check_golden(problem, context)
    if settled is not None:
        yield known.with_(settled=settled)
        return
    baselines = measure_baselines(problem, context)
    if context.engine is None:
        stepped = holding_stepped(problem, context, baselines.layers)
        if stepped is not None:
            yield from _measure(stepped, context)
            return
    known = known.with_(baselines=baselines, settled=baselines.diagnosis)
    yield known
    if known.settled is not None:
        return
    engine = measure_engine(problem, context, baselines)
    if engine is None:
        return
    fitting = keeping_unsupported(problem, context, engine)
    if fitting is not None:  # which may have others: an engine names one at a time
        yield from _measure(fitting, context)
        return
    yield known.with_(engine=engine, settled=engine.diagnosis, validation=engine.validation)


def _search(problem: Problem, context: Context) -> Iterator[RunState]:
    """Every step in turn, what is known after each; ends early where one settles the case."""
    known = RunState(problem)
    check_runs(context, problem.holdout)
    for known in _measure(problem, context):
        yield known
    fitting = unsupported_by_trial(problem, context, known.engine)
    if fitting is not None:
        for known in _measure(fitting, context):
            yield known
    if known.settled is not None or known.baselines is None:
        return
    problem, baselines, engine = known.problem, known.baselines, known.engine
    unseen = None if problem.settings.fitted else look_beyond(problem, context, baselines)
    known = known.with_(unseen=unseen)
    if unseen is not None and unseen.validation is not None and engine is None:
        settled = nothing_to_pin(baselines.reduced, problem.settings.precision)
        yield known.with_(settled=settled, validation=unseen.validation)
        return
    if unseen is not None and problem.settings.precision is Precision.TF32 and engine is None:
        yield known.with_(settled=tf32_to_blame(unseen.reduced))
        return
    triage = find_cause(problem, context, baselines, engine, unseen)
    if not isinstance(triage, Triage):
        yield known.with_(settled=triage)
        return
    known = known.with_(triage=triage, baselines=replace(baselines, layers=triage.layers))
    yield known
    context.observer.step("bisect")
    context.tell_evaluations()
    with context.counting(plans_of(context, expected_sets(problem))):
        bisection = bisect(problem, context, baselines, triage, triage.limit)
    known = known.with_(bisection=bisection)
    if bisection is not None:
        context.observer.best(len(bisection.pinned))
    yield known
    if context.engine is not None and engine is not None:
        judgement = decide_on_engine(problem, context, baselines, engine, triage, bisection)
        context.observer.best(len(judgement.plan.pinned))
        yield known.with_(judgement=judgement)
