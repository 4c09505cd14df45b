"""Matches names against expressions that may take for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bisect_trt.imports import match_names

EACH_S = 1.0
"""Seconds of the processor that one expression has for all names."""
ALL_S = 5.0
"""Seconds of the processor that all expressions of a list have together."""
_WALL_S = 60.0
"""Time after which the process is given up, on a busy machine too."""


def matched(
    texts: Sequence[str], names: Sequence[str], each_s: float = EACH_S, all_s: float = ALL_S
) -> Mapping[str, tuple[str, ...] | str]:
    """The ``names`` that each regular expression matches from their start, or why it is refused.

    ``each_s`` and ``all_s`` are seconds of the processor for one expression and for all.
    """
    if not texts:
        return {}
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", match_names.__file__],
            input=json.dumps([texts, names, each_s, all_s]),
            capture_output=True,
            text=True,
            timeout=_WALL_S,
            check=True,
        )
        answers = json.loads(child.stdout)
    except subprocess.SubprocessError:
        answers = ["the expressions of this list do not end; give names"] * len(texts)
    return {
        text: found if isinstance(found, str) else tuple(names[place] for place in found)
        for text, found in zip(texts, answers, strict=True)
    }
