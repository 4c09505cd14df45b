"""How progress leaves the stations: they tell an observer, and only the command line draws."""

from __future__ import annotations


class Observer:
    """Hears what a run does; this one ignores it all. Subclass what you want to show."""

    def station(self, name: str) -> None:
        """A station of the pipeline begins."""

    def progress(self, done: int, expected: int, note: str) -> None:
        """Work inside a station.

        Args:
            done: units of work that are finished.
            expected: about how many there will be, 0 where nobody knows.
            note: what was done last, for people.
        """

    def best(self, pins: int) -> None:
        """A set of so many pins passed whatever it was tried on until now."""

    def finding(self, message: str) -> None:
        """Something the user should know now."""
