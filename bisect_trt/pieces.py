"""The jobs on an engine that is wrong whatever is pinned: its smallest bad piece, and its cure."""

from __future__ import annotations

from pathlib import Path

from bisect_trt.core.machine.stop import StoppedError
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import Precision
from bisect_trt.report.pieces import cured, reproducer
from bisect_trt.report.pieces.cured import write_cures
from bisect_trt.report.pieces.reproducer import write_reproducer
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.asked.thread_limit import within_threads
from bisect_trt.stations.pieces.cure_model import cure_model
from bisect_trt.stations.pieces.cures import Cures
from bisect_trt.stations.pieces.reduce import Reduced
from bisect_trt.stations.pieces.reduce_model import files_read, reduce_model, result_folder
from bisect_trt.stations.pieces.seen import Seen

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
    cured.FOLDER.check(folder, files_read(settings))
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
    reproducer.FOLDER.check(folder, files_read(settings))
    found = reduce_model(settings, precision, check, observer or Observer())
    if isinstance(found, Reduced):
        write_reproducer(found, folder, made_by)
        if found.interrupted:
            raise StoppedError(f"the smallest piece so far is in {folder}")
    return found
