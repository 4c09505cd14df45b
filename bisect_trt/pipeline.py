"""The commands ``run``, ``compare``, ``repair``, ``reduce`` and ``cure`` as lists of steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bisect_trt.base.errors import MachineError, RunnerUnavailableError, one_line
from bisect_trt.base.interrupt import (
    BudgetSpentError,
    Observer,
    StoppedError,
    TimeBudget,
    TimedObserver,
    is_stop,
)
from bisect_trt.base.outcomes import Cause, Finding
from bisect_trt.base.plan import Precision
from bisect_trt.model.opsets import check_can_be_written
from bisect_trt.model.save import weights_size
from bisect_trt.reduction.cures import Cures, cure_model
from bisect_trt.reduction.oracle import Observation
from bisect_trt.reduction.reduce import (
    Reduced,
    files_read,
    reduce_model,
    result_folder,
    subgraph_to_blame,
)
from bisect_trt.repair.edits import Rule
from bisect_trt.repair.rules import rules_of
from bisect_trt.report import reduced
from bisect_trt.report.files import discard, write_repair, write_report, write_tables
from bisect_trt.report.headline import left_behind
from bisect_trt.report.reduced import headline, nothing_bad, write_cures, write_reproducer
from bisect_trt.report.repairs import Repaired, repaired_of
from bisect_trt.report.summarise import Result, summarise, summarise_interrupted
from bisect_trt.settings import Settings, within_threads
from bisect_trt.steps.answer import (
    Answered,
    RunState,
    end_search,
    in_bf16,
    inputs_table,
    keeps_matrices,
    measure_bf16,
    measure_fp32,
    validation_of_answer,
    with_reproducibility,
    with_set_in_hand,
    with_tables,
)
from bisect_trt.steps.baselines import (
    holding_stepped,
    measure_baselines,
    nothing_to_pin,
    tf32_to_blame,
)
from bisect_trt.steps.confirm import decide_on_engine
from bisect_trt.steps.context import Context, open_beside, open_context
from bisect_trt.steps.diagnosis import Triage, find_cause
from bisect_trt.steps.engine_baselines import (
    keeping_unsupported,
    measure_engine,
    unsupported_by_trial,
)
from bisect_trt.steps.failing_inputs import look_beyond
from bisect_trt.steps.fastest import fastest_plan, reduces_nothing, time_choices
from bisect_trt.steps.fit_weights import fitted_problem, fitted_weights
from bisect_trt.steps.golden import check_golden
from bisect_trt.steps.judge_list import beginning_elsewhere, judge_list, validate_list
from bisect_trt.steps.judge_mixed import beginning_at, judge_mixed, validate_mixed
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.repair import (
    Refused,
    Repair,
    check_fp16,
    find_repair,
    repair_alone,
    repaired_problem,
    whole_of,
)
from bisect_trt.steps.run_folder import refuse_answer
from bisect_trt.steps.samples import check_runs
from bisect_trt.steps.select_robust import bisect

REDUCED = "reduced"
"""The end of the default folder of :func:`reduce`."""

CURED = "cured"
"""The end of the default folder of :func:`cure`."""

REPRODUCER = "reproducer"
"""The folder of the reproducer within a run's."""

BESIDE = 0.5
"""What a repair or fitting may take of the time that is left: the search needs the rest."""

NO_TIME_TO_REPAIR = "the budget left too little time to prove a repair"
NO_TIME_TO_FIT = "the budget left too little time to round the weights to fit"
"""Say what the budget has left out."""

NOT_ON_RAY = (
    "--ray: the engine's workers hold the cluster's GPUs, so no repaired graph is tried beside; "
    "`bisect-trt repair` makes one, which is a model to run"
)
"""Says why a run on a cluster's engine repairs nothing."""

MAX_FITTED_BYTES = 1 << 30
"""Weights of more bytes are not rounded to fit."""

FIT_NOT_ON_RAY = (
    "--ray: the engine's workers hold the cluster's GPUs, so no fitted weights are tried beside"
)
NOT_PUT_BACK = (
    "the rest of the model reads inner tensors of the judged part, so its weights are not rounded "
    "to fit"
)
NONE_BETTER = "weights rounded to fit lower no error here, so all keep the nearest number"
TOO_LARGE_TO_FIT = "weights of more than 1 GB are not rounded to fit, which takes copies of them"
"""Say why no weights were fitted."""


