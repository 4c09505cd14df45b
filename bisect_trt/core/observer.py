"""How progress leaves the stations: they tell an observer, and only the command line draws."""

from __future__ import annotations


class Observer:
    """Hears what a run does; this one ignores it all. Subclass what you want to show."""

    def station(self, name: str) -> None:
        """A station of the pipeline begins."""

    def progress(self, done: int, expected: int, note: str) -> None:
        """Work inside a station: ``done`` of about ``expected`` units."""

    def finding(self, message: str) -> None:
        """Something the user should know now."""
