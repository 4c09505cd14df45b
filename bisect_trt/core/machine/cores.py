"""How many cores this process may use: fewer than the machine has where it was bound to some, or
where a container's quota gives it a share, or where the user asked for less.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")

_ASKED: list[int] = []
"""What :func:`at_most` was asked for, the innermost last: thread pools belong to the process."""


def thread_count() -> int:
    """How many threads this process may keep busy: the usable cores, or fewer inside
    :func:`at_most`.
    """
    return min([usable_cores(), *_ASKED])


@contextmanager
def at_most(threads: int | None) -> Iterator[None]:
    """Inside, :func:`thread_count` is at most ``threads``; None changes nothing."""
    if threads is None:
        yield
        return
    _ASKED.append(threads)
    try:
        yield
    finally:
        _ASKED.remove(threads)


@cache
def usable_cores() -> int:
    """The least of the machine's cores, those that the process is bound to, and the quota of the
    cgroups that it is in, rounded up; 1 at least. Found out once.
    """
    counts: list[float] = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    quota = quota_of(own_cgroups("cpu"))
    return max(1, math.ceil(min([*counts, quota])))


def quota_of(folders: list[Path]) -> float:
    """The smallest quota that cgroups grant, in cores; infinite where none is set.

    Version 2 writes ``cpu.max`` ("max 100000" or "150000 100000", microseconds of each period),
    version 1 ``cpu.cfs_quota_us`` (-1 for none) and ``cpu.cfs_period_us`` (Linux,
    Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst).
    """
    found = [math.inf]
    for folder in folders:
        words = _read(folder / "cpu.max").split()
        if len(words) != 2:
            words = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        try:
            quota, period = float(words[0]), float(words[1])
        except ValueError:  # "max", or no such file
            continue
        if quota > 0 and period > 0:
            found.append(quota / period)
    return min(found)


def own_cgroups(controller: str, own: Path = _OWN, root: Path = _CGROUPS) -> list[Path]:
    """The folders of this process' cgroups and of those around them: a batch system's job, or a
    service, may be deep inside.

    Args:
        controller: whose, "cpu" or "memory".
        own: says which they are.
        root: of all of them.
    """
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