@within_threads
def repair(settings: Settings, observer: Observer | None = None) -> Repaired:
    """Edit the graph so that FP16 fits; write the repaired model and what proves it.

    Raises:
        BadInputError: the user can correct it.
    """
    observer = observer or Observer()
    rules = rules_of(settings.repair)
    budget = TimeBudget(settings.budget)
    problem = load(replace(settings, runner="emulated"), observer, searches=False)
    with open_context(problem, observer, "-repair", budget) as context:
        problem = context.problem
        refuse_answer(context.folder)
        try:
            found = repair_alone(problem, context, rules)
        except BudgetSpentError as error:
            raise StoppedError("the budget ended before a repair was proved") from error
        result = repaired_of(found, problem, context.folder)
        write_repair(result)
        return result


@within_threads
def cure(
    settings: Settings,
    precision: Precision,
    subgraph: Path | None,
    observer: Observer | None = None,
) -> Cures:
    """Find what makes an engine right and reproducible; write the table and the cured model.

    Raises:
        BisectError: the user can correct it.
        StoppedError: the user ended it; the table so far is written.
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
    """Find the smallest bad subgraph of a model; write its reproducer.

    Raises:
        BisectError: the user can correct it.
        StoppedError: the user ended it; the smallest subgraph so far is written.
    """
    folder = result_folder(settings, REDUCED)
    reduced.FOLDER.check(folder, files_read(settings))
    result = reduce_model(settings, precision, check, observer or Observer())
    if isinstance(result, Reduced):
        write_reproducer(result, folder, made_by)
        if result.interrupted:
            raise StoppedError(f"the smallest subgraph so far is in {folder}")
    return result


@within_threads
def run(settings: Settings, observer: Observer | None = None) -> Result:
    """Find the layers to keep in FP32; write the run's folder.

    Raises:
        BisectError: the user can correct it.
        StoppedError: the user ended it; the message says what is there.
    """
    began, time_budget = time.perf_counter(), TimeBudget(settings.budget)
    observer, rules = observer or Observer(), rules_of(settings.repair)
    observer.stage("load")
    problem = load(settings, TimedObserver(observer, time_budget))
    if settings.repair not in ("auto", "none"):
        check_fp16(problem, "--repair edits")
    # Writing takes about as long as reading.
    time_budget.keep(time.perf_counter() - began)
    check_can_be_written(problem.graph, problem.base)
    with open_context(problem, observer, time_budget=time_budget) as context:
        problem = replace(context.problem, on_engine=context.engine is not None)
        # Files of an earlier run would contradict this one where it is interrupted.
        discard(context.folder)
        reduced.FOLDER.remove(context.folder / REPRODUCER)
        latest = RunState(problem)
        try:
            for state in _with_choices(problem, context, rules):
                latest = state
        except (KeyboardInterrupt, Exception) as error:
            seconds = time.perf_counter() - began
            partial = _best_so_far(latest, context, seconds) if is_stop(error) else None
            if partial is None:
                raise
            write_report(partial, latest)
            raise StoppedError(left_behind(partial)) from error
        result = _written_even_if_stopped(latest, context, time.perf_counter() - began)
        # Searched after the report is written, since it may take long and be interrupted.
        subgraph = subgraph_to_blame(latest, context)
        if subgraph is None:
            return result
        _note_subgraph(subgraph, context)
        result = _written(latest, context, time.perf_counter() - began)
        if isinstance(subgraph, Reduced) and subgraph.interrupted:
            raise StoppedError(
                f"the answer is in {context.folder}, with the smallest subgraph so far"
            )
        return result


def _states(
    problem: Problem,
    context: Context,
    rules: Sequence[Rule] = (),
) -> Iterator[RunState]:
    """The state after each step of a run, until its answer is validated.

    The graph is repaired by ``rules``.
    """
    state = RunState(problem)
    try:
        for state in _search(problem, context, rules):
            yield state
        state = replace(state, out_of_time=context.time.cut_short)
    except BudgetSpentError:
        state = end_search(state, context)
    context.time.search_ended()
    context.observer.stage("validation")
    yield state
    # Validated first, while the answer's engine is loaded: its reproducibility takes new processes.
    validation = validation_of_answer(state, context)
    state = with_reproducibility(state, context)
    state = replace(state, validation=validation if state.not_reproducible is None else None)
    yield state
    yield with_tables(state, context)


def _with_choices(problem: Problem, context: Context, rules: Sequence[Rule]) -> Iterator[RunState]:
    """The state after each step of a run, with other models beside the answer, and times."""
    mixed = listed = None
    with suppress(BudgetSpentError):  # the search begins without them
        mixed = judge_mixed(problem, context)
        listed = judge_list(problem, context)
    state = RunState(problem)
    begun = beginning_elsewhere(beginning_at(problem, mixed), listed)
    for state in _states(begun, context, rules):
        state = replace(state, mixed=mixed, listed=listed)
        yield state
    with suppress(BudgetSpentError):  # the answer is there, and what stands beside it can wait
        yield from _beside(state, context)


def _beside(state: RunState, context: Context) -> Iterator[RunState]:
    """``state`` with BF16, FP32 and a mixed model beside the answer, and the choices' times."""
    problem = state.problem
    if state.mixed is not None:
        state = replace(state, mixed=validate_mixed(state.mixed, problem, context))
        yield state
    if state.listed is not None:
        state = replace(state, listed=validate_list(state.listed, problem, context))
        yield state
    of_16_bits = problem.settings.precision is Precision.FP16 and not problem.lifted
    if of_16_bits and state.triage and context.opens_beside:
        try:
            with open_beside(context, in_bf16(problem)) as inner:
                # An engine's answer is not compared with what emulators say.
                if (inner.engine is None) == (context.engine is None):
                    state = replace(state, bf16=measure_bf16(state, inner.problem, inner))
        except (RunnerUnavailableError, MachineError) as error:
            context.note(Finding("no-bf16", "", f"BF16 was not tried: {one_line(error)}"))
        except BudgetSpentError:
            pass
        yield state
    if state.not_reproducible is not None or not problem.settings.precision.is_storage:
        return
    timing = time_choices(state, context)
    if timing is None:
        return
    state = replace(state, timing=timing)
    yield state
    if reduces_nothing(state, timing):
        yield replace(state, fp32=measure_fp32(state, context))


