"""How much memory there is."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_CGROUP = (
    (_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat", ""),
    (
        _V1 / "memory.limit_in_bytes",
        _V1 / "memory.usage_in_bytes",
        _V1 / "memory.stat",
        "total_",
    ),
)
"""Limit, use, and what of the use are pages of files, which the system gives back when asked."""


LARGE = 256 << 20
"""Bytes of weights, or of activations, from which on a copy more of them counts."""

_M_MMAP_THRESHOLD, _APART = -3, 2 << 20
"""The C library's name of the setting (malloc.h), and bytes."""


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
    for most, used, stat, prefix in _CGROUP:
        try:
            limit, taken = (int(p.read_text(encoding="ascii")) for p in (most, used))
            lines = stat.read_text(encoding="ascii").splitlines()
            held = dict(line.split(maxsplit=1) for line in lines)
            cached = sum(int(held[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
        except (OSError, ValueError, KeyError):  # no container, or one without a limit ("max")
            continue
        found.append(max(0, limit - max(0, taken - cached)))
    return min(found, default=None)


def peak_bytes() -> int:
    """The most memory that this process has held; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # no POSIX
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_large_blocks_apart() -> None:
    """Let every freed block of some megabytes go back to the system at once.

    By itself the C library soon keeps blocks of up to 32 MB, among which those of another size find
    no place: a run over 0.3 GB of weights then held 1.26 GB at most, and 0.77 GB with this.
    """
    with contextlib.suppress(OSError, AttributeError):  # another library than GNU's
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _APART)


def in_words(count: int) -> str:
    """A number of bytes for a person."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
