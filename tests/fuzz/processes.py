"""A campaign in several processes, of which one may die."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.fuzz.campaign import Tally, campaign, chosen, line_of, quiet, write_lines
from tests.fuzz.relations import Failure

WRITE_EVERY_S = 30.0
"""How often the tally is written."""

GRACE_S = 120.0
"""What a network that is being judged at the end may still take."""

LONGEST_S = 300.0
"""A network that takes longer hangs: a search takes some seconds, and making it smaller 60."""

RESTARTS = 5
"""So many processes in a row that do nothing are replaced: a sixth would not either."""


@dataclass(frozen=True)
class Options:
    """What every process of a campaign is told; ``ends`` is a time of the monotonic clock."""

    processes: int
    ends: float
    out: Path
    shrinks: bool
    longest_s: float = LONGEST_S

    def tally(self, first: int) -> Path:
        """The file of the tally from seed ``first``, beside the failures."""
        return self.out.with_suffix(f".{first}.tally.json")


@dataclass
class _Running:
    """A process, the seed that it is at and since when, and how many before it did nothing.

    ``idle`` counts the process itself until it has done its first network.
    """

    process: BaseProcess
    number: int
    idle: int
    since: float


Work = Callable[[int, Options, Connection], None]


def work(first: int, options: Options, parent: Connection) -> None:
    """What a process does: networks from ``first``, the tally of each to the ``parent``."""
    quiet()
    campaign(
        first, options.processes, options.ends, options.out, parent.send, shrinks=options.shrinks
    )


def run(first: int, options: Options, target: Work = work) -> Tally:
    """The tally of all processes.

    A process that dies or hangs is a failure of its network, and another one goes on behind it.
    """
    context, total, step = get_context("spawn"), Tally(), options.processes
    running: dict[Connection, _Running] = {}

    def start(number: int, idle: int = 0) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=target, args=(number, options, theirs))
        process.start()
        theirs.close()
        running[ours] = _Running(process, number, idle + 1, time.monotonic())

    def lost(number: int, what: str) -> None:
        recipe, _ = chosen(number, step)
        write_lines(options.out, [line_of(recipe, Failure(what, ""))])
        total.failures[what] += 1

    for number in range(first, first + step):
        start(number)
    written = time.monotonic()
    while running and time.monotonic() < options.ends + GRACE_S:
        for ours in wait(list(running), timeout=1.0):
            assert isinstance(ours, Connection)
            one = running[ours]
            try:
                total.add(ours.recv())
                one.number, one.idle, one.since = one.number + step, 0, time.monotonic()
            except EOFError:
                del running[ours]
                one.process.join()
                if one.process.exitcode:
                    is_late = time.monotonic() > one.since + options.longest_s
                    died = f"a process ended with {one.process.exitcode}"
                    lost(one.number, f"no end in {options.longest_s:.0f} s" if is_late else died)
                    if one.idle <= RESTARTS and time.monotonic() < options.ends:
                        start(one.number + step, one.idle)
        for one in running.values():
            if time.monotonic() > one.since + options.longest_s:
                one.process.kill()  # which closes its pipe
        if time.monotonic() > written + WRITE_EVERY_S:
            _write(total, options.tally(first))
            written = time.monotonic()
    for one in running.values():
        one.process.kill()
        lost(one.number, f"no end {GRACE_S:.0f} s after the others")
    _write(total, options.tally(first))
    return total


def _write(tally: Tally, path: Path) -> None:
    """Writes the whole tally or nothing: the campaign may be killed meanwhile."""
    part = path.with_suffix(".part")
    part.write_text(tally.as_json(), encoding="utf-8")
    part.replace(path)
