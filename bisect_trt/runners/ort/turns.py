"""Who may hold a copy of the weights: of a model of many bytes one session at a time."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from bisect_trt.core.machine.memory import LARGE, MANY
from bisect_trt.graph.files.save import weights_size
from bisect_trt.graph.model.graph import Graph


@runtime_checkable
class Holder(Protocol):
    """Who opens sessions that hold a copy of the weights, in the order that kernels like."""

    def release(self) -> None:
        """Let them go; they are opened again when they are needed."""


class Turns:
    """Lets the sessions of one model be open together, or where its weights are many in turn.

    ``one_at_a_time`` says which; ``is_large`` that even one copy, kept while others work, would be
    too much.

    Args:
        graph: the model.
    """

    def __init__(self, graph: Graph) -> None:
        self._constants = graph.constants
        size = weights_size(graph.proto)
        self.one_at_a_time, self.is_large = size >= MANY, size >= LARGE
        self._holder: Holder | None = None

    def take(self, holder: Holder) -> None:
        """Called before ``holder`` opens a session: the one before it lets its own go, and the
        pages of mapped weights go back to the system, which reads them again when needed.
        """
        if not self.one_at_a_time:
            return
        if self._holder is not None and self._holder is not holder:
            self._holder.release()
        self._holder = holder
        self._constants.let_go()
