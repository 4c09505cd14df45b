"""The steered search as a station: where many layers share the blame and the emulator has the last word, a smaller set.

It is worth its time only there. With an engine as the judge, errors would have to cancel in the engine's arithmetic, which nobody
can look into layer by layer; where few layers are to blame, the set is small already; and means over all elements leave nothing to
chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.compare.sampling import ErrorSampler
from bisect_trt.errors import RunnerFailedError
from bisect_trt.material import Material
from bisect_trt.observer import Observer
from bisect_trt.precision import PrecisionPlan
from bisect_trt.prober import Prober
from bisect_trt.runners.base import Sample
from bisect_trt.runners.emulated import EmulatedRunner
from bisect_trt.runners.histories import Histories, History
from bisect_trt.runners.sessions import thread_count
from bisect_trt.search.spread import Rounding, Spread
from bisect_trt.search.steer import PRICES, Look, Move, steer
from bisect_trt.sensitivity import Sensitivity
from bisect_trt.store import RunFolder

_WATCHED, _SAMPLED = 300, 4096

_WIDTHS, _BUDGET_S = (32, 16, 8), 300.0
"""How wide the walk's beam is at first: as wide as is affordable. A narrower one than the last finds nothing worth its time."""

_LOOKS = 0.8
"""A walk's seconds, over layers, width and a probe's seconds: two arithmetics, half an inference a look (measured, 2 cores)."""

_PER_LAYER_S, _PRODUCTS_A_S = 3e-5, 5e10

_MEMORY_BYTES, _HELD_BYTES = 4e9, 128
"""A walk may hold so much; in float32 and two arithmetics, four times the beam, about four tensors each that no other plan shares."""

_TRIED = 16

_FP32_NOISE = 1e-5
"""Relative and absolute: what another order of FP32 sums changes; a redrawn FP16 rounding changes a hundred times more."""

_DRAWS = 4
"""What rounding an activation does is chance; its mean square over the samples as they are and moved three times is what counts."""

_MOVE = 1e-3
"""How far inputs are moved, in their standard deviations: far enough to redraw roundings, too little to change what layers do."""

_WILD = 20.0
"""A layer whose rounding alone costs so many tolerances is pinned: that is no small error that others could cancel."""


def beam_width(layers: int, probe_seconds: float, largest: int = 0) -> int:
    """The widest beam whose walk is affordable, in time and for a ``largest`` tensor of so many elements in memory; 0 if none is."""
    room = _MEMORY_BYTES / (_HELD_BYTES * max(largest, 1))
    return next((width for width in _WIDTHS if width <= room and walk_seconds(layers, probe_seconds, width) <= _BUDGET_S), 0)


def walk_seconds(layers: int, probe_seconds: float, width: int) -> float:
    """What one walk takes."""
    return _LOOKS * layers * width * probe_seconds


def nominal_seconds(layers: int, products: float, samples: int) -> float:
    """About what a probe takes on the machine this was measured on: not measured anew, so that a set is the same on any day."""
    return samples * (_PER_LAYER_S * layers + products / _PRODUCTS_A_S)


