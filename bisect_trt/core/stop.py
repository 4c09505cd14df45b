"""Whether the command was asked to stop: threads that wait for workers look, since an interrupt
reaches the main thread alone; and what ends a search whose budget is spent.
"""

from __future__ import annotations

from threading import Event

STOPPING = Event()


def is_stop(error: BaseException) -> bool:
    """Whether the user ended the work: Ctrl-C in the middle of a library's call may come out of it
    as another error, of a lock that it held say.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return seen is not None or (STOPPING.is_set() and isinstance(error, Exception))


class StoppedError(KeyboardInterrupt):
    """The user ended the work, and its message says what there is for it."""


class BudgetSpentError(Exception):
    """Nothing further may be tried: so many probes, builds or minutes were spent."""
