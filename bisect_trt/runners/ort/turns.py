"""Whose sessions may be open: of a model of many bytes one holds a copy of the weights at a time,
and of one of many nodes those that hold every plan are open in turn with those of one plan.
"""

from __future__ import annotations

from threading import Lock
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from bisect_trt.core.machine.memory import LARGE, MANY
from bisect_trt.graph.files.save import weights_size
from bisect_trt.graph.model.graph import Graph

MANY_NODES = 5000
"""A session takes 4 kB a node, one that holds every plan 20: from so many on both are not open at a
time, which costs seconds of a run's minutes and spares a third of its memory."""


@runtime_checkable
class Holder(Protocol):
    """Who opens sessions, which hold a copy of the weights in the order that kernels like."""

    def release(self) -> None:
        """Let its own go; they are opened again when they are needed."""


class Turns:
    """Lets the sessions of one model be open together, or where its weights are many in turn.

    ``one_at_a_time`` says which; ``is_large`` that even one copy, kept while others work, would be
    too much. ``many_nodes`` says that those of all plans and of one are open in turn.

    Args:
        graph: the model.
    """

    def __init__(self, graph: Graph) -> None:
        self._constants = graph.constants
        size = weights_size(graph.proto)
        self.one_at_a_time, self.is_large = size >= MANY, size >= LARGE
        self.many_nodes = len(graph.proto.graph.node) >= MANY_NODES
        self._holder: Holder | None = None
        self._of_every_plan, self._of_one_plan = WeakSet[Holder](), WeakSet[Holder]()
        self._lock = Lock()

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

    def introduce(self, holder: Holder, *, every_plan: bool) -> None:
        """Hear that each session of ``holder`` holds every plan, or one."""
        with self._lock:
            (self._of_every_plan if every_plan else self._of_one_plan).add(holder)

    def make_room(self, *, every_plan: bool) -> None:
        """Called before sessions that hold every plan, or one, are opened: of many nodes the others
        are let go.
        """
        if not self.many_nodes:
            return
        with self._lock:  # releasing may wait for whoever runs
            holders = list(self._of_one_plan if every_plan else self._of_every_plan)
        for holder in holders:
            holder.release()