class Steering:
    """Walks with the model, samples and requirement of one run."""

    def __init__(
        self,
        prober: Prober,
        material: Material,
        base: PrecisionPlan,
        sensitivity: Sensitivity,
        folder: RunFolder,
        observer: Observer,
        probe_seconds: float,
        largest: int,
    ) -> None:
        self._beam_width = beam_width(len(material.names), probe_seconds, largest * len(material.samples))
        self._prober = prober
        self._material = material
        self._base = base
        self._folder = folder
        self._observer = observer
        self._must = frozenset(name for name, score in sensitivity.scores.items() if not score <= _WILD)

    def walks(self) -> Iterator[list[frozenset[str]]]:
        """Sets that probably pass, to be tried in this order, of one walk after the other; none if the model does not allow them.

        The journal keeps each walk's sets.
        """
        for price in PRICES if self._beam_width else ():
            key = self._prober.key("steered", self._base.to_json(), str(self._beam_width), str(price))
            known = self._folder.recall(key)
            if known is None:
                try:
                    found = [sorted(s) for s in self._walk(price)[:_TRIED]]
                except RunnerFailedError:  # a rounded index out of range, say
                    found = []
                self._folder.record(key, "steered", found)
                known = (found, b"")
            yield [frozenset(names) for names in known[0]]

    def _walk(self, price: float) -> list[frozenset[str]]:
        spread, watched = self._spread
        self._observer.station("steer")
        names, must, width = self._material.names, self._must, self._beam_width
        places = {name: i for i, name in enumerate(names)}
        with self._histories(watched) as histories:

            def follow(moves: Sequence[Move[History]]) -> list[tuple[History, Look | None]]:
                self._observer.progress(places[moves[0].layer], len(names), f"{moves[0].layer}, {len(moves)} ways")
                return histories.follow(moves)

            found = steer(spread, must, histories.start, follow, beam_width=width, arithmetics=histories.arithmetics, price=price)
        return [steered.pinned for steered in found]

    @cached_property
    def _sampler(self) -> ErrorSampler:
        """The elements that err most when all is lowered that may be, and others: the run's own sampler also follows what may not."""
        outputs = list(self._prober.runner.outputs(self._base.with_pins(self._must)))
        return ErrorSampler(self._material.requirements, self._material.references, outputs, _SAMPLED)

    @cached_property
    def _threads(self) -> int:
        """One, if a walk on one thread makes the roundings of the runner's probes, else as many as a probe takes, which is slower.

        ONNX Runtime cuts the sums of large convolutions by the number of threads: with 16 of them that redrew roundings in most plans
        tried, with 2 in few. Differences of FP32's own size come after the last rounding, and redraw none.
        """
        names, base = self._material.names, self._base
        single = EmulatedRunner(self._material.model.proto, self._material.samples, base.base, threads=1)
        for pinned in (self._must, self._must.union(names[::3])):
            plan = base.with_pins(pinned)
            for walked, probed in zip(single.walk(plan, kernels=False), self._prober.runner.outputs(plan), strict=True):
                if not all(np.allclose(walked[n], probed[n], _FP32_NOISE, _FP32_NOISE, equal_nan=True) for n in walked):
                    return thread_count(0)
        return 1

    @cached_property
    def _spread(self) -> tuple[Spread, NDArray[np.int64]]:
        """Every rounding with its effect on the elements that roundings disturb most, and which elements these are."""
        self._observer.station("roundings")
        size = self._sampler.size
        draws = [[_moved(sample, draw) for sample in self._material.samples] for draw in range(_DRAWS)]
        with self._histories(np.arange(size)) as histories:
            drawn = {site: [_tame(row, size) for row in rows] for site, rows in histories.single_roundings(draws).items()}
        squares = {site: np.mean(np.square(rows), axis=0) for site, rows in drawn.items()}
        watched = np.argsort(-np.sum(list(squares.values()), axis=0), kind="stable")[:_WATCHED].astype(np.int64)
        nothing = np.zeros(watched.size)
        roundings = [
            Rounding(s.on, s.off, rows[0][watched], nothing) if s.constant else Rounding(s.on, s.off, nothing, squares[s][watched])
            for s, rows in drawn.items()
        ]
        return Spread(self._material.names, roundings), watched

    @contextmanager
    def _histories(self, watched: NDArray[np.int64]) -> Iterator[Histories]:
        samples, sampler = self._material.samples, self._sampler
        ends = np.cumsum([sampler.size_of(i) for i in range(len(samples))])
        own = [watched[(watched >= end - sampler.size_of(i)) & (watched < end)] - (end - sampler.size_of(i)) for i, end in enumerate(ends)]

        def errors(sample: int, outputs: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.float32], float]:
            vector = sampler.errors(sample, outputs)  # a score of all elements would cost half a look
            return vector[own[sample]], float(np.abs(vector).max(initial=0.0))

        with Histories(self._material.model.proto, samples, self._base.base, self._material.names, errors, self._threads) as histories:
            yield histories


def _tame(row: NDArray[np.float64] | None, size: int) -> NDArray[np.float64]:
    wild = row is None or not np.isfinite(row).all() or float(np.abs(row).max(initial=0.0)) > _WILD
    return np.zeros(size) if row is None or wild else row


def _moved(sample: Sample, draw: int) -> Sample:
    """The inputs of draw number ``draw``; the first are the sample's own."""
    if draw == 0:
        return sample
    random = np.random.default_rng(draw)
    arrays = {
        name: (a + _MOVE * float(a.std()) * random.standard_normal(a.shape)).astype(a.dtype) if a.dtype == np.float32 and a.size else a
        for name, a in sample.arrays.items()
    }
    return Sample(sample.name, arrays)
