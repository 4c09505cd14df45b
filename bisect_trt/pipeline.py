"""The main job as a list of stations:

load -> reference -> baselines -> triage -> bisect -> verify on the engine -> report
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from bisect_trt.base.interrupt import (
    Beside,
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
from bisect_trt.reduction.oracle import Seen
from bisect_trt.reduction.reduce import Reduced
from bisect_trt.reduction.reduce_model import (
    REPRODUCER,
    files_read,
    piece_to_blame,
    reduce_model,
    result_folder,
)
from bisect_trt.report import reduced
from bisect_trt.report.files import discard, write_report, write_tables
from bisect_trt.report.headline import left_behind
from bisect_trt.report.reduced import headline, nothing_bad, write_cures, write_reproducer
from bisect_trt.report.summarise import Result, summarise, summarise_interrupted
from bisect_trt.settings import Settings, within_threads
from bisect_trt.steps.answer import (
    Known,
    begin_steadiness,
    end_search,
    holds_of_answer,
    inputs_table,
    looked_at_again,
    with_set_in_hand,
    with_steadiness,
)
from bisect_trt.steps.baselines import (
    holding_stepped,
    measure_baselines,
    nothing_to_pin,
    tf32_to_blame,
)
from bisect_trt.steps.confirm import decide_on_engine
from bisect_trt.steps.context import Bench, let_go, open_bench, plans_of
from bisect_trt.steps.diagnosis import Triage, find_cause
from bisect_trt.steps.engine_baselines import begin_engine, measure_engine, with_table
from bisect_trt.steps.estimate import expected_sets
from bisect_trt.steps.failing_inputs import look_beyond
from bisect_trt.steps.golden import check_golden
from bisect_trt.steps.open_runners import baseline_plans
from bisect_trt.steps.problem import Case, load
from bisect_trt.steps.run_folder import refuse_answer
from bisect_trt.steps.samples import check_runs
from bisect_trt.steps.select_fitted import bisect
from bisect_trt.steps.unsupported import holding_unfit, unfit_by_trial

REDUCED, CURED = "reduced", "cured"
"""What the default folders of :func:`reduce` and :func:`cure` end with."""


@within_threads
def cure(
    settings: Settings, precision: Precision, piece: Path | None, observer: Observer | None = None
) -> Cures:
    """What makes an engine right and steady; writes the table and the cured model.

    Args:
        settings: the model, the inputs and the engine.
        precision: what the engine runs in.
        piece: a reproducer's folder, whose nodes are marked first.
        observer: hears of the progress.

    Raises:
        BisectError: something that the user can mend.
    """
    folder = result_folder(settings, CURED)
    reduced.CURE_FOLDER.check(folder, files_read(settings))
    cures = cure_model(settings, precision, piece, observer or Observer())
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
) -> Reduced | Seen:
    """The smallest bad piece of a model; writes its reproducer into the settings' ``out``.

    Args:
        settings: the model, the inputs and the engine.
        precision: what the engine runs in.
        check: a command that says instead of an engine what is bad.
        made_by: what the reproducer names as the command that made it.
        observer: hears of the progress.

    Returns:
        What was found; what the whole model shows where it is not bad, and nothing is written then.

    Raises:
        BisectError: something that the user can mend.
        StoppedError: the user ended it; the smallest piece so far is written.
    """
    folder = result_folder(settings, REDUCED)
    reduced.FOLDER.check(folder, files_read(settings))
    found = reduce_model(settings, precision, check, observer or Observer())
    if isinstance(found, Reduced):
        write_reproducer(found, folder, made_by)
        if found.interrupted:
            raise StoppedError(f"the smallest piece so far is in {folder}")
    return found


@within_threads
def run(settings: Settings, observer: Observer | None = None) -> Result:
    """The main job; writes the run's folder.

    Raises:
        BisectError: something that the user can mend.
    """
    began, time_budget = time.perf_counter(), TimeBudget(settings.budget)
    observer = observer or Observer()
    case = load(settings, TimedObserver(observer, time_budget))
    time_budget.keep(time.perf_counter() - began)  # writing takes about as long as reading
    check_can_be_written(case.graph, case.base)
    plans = baseline_plans(case)
    with (
        open_bench(case, observer, time_budget=time_budget, begin=plans) as bench,
        closing(Beside()) as beside,
    ):
        case = replace(bench.case, on_engine=bench.engine is not None)
        discard(bench.folder)
        reduced.FOLDER.remove(bench.folder / REPRODUCER)
        latest = Known(case)
        try:
            try:
                for known in _search(case, bench, beside):
                    latest = known
                latest = latest.with_(out_of_time=time_budget.cut_short)
            except BudgetSpentError:
                latest = end_search(latest, bench)
            time_budget.search_ended()
            for known in _look_into(latest, bench):
                latest = known
        except (KeyboardInterrupt, Exception) as error:
            if not is_stop(error):
                raise
            partial = _best_so_far(latest, bench, time.perf_counter() - began)
            if partial is None:
                raise
            write_report(partial, latest.case)
            raise StoppedError(left_behind(partial)) from error
        try:
            let_go(case, bench)
            result = _written(latest, bench, time.perf_counter() - began)
        except (KeyboardInterrupt, Exception) as error:
            if not is_stop(error):
                raise
            # All is known: it takes moments, and is what was asked.
            _written(latest, bench, time.perf_counter() - began)
            raise StoppedError(f"the answer is in {bench.folder}") from error
        # Its search may take long: whoever interrupts it has the report already.
        piece = piece_to_blame(latest, bench)
        if piece is not None:
            _note_piece(piece, bench)
            result = _written(latest, bench, time.perf_counter() - began)
        if isinstance(piece, Reduced) and piece.interrupted:
            raise StoppedError(f"the answer is in {bench.folder}, with the smallest piece so far")
        return result


def _look_into(known: Known, bench: Bench) -> Iterator[Known]:
    """On what the answer holds, how steady it is and how it compares with others; what is known
    after each.
    """
    known = _with_engine_table(known, bench)
    yield known
    # The draws run where the engine is, while it is built for the further processes. An answer
    # that these take back, or that Ctrl-C keeps from them, holds on nothing.
    begin_steadiness(known, bench)
    holds = holds_of_answer(known, bench)
    known = with_steadiness(known, bench)
    known = known.with_(holds=holds if known.unsteady is None else None)
    yield known
    yield looked_at_again(known, bench)


def _best_so_far(known: Known, bench: Bench, seconds: float) -> Result | None:
    """What an interrupted run leaves; None where no plan is known to pass yet."""
    known = with_set_in_hand(known, bench).with_(interrupted=True)
    found = summarise_interrupted(known, bench.ledger(), seconds)
    if found is None:
        return None
    plan = known.base.with_pins(found.plan.pinned)
    return replace(found, inputs=inputs_table(known, bench, plan))


def _note_piece(piece: Reduced | Seen, bench: Bench) -> None:
    """Write the reproducer of what is wrong on the engine, or say that no piece of it is."""
    if isinstance(piece, Reduced):
        write_reproducer(piece, bench.folder / REPRODUCER, "bisect-trt run")
        words = f"{headline(piece)} {REPRODUCER}/ is ready for a bug report."
        bench.note(Finding("reduced", piece.nodes[0][0], words))
    elif piece.runs:
        bench.note(Finding("reduced", "", nothing_bad(piece)))


def _written(known: Known, bench: Bench, seconds: float) -> Result:
    result = summarise(known, bench.ledger(), seconds)
    write_report(result, known.case)
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
    case = load(settings, observer)
    with open_bench(case, observer, "-compare", begin=baseline_plans(case)) as bench:
        case = bench.case
        refuse_answer(bench.folder)
        discard(bench.folder)
        latest = Known(case)
        for known in _measure(case, bench):
            latest = known
        result = summarise(latest, bench.ledger(), time.perf_counter() - began, "compare")
        write_tables(result)
        return result


def _with_engine_table(known: Known, bench: Bench) -> Known:
    """With the engine's table of layers, which may have been made beside the search."""
    engine = known.engine
    return known if engine is None else known.with_(engine=with_table(engine, bench))


