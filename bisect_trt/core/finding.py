"""What a reviewer should know beside the answer."""

from __future__ import annotations

from dataclasses import dataclass

VANISHING = "weight-underflow"
"""The kind of a constant that is partly below the smallest number; many models have dozens."""


WRITTEN_OUT = "written-out"
"""The kind of a layer that an engine computes in several steps."""


@dataclass(frozen=True)
class Finding:
    """``kind`` for machines, the layer or tensor that it is about (``where``), one sentence;
    ``weighty`` where the answer misleads without it, so that the headline has to say it.
    """

    kind: str
    where: str
    message: str
    weighty: bool = False
