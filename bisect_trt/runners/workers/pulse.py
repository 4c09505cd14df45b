"""Whether a silent process still works: one that was stopped, or waits for a lock that nobody
frees, uses no processor.
"""

from __future__ import annotations

import time
from pathlib import Path

_USER_TIME, _SYSTEM_TIME = 11, 12
"""Places in /proc/PID/stat behind the command's name (proc(5): fields 14 and 15)."""


class Pulse:
    """The processor time of process ``pid``, watched from now on.

    Args:
        pid: of the process.
        stall_s: seconds without any after which it counts as hung; None never.
    """

    def __init__(self, pid: int, stall_s: float | None) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._stall_s = stall_s
        self._used = -1
        self._since = time.monotonic()

    def check(self) -> None:
        """Look whether the process has used the processor since the last time.

        Raises:
            TimeoutError: not for too long.
        """
        if self._stall_s is None:
            return
        used, now = self._ticks(), time.monotonic()
        if used is None or used != self._used:
            self._used, self._since = used or 0, now
        elif now - self._since > self._stall_s:
            raise TimeoutError(f"it used no processor for {self._stall_s:g} s")

    def _ticks(self) -> int | None:
        try:
            fields = (
                self._stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            )
            return int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])
        except (OSError, ValueError, IndexError):
            return None  # no Linux, or it has just died: the pipe tells