def _measure(case: Case, bench: Bench, beside: Beside | None = None) -> Iterator[Known]:
    """The whole network at each precision, on the emulator and on the engine."""
    known = Known(case)
    settled = check_golden(case, bench)
    if settled is not None:
        yield known.with_(settled=settled)
        return
    begin_engine(case, bench)
    baselines = measure_baselines(case, bench)
    if bench.engine is None:
        stepped = holding_stepped(case, bench, baselines.layers)
        if stepped is not None:
            yield from _measure(stepped, bench, beside)
            return
    known = known.with_(baselines=baselines, settled=baselines.diagnosis)
    yield known
    if known.settled is not None:
        return
    engine = measure_engine(case, bench, baselines, beside)
    if engine is None:
        return
    fitting = holding_unfit(case, bench, engine)
    if fitting is not None:  # which may have others: an engine names one at a time
        yield from _measure(fitting, bench, beside)
        return
    yield known.with_(engine=engine, settled=engine.diagnosis, holds=engine.holds)


def _search(case: Case, bench: Bench, beside: Beside) -> Iterator[Known]:
    """Every station in turn, what is known after each; ends early where one settles the case."""
    known = Known(case)
    check_runs(bench, case.holdout)
    for known in _measure(case, bench, beside):
        yield known
    fitting = unfit_by_trial(case, bench, known.engine)
    if fitting is not None:
        for known in _measure(fitting, bench, beside):
            yield known
    if known.settled is not None or known.baselines is None:
        return
    case, baselines, engine = known.case, known.baselines, known.engine
    unseen = None if case.settings.fitted else look_beyond(case, bench, baselines)
    known = known.with_(unseen=unseen)
    if unseen is not None and unseen.holds is not None and engine is None:
        settled = nothing_to_pin(baselines.lowered, case.settings.precision)
        yield known.with_(settled=settled, holds=unseen.holds)
        return
    if unseen is not None and case.settings.precision is Precision.TF32 and engine is None:
        yield known.with_(settled=tf32_to_blame(unseen.lowered))
        return
    triage = find_cause(case, bench, baselines, engine, unseen)
    if not isinstance(triage, Triage):
        yield known.with_(settled=triage)
        return
    known = known.with_(triage=triage, baselines=replace(baselines, layers=triage.layers))
    yield known
    bench.observer.station("bisect")
    bench.tell_probes()
    with bench.counting(plans_of(bench, expected_sets(case))):
        bisection = bisect(case, bench, baselines, triage, triage.limit)
    known = known.with_(bisection=bisection)
    if bisection is not None:
        bench.observer.best(len(bisection.pinned))
    yield known
    if bench.engine is not None and engine is not None:
        known = _with_engine_table(known, bench)
        yield known
        judgement = decide_on_engine(
            case, bench, bench.engine, baselines, engine, triage, bisection
        )
        bench.observer.best(len(judgement.plan.pinned))
        yield known.with_(judgement=judgement)
