"""Whether the command was asked to stop: threads that wait for workers look, since an interrupt
reaches the main thread alone; and what ends a search whose budget is spent.
"""

from __future__ import annotations

from threading import Event

STOPPING = Event()


class StoppedError(KeyboardInterrupt):
    """The user ended the work, and its message says what there is for it."""


class BudgetSpentError(Exception):
    """Nothing further may be tried: so many probes, builds or minutes were spent."""
