"""Everything that a run needs, opened: runners, journal, workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

from bisect_trt.core.finding import Finding
from bisect_trt.core.machine.stop import StoppedError
from bisect_trt.core.machine.time_budget import TimeBudget, TimedObserver
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.probe.journal import JOURNAL
from bisect_trt.runners.ort.devices import CPU
from bisect_trt.stations.bench.bench import Bench, references_of
from bisect_trt.stations.bench.emulator_choice import emulator_device, open_emulator
from bisect_trt.stations.bench.emulator_workers import fewer_hired, open_fleet
from bisect_trt.stations.bench.engine_ahead import begin as begin_engine
from bisect_trt.stations.bench.engine_choice import idle_options, open_engine
from bisect_trt.stations.bench.parts import check_parts
from bisect_trt.stations.bench.run_folder import claimed_folder, folder_of
from bisect_trt.stations.bench.scales import with_scales
from bisect_trt.stations.case.case import Case

_ONLY_EMULATED = (
    "no input can be moved a little, only what the token ids look up, and an engine holds its "
    "tables as constants: roundings are redrawn on the emulators, and variants test the engine"
)


@contextmanager
def open_bench(
    case: Case,
    observer: Observer,
    suffix: str = "",
    time_budget: TimeBudget | None = None,
    begin: Sequence[PrecisionPlan] = (),
) -> Iterator[Bench]:
    """Open what the run needs.

    Args:
        case: the model, the inputs and the settings.
        observer: hears of the progress.
        suffix: ends the default folder's name.
        time_budget: of the whole run; None where it may take as long as it needs.
        begin: whose engines a run that knows nothing yet will ask for.

    Raises:
        BadInputError: the folder cannot be used (see ``claimed_folder``).
        MachineError: the disk is full.
        RunnerUnavailableError: the runner or cluster asked for is not there.
        StoppedError: the user ended the block; what was answered is in the journal.
    """
    try:
        with _opened(case, observer, suffix, time_budget, begin) as bench:
            yield bench
    except StoppedError:
        raise
    except KeyboardInterrupt as error:
        raise StoppedError("run the same command again to go on from here") from error


@contextmanager
def _opened(
    case: Case,
    observer: Observer,
    suffix: str,
    time_budget: TimeBudget | None,
    begin: Sequence[PrecisionPlan],
) -> Iterator[Bench]:
    """As :func:`open_bench`."""
    with ExitStack() as opened:
        folder = folder_of(case, suffix)
        # Each waits a second or two for a child process.
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(emulator_device, case.settings)
            engine = open_engine(case, folder / "caches")
            if engine is not None:
                opened.enter_context(closing(engine))
        device, findings = asked.result()
        journal = opened.enter_context(claimed_folder(case, folder))
        timed = device != CPU and case.settings.emulate_on == "auto"
        for plan in begin if journal.is_new and not timed else ():
            begin_engine(engine, plan)
        emulator, noted = open_emulator(case, device, journal)
        fleet = open_fleet(case, emulator, device)
        if fleet is not None:
            opened.enter_context(closing(fleet))
        clock = time_budget or TimeBudget(None)
        heard = TimedObserver(observer, clock)
        references = references_of(case, folder)
        opened.enter_context(closing(references))
        check_parts(case, references)
        case, of_scales = with_scales(case, references, journal)
        bench = Bench(case, heard, folder, journal, engine, emulator, fleet, clock, references)
        for finding in (*findings, *noted, *of_scales):
            bench.note(finding)
        if engine is None and (words := idle_options(case.settings)):
            bench.note(Finding("no-engine", "", words))
        if journal.note:
            bench.note(Finding("journal", JOURNAL, journal.note))
        if engine is not None and case.moves_lookups:
            bench.note(Finding("redrawn", "", _ONLY_EMULATED))
        if fleet is not None and len(fleet) < case.settings.workers:
            bench.note(Finding("workers", "", fewer_hired(case.settings.workers, len(fleet))))
        yield bench