def _repaired(state: RunState, context: Context, rules: Sequence[Rule]) -> Iterator[RunState]:
    """The state with the repair, then with the answer on the repaired graph."""
    if not rules or state.problem.settings.precision is not Precision.FP16:
        return
    if not context.opens_beside:
        context.note(Finding("not-repaired", "", NOT_ON_RAY))
        return
    try:
        with context.time.part(BESIDE):
            found = find_repair(state.problem, context, rules)
    except BudgetSpentError:
        context.note(Finding("not-repaired", "", NO_TIME_TO_REPAIR))
        return
    state = replace(state, repair=found)
    yield state
    if isinstance(found, Refused):
        return
    with open_beside(context, repaired_problem(state.problem, found)) as inner:
        *_, latest = _states(inner.problem, inner)
        answered = Answered(latest, inner.run_statistics())
    yield replace(state, repaired=answered)


def _fitted(state: RunState, context: Context) -> Iterator[RunState]:
    """The state with fitted weights, then with the answer on them, where it may be faster."""
    settings = state.problem.settings
    if settings.weights != "fit" or settings.precision is not Precision.FP16:
        return
    answers = [state, *([state.repaired.state] if state.repaired is not None else [])]
    if not all(keeps_matrices(answer) for answer in answers):
        return
    if not context.opens_beside:
        context.note(Finding("not-fitted", "", FIT_NOT_ON_RAY))
        return
    problem = state.problem
    if weights_size(problem.graph.proto) > MAX_FITTED_BYTES:
        context.note(Finding("not-fitted", "", TOO_LARGE_TO_FIT))
        return
    if isinstance(state.repair, Repair):
        problem = repaired_problem(problem, state.repair)
    if whole_of(problem, problem.graph) is None:
        context.note(Finding("not-fitted", "", NOT_PUT_BACK))
        return
    context.observer.step("weights")
    try:
        with context.time.part(BESIDE):
            weights = fitted_weights(problem, context)
    except BudgetSpentError:
        context.note(Finding("not-fitted", "", NO_TIME_TO_FIT))
        return
    if not weights.constants:
        context.note(Finding("not-fitted", "", NONE_BETTER))
        return
    state = replace(state, weights=weights)
    yield state
    with open_beside(context, fitted_problem(problem, weights)) as inner:
        *_, latest = _states(inner.problem, inner)
        answered = Answered(latest, inner.run_statistics())
    yield replace(state, fitted=answered)


def _best_so_far(state: RunState, context: Context, seconds: float) -> Result | None:
    """The result of an interrupted run; None if no plan is known to pass."""
    state = replace(with_set_in_hand(state, context), interrupted=True)
    result = summarise_interrupted(state, context.run_statistics(), seconds)
    if result is None:
        return None
    plan = state.base.with_pins(result.plan.pinned)
    return replace(result, inputs=inputs_table(state, context, plan))


def _note_subgraph(subgraph: Reduced | Observation, context: Context) -> None:
    """Write the reproducer of an engine's fault, or note that no subgraph has it."""
    if isinstance(subgraph, Reduced):
        write_reproducer(subgraph, context.folder / REPRODUCER, "bisect-trt run")
        words = f"{headline(subgraph)} {REPRODUCER}/ is ready for a bug report."
        context.note(Finding("reduced", subgraph.nodes[0][0], words))
    elif subgraph.runs:
        context.note(Finding("reduced", "", nothing_bad(subgraph)))


def _written(state: RunState, context: Context, seconds: float) -> Result:
    result = summarise(state, context.run_statistics(), seconds)
    write_report(result, state)
    return result


