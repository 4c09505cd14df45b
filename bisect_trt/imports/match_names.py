"""Matches names in a process of its own, which runs this file; it imports nothing else of ours."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Sequence


class _LateError(Exception):
    """An expression did not end in its time."""


def _late(*_: object) -> None:
    raise _LateError


def answers(
    texts: Sequence[str], names: Sequence[str], each_s: float, all_s: float
) -> list[list[int] | str]:
    """For each expression the places of the ``names`` that it matches from their start, or why not.

    Only in a process's main thread. ``each_s`` and ``all_s`` are seconds of the processor for one
    expression and for all.
    """
    signal.signal(signal.SIGVTALRM, _late)
    found: list[list[int] | str] = []
    for text in texts:
        if time.process_time() > all_s:
            found.append(f"not tried: those before it took {all_s:g} s; give names")
            continue
        try:
            # Python looks at signals also while it matches. The second time is for a handler
            # whose error was lost.
            signal.setitimer(signal.ITIMER_VIRTUAL, each_s, each_s)
            matches = re.compile(text).match
            found.append([place for place, name in enumerate(names) if matches(name)])
        except _LateError:
            found.append(f"does not end in {each_s:g} s on the model's names; give names")
        except (re.error, RecursionError, OverflowError, MemoryError) as error:
            found.append(f"no regular expression ({error})")
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    return found


if __name__ == "__main__":
    json.dump(answers(*json.load(sys.stdin)), sys.stdout)
