"""What the machine has, cores and memory, and what a run may take."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """What the steps of a run may take: part of the settings, but no option of a command."""

    max_misses: int = 3
    """How many copies of a kind may fail in a quick model's validation."""

    misses_time_s: float = 20.0
    """The longest that the copies may take where misses are allowed."""

    validation_time_s: float = 150.0
    """The longest that the copies of a slow model may take."""

    refused_time_s: float = 25.0
    """Time to measure how often a plan fails that cannot be validated any more."""

    sensitivity_time_s: float = 20.0
    """How long it may usually take to reduce each layer alone, else only the most suspicious."""

    ranking_time_s: float = 180.0
    """How long reverse passes may usually take where there is no time for each layer alone."""

    tradeoff_time_s: float = 12.0
    """What the trade-off curve may take: a slow model's rows are fewer, on fewer copies."""

    # A run has its answer by then, and an engine of thousands of layers takes minutes to build.
    reduction_time_s: float = 30.0
    """How long a run reduces what an engine gets wrong; a build that has begun is finished."""

    large_bytes: int = 256 << 20
    """Bytes of weights from which on another copy matters: sessions are closed after use."""


_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def thread_count(threads: int | None = None) -> int:
    """How many threads may be busy: the usable cores, or fewer where ``threads`` are wanted."""
    return min(usable_cores(), threads or usable_cores())


@cache
def usable_cores() -> int:
    """The smallest of the machine's cores, the process's affinity and its quota; at least 1."""
    counts: list[float] = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    quota = quota_of(own_cgroups("cpu"))
    return max(1, math.ceil(min([*counts, quota])))


def quota_of(folders: list[Path]) -> float:
    """The smallest quota that the cgroups in ``folders`` grant, in cores; infinite for none."""
    # Linux, Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst: version 2 writes
    # cpu.max ("max 100000" or "150000 100000", microseconds of each period), version 1
    # cpu.cfs_quota_us (-1 for none) and cpu.cfs_period_us.
    quotas = [math.inf]
    for folder in folders:
        words = _read(folder / "cpu.max").split()
        if len(words) != 2:
            words = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        try:
            quota, period = float(words[0]), float(words[1])
        except ValueError:  # "max", or no such file
            continue
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas)


def own_cgroups(controller: str, own: Path = _OWN, root: Path = _CGROUPS) -> list[Path]:
    """The folders of this process's cgroups and of their parents."""
    folders = [root, root / controller, root / "cpu,cpuacct"]
    for line in _read(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        inner = base / path.lstrip("/")
        folders += [inner, *(p for p in inner.parents if base in p.parents)]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


_MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Files of cgroup versions 2 and 1: the limit, the usage, and memory.stat's prefix of names."""


def free_bytes() -> int | None:
    """The bytes that the system and the container leave; None if neither says."""
    free = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for group, (most, used, prefix) in product(own_cgroups("memory"), _MEMORY_FILES):
        try:
            limit, taken = (int((group / p).read_text(encoding="ascii")) for p in (most, used))
            lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            statistics = dict(line.split(maxsplit=1) for line in lines)
            # Pages of files are given back when memory runs short.
            cached = sum(int(statistics[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
        except (OSError, ValueError, KeyError):  # no container, or one without a limit ("max")
            continue
        free.append(max(0, limit - max(0, taken - cached)))
    return min(free, default=None)


def room_bytes(counted: int) -> int | None:
    """The free bytes plus what this process uses now, the latter up to ``counted``."""
    free = free_bytes()
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return free
    return None if free is None else free + min(pages * mmap.PAGESIZE, counted)


def peak_bytes() -> int:
    """The peak memory of this process; 0 where the system does not say."""
    # getrusage's peak includes that of the process which started this one.
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    try:
        import resource
    except ImportError:  # no POSIX
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def share_arenas() -> None:
    """Lets the C library keep one place for small blocks for every two threads.

    Called once, before any thread has its own.
    """
    # By itself glibc opens eight a core, and what is free in one is of no use to other threads: a
    # run of PP-OCRv4 det then holds 2.8 times as much.
    m_arena_max = -8
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(m_arena_max, max(2, usable_cores() // 2))


def give_back() -> None:
    """Return freed memory to the system."""
    with contextlib.suppress(OSError, AttributeError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)


def in_words(count: int) -> str:
    """A number of bytes for a person."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
