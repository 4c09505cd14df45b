"""How much memory there is."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from itertools import product
from pathlib import Path

from bisect_trt.core.machine.cores import own_cgroups, thread_count

_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of version 2 and 1: limit, use, and what stands before the names of memory.stat, which tells what
of the use are pages of files: the system gives those back when asked."""

LARGE = 256 << 20
"""Bytes of weights, or of activations, from which on a copy more of them counts."""

MANY = 32 << 20
"""Bytes of weights from which on one session at a time holds a copy of them, and what is freed goes
back to the system at once."""

_M_MMAP_THRESHOLD, _APART = -3, 2 << 20
_M_ARENA_MAX, _FEWEST = -8, 2
"""The C library's names of the settings (malloc.h), bytes, and a count."""


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
    for group, (most, used, prefix) in product(own_cgroups("memory"), _FILES):
        try:
            limit, taken = (int((group / p).read_text(encoding="ascii")) for p in (most, used))
            lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            held = dict(line.split(maxsplit=1) for line in lines)
            cached = sum(int(held[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
        except (OSError, ValueError, KeyError):  # no container, or one without a limit ("max")
            continue
        found.append(max(0, limit - max(0, taken - cached)))
    found += _limits_left()
    return min(found, default=None)


def room_bytes(counted: int) -> int | None:
    """What this process may hold in all: what is free, and what it holds now; None where the
    system does not say.

    Args:
        counted: of what it holds no more bytes: a caller's own arrays are in nobody's way, and of
            no use.
    """
    free = free_bytes()
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return free
    return None if free is None else free + min(pages * mmap.PAGESIZE, counted)


def _limits_left() -> list[int]:
    """The bytes that each limit of this process (``ulimit -v``, ``-d``) leaves; nothing where it
    has none.
    """
    try:
        import resource

        pages = [int(n) for n in Path("/proc/self/statm").read_text(encoding="ascii").split()]
        left = []
        for kind, taken in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            limit = resource.getrlimit(kind)[0]
            if limit != resource.RLIM_INFINITY:
                left.append(max(0, limit - taken * resource.getpagesize()))
    except (ImportError, OSError, ValueError, IndexError):
        return []
    return left


def peak_bytes() -> int:
    """The most memory that this process has held; 0 where the system does not tell."""
    # What getrusage says begins with the peak of whoever started the process: of a test's, or of a
    # notebook's.
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
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


def share_arenas() -> None:
    """Let two of this process's threads take small blocks from one place.

    By itself the C library opens up to eight a core, and what is free in one is of no use to the
    threads of another: the recogniser of the demo took 20 MB more so, and no less time. Fewer than
    half as many as there are threads would wait for each other.
    """
    with contextlib.suppress(OSError, AttributeError):  # another library than GNU's
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, max(_FEWEST, thread_count() // 2))


def give_back() -> None:
    """Let what was freed go back to the system, of blocks of any size: some milliseconds."""
    with contextlib.suppress(OSError, AttributeError):  # another library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def in_words(count: int) -> str:
    """A number of bytes for a person."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
