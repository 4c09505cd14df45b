"""How much memory there is."""

from __future__ import annotations

import sys
from pathlib import Path

_CGROUP = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def free_bytes() -> int | None:
    """The bytes that this process may still take, by the system's word and the container's; None
    where neither says.
    """
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for most, used in _CGROUP:
        try:
            limit, taken = (int(Path(p).read_text(encoding="ascii")) for p in (most, used))
        except (OSError, ValueError):  # no container, or one without a limit ("max")
            continue
        found.append(max(0, limit - taken))
    return min(found, default=None)


def peak_bytes() -> int:
    """The most memory that this process has held; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # no POSIX
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def in_words(count: int) -> str:
    """A number of bytes for a person."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
