"""Whether the command was asked to stop: threads that wait for workers look, since an interrupt
reaches the main thread alone; and what ends a search whose budget is spent.
"""

from __future__ import annotations

import traceback
from threading import Event

STOPPING = Event()


def is_stop(error: BaseException) -> bool:
    """Whether the user ended the work: Ctrl-C in the middle of a library's call may come out of it
    as another error, of a lock that it held say.
    """
    if STOPPING.is_set() or isinstance(error, KeyboardInterrupt):
        return True
    # Not what the caller was handling already: a run may be started where Ctrl-C is answered.
    ours = _frames(error)
    seen, known = error.__cause__ or _context(error), set[int]()
    while seen is not None and id(seen) not in known:
        known.add(id(seen))
        if isinstance(seen, KeyboardInterrupt) and _frames(seen) & ours:
            return True
        seen = seen.__cause__ or _context(seen)
    return False


def _frames(error: BaseException) -> set[int]:
    """Those that ``error`` passed through until now."""
    return {id(frame) for frame, _ in traceback.walk_tb(error.__traceback__)}


def _context(error: BaseException) -> BaseException | None:
    return None if error.__suppress_context__ else error.__context__


class StoppedError(KeyboardInterrupt):
    """The user ended the work, and its message says what there is for it."""


class BudgetSpentError(Exception):
    """Nothing further may be tried: so many probes, builds or minutes were spent."""
