"""Several remotes as one: each call goes to whoever is free, so that threads keep all of them
busy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from queue import LifoQueue
from typing import Any

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.verdict import Verdict
from bisect_trt.runners.workers.remote import Remote

_ENDS = (Verdict.CRASHED, Verdict.TIMED_OUT)


class Crew:
    """A :class:`~bisect_trt.runners.workers.remote.Remote` over ``members``.

    Args:
        members: who answers.
        attempts: how often a call is made in all whose member was lost: once is chance.
        ends: the losses after which it is made again. An engine that hangs once would cost another
            time-out; an emulator's worker hangs by nothing that it was asked.
    """

    def __init__(
        self, members: Sequence[Remote], attempts: int = 2, ends: Collection[Verdict] = _ENDS
    ) -> None:
        self._members = list(members)
        self._attempts = attempts
        self._ends = frozenset(ends)
        self._closed = False
        # Who was free last: it has started, and its model is loaded. What calls come one after the
        # other are so of one process, and their times those of inferences.
        self._free: LifoQueue[Remote] = LifoQueue()
        for member in reversed(self._members):
            self._free.put(member)

    def __len__(self) -> int:
        return len(self._members)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The answer of a free member; waits while there is none.

        Args:
            method: its name.
            arguments: anything that pickles.
            timeout_s: seconds that each attempt may take; None for ever.

        Raises:
            RunnerFailedError: the member's, or the crew was closed: a thread that is still at work
                must not start a process that nobody ends.
        """
        for attempt in range(1, self._attempts + 1):
            member = self._free.get()
            try:
                if self._closed:
                    raise RunnerFailedError("the runner was closed", Verdict.CRASHED)
                return member.call(method, *arguments, timeout_s=timeout_s)
            except RunnerFailedError as error:
                again = error.lost and (error.machine or error.verdict in self._ends)
                if not again or attempt == self._attempts:
                    raise
            finally:
                self._free.put(member)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def close(self) -> None:
        """End all members, for good."""
        self._closed = True
        for member in self._members:
            member.close()
