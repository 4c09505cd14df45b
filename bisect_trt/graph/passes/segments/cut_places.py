"""Where a network is cut: between which of its nodes, by how many tensors cross there and by what
repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto

Kinds = NDArray[np.intp]
"""One number a node, the same for nodes that do the same with other values."""

_WINDOW = 4
"""A cut is looked for within a fourth of a segment's length of its even place."""

_LOOKED_AT = 32
"""Distances at which most kinds come again; of those the one is taken that holds longest."""

_PROJECTIONS = 4
"""Random phases a kind, by which matches are counted: of 10,000 nodes to half a percent."""


@dataclass(frozen=True)
class Block:
    """From node ``start`` to ``end`` every kind comes again after ``period`` more; ``step`` is as
    many periods as a segment has.
    """

    start: int
    end: int
    period: int
    step: int


@dataclass(frozen=True)
class Crossing:
    """``alive`` counts the tensors that are alive before each node and after the last; where it is
    more than ``most`` no cut can be.
    """

    alive: Sequence[int]
    most: int

    def even(self, start: int, end: int, length: float) -> list[int]:
        """Places about ``length`` nodes apart at which few tensors cross.

        Args:
            start: the first node.
            end: behind the last.
            length: in nodes.
        """
        count = end - start
        wanted = max(1, round(count / length))
        length, found = count / wanted, []
        for number in range(1, wanted):
            even = start + round(number * length)
            near = range(
                max(start + 1, even - int(length / _WINDOW)),
                min(end, even + int(length / _WINDOW) + 1),
            )
            best = min(near, key=lambda place: (self.alive[place], abs(place - even)), default=even)
            if self.alive[best] <= self.most:
                found.append(best)
        return sorted(set(found))

    def alike(self, kinds: Kinds, length: float) -> list[int]:
        """Places between which a network that repeats a block has the same nodes, about ``length``
        nodes apart or a block; what does not repeat is cut evenly.

        Args:
            kinds: of all nodes.
            length: in nodes.
        """
        found, behind = [], 0
        for block in repeated_blocks(kinds, length):
            places = self._of_block(block)
            if len(places) > 1:
                found += [*self.even(behind, places[0], length), *places]
                behind = places[-1]
        found += self.even(behind, len(kinds), length)
        return sorted(set(found) - {0, len(kinds)})

    def _of_block(self, block: Block) -> list[int]:
        """Where each ``step`` of ``block`` begins and the last ends: at the node of the block at
        which fewest tensors cross.
        """
        alive = np.asarray(self.alive)
        starts = np.arange(block.start, block.end + 1, block.step)
        # Each offset into the block, with all the places that it stands for.
        places = starts + np.arange(block.period)[:, None]
        there = places <= block.end
        crossing = np.where(there, alive[np.minimum(places, block.end)], 0)
        best = int(np.lexsort((crossing.sum(1) / there.sum(1), crossing.max(1)))[0])
        return [int(p) for p in places[best] if p <= block.end and alive[p] <= self.most]


def kinds_of(
    nodes: Sequence[onnx.NodeProto],
    told: Callable[[str], object],
    apart: Callable[[str], bool],
    known: dict[tuple[object, ...], int] | None = None,
) -> Kinds:
    """The kind of each node: its operator, its attributes but bodies, and what is told of what it
    reads.

    Args:
        nodes: of a graph.
        told: of a tensor that no node makes, such as a weight's shape; None of others.
        apart: whether an operator's attributes say nothing.
        known: the numbers of kinds that were met in other parts of the network; those that are new
            are added.
    """
    numbers = {} if known is None else known
    found = np.empty(len(nodes), np.intp)
    for index, node in enumerate(nodes):
        attributes = tuple(
            a.SerializeToString(deterministic=True)
            for a in (() if apart(node.op_type) else node.attribute)
            if a.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS)
        )
        kind = (node.domain, node.op_type, attributes, tuple(map(told, node.input)))
        found[index] = numbers.setdefault(kind, len(numbers))
    return found


def repeated_blocks(kinds: Kinds, length: float) -> list[Block]:
    """The longest part of a network that is one block several times, and those before and behind
    it, in order.

    Args:
        kinds: of all nodes.
        length: of a segment, in nodes; what is no longer than two is not looked into.
    """

    def within(start: int, end: int) -> list[Block]:
        found = _repeated(kinds[start:end], length) if end - start > 2 * length else None
        if found is None:
            return []
        block = Block(start + found.start, start + found.end, found.period, found.step)
        return [*within(start, block.start), block, *within(block.end, end)]

    return within(0, len(kinds))


def _repeated(kinds: Kinds, length: float) -> Block | None:
    """The longest part that is one block at least twice; None where there is none.

    The distances to look at are told by the autocorrelation (Wiener and Khinchin) of a random phase
    for each kind: what matches adds one, what does not adds nothing on average (Alon, Matias and
    Szegedy, STOC 1996).
    """
    count = len(kinds)
    lags = np.arange(1, count // 2 + 1)
    phases = np.random.default_rng(0).random((_PROJECTIONS, int(kinds.max()) + 1))
    spectra = np.fft.fft(np.exp(2j * np.pi * phases[:, kinds]), 2 * count)
    matches = np.fft.ifft(np.mean(np.abs(spectra) ** 2, axis=0)).real
    share = np.round(matches[lags] / (count - lags), 6)
    # Blocks of which a segment holds several; larger ones, made of those, where there are none.
    short, long = lags <= length, lags > length
    return _longest(kinds, lags[short], share[short], length) or _longest(
        kinds, lags[long], share[long], length
    )


def _longest(
    kinds: Kinds, lags: NDArray[np.intp], share: NDArray[np.float64], length: float
) -> Block | None:
    """The longest part that repeats at one of ``lags``, by which ``share`` of all nodes come again,
    and of those that are as long the one of the shortest period.
    """
    count, found = len(kinds), []
    for lag in (int(lags[i]) for i in np.lexsort((lags, -share))[:_LOOKED_AT]):
        differs = np.flatnonzero(kinds[lag:] != kinds[:-lag])
        bounds = np.concatenate(([-1], differs, [count - lag]))
        longest = int(np.argmax(np.diff(bounds)))
        start, end = int(bounds[longest]) + 1, int(bounds[longest + 1]) + lag
        step = max(1, int(length / lag)) * lag
        if end - start >= 2 * step:
            found.append(Block(start, end, lag, step))
    return max(found, key=lambda b: (b.end - b.start, -b.period), default=None)
