"""Whose sessions may be open: of a model of many bytes one holds a copy of the weights at a time,
and of one of many nodes those that are large are open in turn.
"""

from __future__ import annotations

from enum import Enum, auto
from threading import Lock
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from bisect_trt.core.machine.memory import LARGE, MANY, give_back
from bisect_trt.graph.files.save import weights_size
from bisect_trt.graph.model.graph import Graph

MANY_NODES = 5000
"""A session takes 4 to 12 kB a node, those that hold every plan 20: from so many on they are not
open at a time, which costs seconds of a run's minutes and spares a third of its memory."""


class Sessions(Enum):
    """What sessions are of: the reference, every plan (``SHARED`` by many segments, or not), the
    plan that the emulator has in work, or the one that the second emulator was asked about.
    """

    REFERENCE = auto()
    EVERY_PLAN = auto()
    SHARED = auto()
    ONE_PLAN = auto()
    SECOND = auto()


_APART = {
    Sessions.REFERENCE: (Sessions.SECOND, Sessions.SHARED),
    Sessions.EVERY_PLAN: (Sessions.ONE_PLAN, Sessions.SECOND),
    Sessions.ONE_PLAN: (Sessions.EVERY_PLAN,),
    Sessions.SECOND: (Sessions.EVERY_PLAN, Sessions.SHARED, Sessions.REFERENCE),
}
"""Of many nodes, what is let go before sessions are opened: what is not asked beside them, and what
is opened in no time. For those nothing is let go."""


@runtime_checkable
class Holder(Protocol):
    """Who opens sessions, which hold a copy of the weights in the order that kernels like; or holds
    what they are fed with.
    """

    def release(self) -> None:
        """Let its own go; they are opened again when they are needed."""


class Turns:
    """Lets the sessions of one model be open together, or where its weights are many in turn.

    ``one_at_a_time`` says which; ``is_large`` that even one copy, kept while others work, would be
    too much. ``many_nodes`` says that some are open in turn (:meth:`make_room`).

    Args:
        graph: the model.
    """

    def __init__(self, graph: Graph) -> None:
        self._constants = graph.constants
        size = weights_size(graph.proto)
        self.one_at_a_time, self.is_large = size >= MANY, size >= LARGE
        self.many_nodes = len(graph.proto.graph.node) >= MANY_NODES
        self._holder: Holder | None = None
        self._holders = {sessions: WeakSet[Holder]() for sessions in Sessions}
        self._lock = Lock()

    @property
    def apart(self) -> bool:
        """Whether the reference's session and the second emulator's are open in turn."""
        return self.one_at_a_time or self.many_nodes

    def take(self, holder: Holder) -> None:
        """Called before ``holder`` opens a session: the one before it lets its own go, and the
        pages of mapped weights go back to the system, which reads them again when needed.
        """
        if not self.one_at_a_time:
            return
        with self._lock:
            before, self._holder = self._holder, holder
        if before is not None and before is not holder:
            before.release()
        self._constants.let_go()

    def introduce(self, holder: Holder, sessions: Sessions) -> None:
        """Hear what the sessions of ``holder`` are of."""
        with self._lock:
            self._holders[sessions].add(holder)

    def make_room(self, sessions: Sessions) -> None:
        """Called before ``sessions`` are opened: of many nodes others are let go."""
        if not self.many_nodes:
            return
        with self._lock:  # releasing may wait for whoever runs
            holders = [holder for other in _APART[sessions] for holder in self._holders[other]]
        for holder in holders:
            holder.release()
        give_back()

    def trim(self) -> None:
        """Called after work that took much for a while, such as opening sessions: of many nodes
        that goes back to the system.
        """
        if self.many_nodes:
            give_back()
