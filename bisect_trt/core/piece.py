"""A part of a model, by the ids of its nodes: what a reduction asks about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bypass:
    """``node`` left out where ``source``, one of its inputs, is read in place of its output."""

    node: str
    source: str


@dataclass(frozen=True)
class Piece:
    """The nodes that are ``kept``, and the bypasses among those that are not.

    What other nodes gave to the kept ones is recorded and becomes an input.
    """

    kept: frozenset[str]
    bypassed: frozenset[Bypass] = frozenset()

    def without(self, bypass: Bypass) -> Piece:
        """The same with one more node bypassed."""
        return Piece(self.kept - {bypass.node}, self.bypassed | {bypass})
