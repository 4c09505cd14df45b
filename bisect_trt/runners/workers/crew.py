"""Several remotes as one: each call goes to whoever is free, so that threads keep all of them
busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.verdict import Verdict
from bisect_trt.runners.workers.remote import Remote


class Crew:
    """A :class:`~bisect_trt.runners.workers.remote.Remote` over ``members``.

    A call whose member dies is made again, up to ``attempts`` times in all: where work itself kills
    nobody (the emulator's), a loss says nothing of it. With one attempt a crash is the answer, as
    an engine's is.
    """

    def __init__(self, members: Sequence[Remote], attempts: int = 1) -> None:
        self._members = list(members)
        self._attempts = attempts
        self._free: SimpleQueue[Remote] = SimpleQueue()
        for member in members:
            self._free.put(member)

    def __len__(self) -> int:
        return len(self._members)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The answer of a free member; waits while there is none."""
        for attempt in range(1, self._attempts + 1):
            member = self._free.get()
            try:
                return member.call(method, *arguments, timeout_s=timeout_s)
            except RunnerFailedError as error:
                if error.verdict is not Verdict.CRASHED or attempt == self._attempts:
                    raise
            finally:
                self._free.put(member)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def close(self) -> None:
        """End all members."""
        for member in self._members:
            member.close()
