"""How this process makes its sessions, by the size of the model that they are of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionHabits:
    """``frees_activations``: no session keeps freed activations for the next call, since of a large
    network several would each hold those.

    ``takes_singly``: each tensor is taken from the C library in place of an arena that sessions
    share. Calls beside each other wait for an arena at each tensor: of a network of 20,000 small
    ones two on two cores took 1.2 to 1.6 times as long as one after the other, and a run on sixteen
    cores waited 22 million times; taken singly two take 0.6 of the time. Large ones would be
    fetched from the system again and again.

    ``threads`` is the most that one call takes; 0 is all that the process may. Calls are made side
    by side where they have room, and a thread that sleeps takes as long to wake (50 us) as a node
    of a small network takes: on two cores a run of an OCR model needs 0.9 of the processor's time
    with one thread a call, and each thread of each session holds a queue of 0.15 MB. Of RT-DETR's
    nodes of 1.9 ms a search takes a third longer so.
    """

    frees_activations: bool = False
    takes_singly: bool = False
    threads: int = 0


_ADOPTED = [SessionHabits()]


def habits() -> SessionHabits:
    """Those that :func:`adopt` was told last; at first sessions save nothing."""
    return _ADOPTED[0]


def adopt(new: SessionHabits) -> None:
    """Sessions are made so from here on, in this process; another model may follow."""
    _ADOPTED[0] = new
