"""The draws of one test, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bisect_trt.core.holds import InputKind
from bisect_trt.core.sample import Sample
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import PanelResult
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.fresh_test import FreshTest, set_size
from bisect_trt.stations.draws.redrawn import redraws
from bisect_trt.stations.draws.varied import variants

_MOST = 1 << 14
"""So many are remembered: a kilobyte each, for what they hold is made again when it is read."""


class Draws:
    """The redrawn copies and variants of ``test``, made once however often they are asked for; more
    than some thousands, as inputs that are judged in sets may be, each time anew.

    ``kinds`` is the order in which a test asks for them: what refuses a plan soonest comes first.
    Those whose digests are in ``without`` are left out.

    Args:
        case: the given samples.
        bench: where the draws' references are.
        judges: who will be asked: an engine takes no copy of which what it looks up was moved.
        test: which draws, and how many.
    """

    def __init__(self, case: Case, bench: Bench, judges: Sequence[Prober], test: FreshTest) -> None:
        self.test = test
        # Variants refuse more often, and what is refused need not be tested to its end.
        self.kinds = [InputKind.VARIANTS, InputKind.REDRAWN]
        self._case, self._bench = case, bench
        self._emulated = bench.engine not in judges
        self._count = test.draws * set_size(case)
        self.without = set[str]()
        self._made: dict[InputKind, tuple[list[Sample], Iterator[Sample]]] = {}
        self._worst: dict[InputKind, float] = {}
        self._seen: dict[InputKind, int] = {}

    def of(self, kind: InputKind) -> Iterator[Sample]:
        """Those of ``kind``, redrawn or variants."""
        if self._count > _MOST:
            drawn = self._drawn(kind)
        else:
            if kind not in self._made:
                self._made[kind] = [], self._drawn(kind)
            drawn = _again(*self._made[kind])
        return (s for s in drawn if s.digest not in self.without) if self.without else drawn

    def hear(self, kind: InputKind, found: PanelResult) -> None:
        """Let what one judge passed be asked of the next one worst first: either look of a test
        counts the same draws in any order, and what will be refused is by the first few.

        Args:
            kind: redrawn or variants.
            found: what the judge found, on all that it was to be asked about.
        """
        self._seen[kind] = len(found.results)
        self._worst[kind] = found.score()
        self.kinds.sort(key=lambda k: -self._worst.get(k, 0.0))
        samples = self._made[kind][0] if kind in self._made else []
        if len(found.results) > len(samples) or set_size(self._case) > 1 or self.without:
            return
        scores = [r.score for r in found.results]
        order = sorted(range(len(scores)), key=lambda i: (i >= self.test.enough, -scores[i]))
        samples[: len(scores)] = [samples[i] for i in order]

    def seen(self, kind: InputKind) -> int:
        """On how many of ``kind`` a judge was heard."""
        return self._seen.get(kind, 0)

    def _drawn(self, kind: InputKind) -> Iterator[Sample]:
        case, bench, stream = self._case, self._bench, self.test.stream
        if kind == InputKind.VARIANTS:
            return variants(case, bench, stream, self._count)
        return redraws(case, bench, stream, self._count, emulated=self._emulated)


def _again(made: list[Sample], stream: Iterator[Sample]) -> Iterator[Sample]:
    """What was made before, and then what ``stream`` still gives."""
    place = 0
    while True:
        if place == len(made):
            following = next(stream, None)
            if following is None:
                return
            made.append(following)
        yield made[place]
        place += 1
