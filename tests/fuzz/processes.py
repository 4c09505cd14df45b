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


@dataclass(frozen=True)
class Options:
    """What every process of a campaign is told; ``ends`` is a time of the monotonic clock."""

    processes: int
    ends: float
    out: Path
    shrinks: bool

    @property
    def tally(self) -> Path:
        """The file of the tally, beside the failures."""
        return self.out.with_suffix(".tally.json")


@dataclass
class _Running:
    """A process, the ``first`` seed that it was given, and the one that it is at."""

    process: BaseProcess
    first: int
    number: int


Work = Callable[[int, Options, Connection], None]


def work(first: int, options: Options, parent: Connection) -> None:
    """What a process does: networks from ``first``, the tally of each to the ``parent``."""
    quiet()
    campaign(
        first, options.processes, options.ends, options.out, parent.send, shrinks=options.shrinks
    )


def run(first: int, options: Options, target: Work = work) -> Tally:
    """The tally of all processes.

    A process that dies is a failure of its network, and another one goes on behind it.
    """
    context, total, step = get_context("spawn"), Tally(), options.processes
    running: dict[Connection, _Running] = {}

    def start(number: int) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=target, args=(number, options, theirs))
        process.start()
        theirs.close()
        running[ours] = _Running(process, number, number)

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
                one.number += step
            except EOFError:
                del running[ours]
                one.process.join()
                if one.process.exitcode:
                    lost(one.number, f"a process ended with {one.process.exitcode}")
                    # One that did nothing at all would do so again.
                    if one.number != one.first and time.monotonic() < options.ends:
                        start(one.number + step)
        if time.monotonic() > written + WRITE_EVERY_S:
            _write(total, options.tally)
            written = time.monotonic()
    for one in running.values():
        one.process.kill()
        lost(one.number, f"no end {GRACE_S:.0f} s after the others")
    _write(total, options.tally)
    return total


def _write(tally: Tally, path: Path) -> None:
    """Writes the whole tally or nothing: the campaign may be killed meanwhile."""
    part = path.with_suffix(".part")
    part.write_text(tally.as_json(), encoding="utf-8")
    part.replace(path)