def _written_even_if_stopped(state: RunState, context: Context, seconds: float) -> Result:
    """The result, which an interrupt does not keep from being written."""
    try:
        return _written(state, context, seconds)
    except (KeyboardInterrupt, Exception) as error:
        if not is_stop(error):
            raise
        # Everything is known: writing it again takes moments.
        _written(state, context, seconds)
        raise StoppedError(f"the answer is in {context.folder}") from error


@within_threads
def compare(settings: Settings, observer: Observer | None = None) -> Result:
    """Write the errors of baselines and layers to layers.csv and outputs.csv, without a search.

    Raises:
        BisectError: the user can correct it.
    """
    began = time.perf_counter()
    observer = observer or Observer()
    problem = load(settings, observer)
    with open_context(problem, observer, "-compare") as context:
        problem = context.problem
        refuse_answer(context.folder)
        discard(context.folder)
        latest = RunState(problem)
        for state in _measure(problem, context):
            latest = state
        latest = replace(latest, mixed=judge_mixed(problem, context))
        result = summarise(latest, context.run_statistics(), time.perf_counter() - began, "compare")
        write_tables(result)
        return result


def _measure(problem: Problem, context: Context) -> Iterator[RunState]:
    """The state after each baseline of the whole network, on the emulator and on the engine."""
    state = RunState(problem)
    settled = check_golden(problem, context)
    if settled is not None:
        yield replace(state, settled=settled)
        return
    baselines = measure_baselines(problem, context)
    if context.engine is None:
        # TensorRT computes some layers in several FP16 steps, which the emulators do not round.
        stepped = holding_stepped(problem, context, baselines.layers)
        if stepped is not None:
            yield from _measure(stepped, context)
            return
    state = replace(state, baselines=baselines, settled=baselines.diagnosis)
    yield state
    if state.settled is not None:
        return
    engine = measure_engine(problem, context, baselines)
    if engine is None:
        return
    fitting = keeping_unsupported(problem, context, engine)
    if fitting is not None:
        # Measured again: an engine names one unsupported layer at a time.
        yield from _measure(fitting, context)
        return
    yield replace(state, engine=engine, settled=engine.diagnosis, validation=engine.validation)


def _search(
    problem: Problem,
    context: Context,
    rules: Sequence[Rule],
) -> Iterator[RunState]:
    """The state after each step; ends early if one settles the run."""
    state = RunState(problem)
    # A held out input that the model cannot run would be found only after the search.
    check_runs(context, problem.holdout)
    context.observer.stage("baselines")
    for state in _measure(problem, context):
        yield state
    fitting = unsupported_by_trial(problem, context, state.engine)
    if fitting is not None:
        for state in _measure(fitting, context):
            yield state
    if state.settled is not None or state.baselines is None:
        return
    problem, baselines, engine = state.problem, state.baselines, state.engine
    context.observer.stage("cause")
    unseen = None if problem.settings.fitted else look_beyond(problem, context, baselines)
    state = replace(state, unseen=unseen)
    # Everything reduced passed its validation: there is nothing to search.
    if unseen is not None and unseen.validation is not None and engine is None:
        settled = nothing_to_pin(baselines.reduced, problem.settings.precision)
        yield replace(state, settled=settled, validation=unseen.validation)
        return
    # TF32 is a switch of the whole network, so no layer can be pinned against it.
    if unseen is not None and problem.settings.precision is Precision.TF32 and engine is None:
        yield replace(state, settled=tf32_to_blame(unseen.reduced))
        return
    triage = find_cause(problem, context, baselines, engine, unseen)
    if not isinstance(triage, Triage):
        state = replace(state, settled=triage)
        yield state
        # What pins cannot cure, such as with --keep-reduced, an edit may.
        if triage.cause not in (Cause.NONE, Cause.TF32) and baselines.fp32.verdict.passed:
            yield from _repaired(state, context, rules)
        return
    state = replace(state, triage=triage)
    yield state
    context.observer.stage("search")
    for with_repair in _repaired(state, context, rules):
        state = with_repair
        yield state
    context.observer.step("bisect")
    context.tell_evaluations()
    bisection = bisect(problem, context, baselines, triage, triage.limit)
    state = replace(state, bisection=bisection)
    if bisection is not None:
        context.observer.best(len(bisection.pinned))
    yield state
    if context.engine is not None and engine is not None:
        judgement = decide_on_engine(problem, context, baselines, engine, triage, bisection)
        yield replace(state, judgement=judgement)
        judgement = fastest_plan(problem, context, baselines, engine, triage, judgement)
        context.observer.best(len(judgement.plan.pinned))
        state = replace(state, judgement=judgement)
        yield state
    yield from _fitted(state, context)
