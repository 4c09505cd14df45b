"""Whether the command was asked to stop: threads that wait for workers look, since an interrupt
reaches the main thread alone.
"""

from __future__ import annotations

from threading import Event

STOPPING = Event()
