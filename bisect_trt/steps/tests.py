"""What a test of a plan takes, and the inputs it takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from bisect_trt.base.outcomes import CONFIDENCE, InputKind, at_least
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.evaluator import Prober
from bisect_trt.evaluate.result import PanelResult
from bisect_trt.metrics.statistics import draws_needed
from bisect_trt.steps.context import Bench
from bisect_trt.steps.problem import Case
from bisect_trt.steps.samples import redraws, variants, wants_variants

WANTED = 0.95
"""The share of unseen inputs that a plan shall hold on, where nobody asks for another."""

MAX_TESTS = 13
"""The most tests that a run makes before it decides: one of everything lowered, two a round."""

VERIFYING = 100
"""The number of a test that no search has made: its draws are no other test's."""

FRONTIER, FRONTIER_DRAWS = MAX_TESTS + 2, 4
"""The stream of the frontier's draws, so that what a row says was not tuned on them, and how many
of a kind there are of the slowest model."""

_AT_ONCE = 2.0
_OF_REST = 0.6
"""The part of a run's last minutes that redrawn copies and variants get; the report comes after."""

_TELLING = 32
"""So many at least: of a share of 0.9 they see one of 0.78 to 0.97 in nineteen cases of twenty."""

_TOLD = 25.0
"""Seconds that telling on how little a refused plan holds may take."""

_FIRST_TEST = 2.0 / 3.0
"""The part of a run's risk that its first test gets: many runs end there, and with more risk it
asks for fewer draws."""

_FEWEST, _MOST, _FURTHER, _LONGEST = 8, 300, 40.0, 150.0
"""A test is made of as many draws as it needs at least, up to 150 s; of fewer for slow models,
whose bound is then what it is. Where some miss it goes on to as many as usually take 40 s, so that
a plan which holds on a little more than is asked for may pass; not with ``--robust 0``."""


@dataclass(frozen=True)
class FreshTest:
    """One test on fresh draws of stream ``stream``, of each kind that is tested: passed if none of
    the first ``enough`` of a kind fails, or a few do (:attr:`may_miss_first`) and at most
    ``misses`` of its ``draws``.

    A plan below the share passes it with the probability ``risk`` at most, of which each look has
    half where there are two. What holds on all that it meets passes at the first; of what holds on
    99 % of it a third to a half does, where 95 % are asked for, and most others at the second. (A
    second look with a fifth of the risk left the demo's detector 156 pins instead of 112.)
    """

    stream: int
    risk: float
    draws: int
    misses: int
    enough: int

    @property
    def confidence(self) -> float:
        """That of the bound of either look."""
        return 1.0 - (self.risk / 2.0 if self.draws > self.enough else self.risk)

    @property
    def may_miss_first(self) -> int:
        """How many of the first ``enough`` may miss for it to go on: one more than their part of
        ``misses``. Of what misses more often little passes, and whoever gives up early says
        *robust* no more often than it should be said.
        """
        part = round(self.misses * self.enough / self.draws)
        return min(self.misses, part + 1)

    def may_miss(self, tested: int, case: Case) -> int:
        """How many of ``tested`` draws may miss where there are no others: as many as leave the
        share bounded, or of what is picked that share met.

        Args:
            tested: no more of the kind could be made.
            case: says what is asked for.
        """
        pick = case.settings.pick
        if pick is not None:
            return tested - at_least(pick, tested)
        wanted, most = wanted_of_unseen(case), 0
        while most < self.misses and draws_needed(wanted, self.confidence, most + 1) <= tested:
            most += 1
        return most


def planned_test(case: Case, number: int, usual_seconds: float, *, last: bool) -> FreshTest:
    """The test number ``number`` (from 0); ``last`` if it is the only one that will be made.

    Whoever tests until something passes is right more rarely than each test says: the first test
    gets two thirds of what may go wrong, each other half of the rest, so that together they keep to
    95 %.

    Args:
        case: says what share is asked for.
        number: decides the draws, which no other test and no search sees; no two tests share one.
        usual_seconds: about what an inference takes, as the bench counts it.
        last: whether all of the risk may be spent.
    """
    risk = 1.0 - CONFIDENCE
    if not last:
        risk *= _FIRST_TEST if number == 0 else (1.0 - _FIRST_TEST) / 2.0**number
    share = wanted_of_unseen(case)
    seconds = _seconds_a_draw(case, usual_seconds)
    enough = draws_needed(share, 1.0 - risk)
    if enough * seconds > _LONGEST:
        enough = max(_FEWEST, int(_LONGEST / seconds))
    once = FreshTest(number + 1, risk, enough, 0, enough)
    # Where no share is asked for the word is a courtesy: no draws beyond the fewest that tell.
    allowed = 0.0 if case.settings.fitted else _FURTHER
    each = 1.0 - risk / 2.0
    enough = draws_needed(share, each)
    most = min(max(_MOST, 2 * enough), int(allowed / seconds))
    misses, draws = 0, enough
    while (more := draws_needed(share, each, misses + 1)) <= most:
        misses, draws = misses + 1, more
    return FreshTest(number + 1, risk, draws, misses, enough) if misses else once


def next_test(case: Case, bench: Bench) -> FreshTest:
    """The next test of a run, which counts it: whichever station makes it, no two get one risk.

    Args:
        case: says what share is asked for.
        bench: of the run.
    """
    bench.tests += 1
    return asked(case, planned_test(case, bench.tests - 1, bench.pace.usual_seconds, last=False))


def asked(case: Case, test: FreshTest) -> FreshTest:
    """``test``, or where a point of the frontier is picked one of all its draws: what is picked has
    to hold on that share of them, and not to bound it.
    """
    pick = case.settings.pick
    if pick is None:
        return test
    return replace(test, misses=test.draws - at_least(pick, test.draws), enough=test.draws)


def shortened(test: FreshTest, case: Case, usual_seconds: float) -> FreshTest:
    """``test`` of at most as many draws as usually take 25 s, and of a few at least: of a plan that
    other tests have refused, it tells how badly.

    Args:
        test: as it was planned.
        case: says how many inputs make a draw.
        usual_seconds: about what an inference takes, as the bench counts it.
    """
    fitting = int(_TOLD / _seconds_a_draw(case, usual_seconds))
    return _within(test, max(_TELLING, fitting))


def out_of_reach(test: FreshTest, case: Case, usual_seconds: float, seen: int) -> FreshTest:
    """``test`` of at most as many draws as usually take 25 s, and of eight at least: no pins pass
    it any more, but those that are missing are still looked for.

    Args:
        test: as it was planned.
        case: says how many inputs make a draw.
        usual_seconds: about what an inference takes, as the bench counts it.
        seen: so many draws were judged, all of which count. (Whoever stops at a miss bounds the
            share from below as whoever meant to make so many draws, or lower than he could.)
    """
    fitting = int(_TOLD / _seconds_a_draw(case, usual_seconds))
    return _within(test, max(_FEWEST, fitting, min(seen, test.draws)))


def fitted(test: FreshTest, case: Case, probe_seconds: float, left_s: float) -> FreshTest:
    """``test`` with as many draws as can be made in ``left_s`` seconds, at least a few; its bound
    is then what it is.

    Args:
        test: as it was planned.
        case: says how many inputs make a draw.
        probe_seconds: about what one emulated inference takes.
        left_s: seconds; infinite where there is no budget.
    """
    # Inferences are made side by side; where that is too hopeful the clock ends them.
    seconds = _seconds_a_draw(case, probe_seconds) / _AT_ONCE
    if test.draws * seconds <= _OF_REST * left_s:
        return test
    return _within(test, max(_FEWEST, int(_OF_REST * left_s / seconds)))


def _within(test: FreshTest, most: int) -> FreshTest:
    """``test`` of at most so many draws: of one look where there is no room for a second."""
    if most > test.enough:
        return replace(test, draws=min(test.draws, most))
    return replace(test, draws=most, misses=0, enough=most)


def _seconds_a_draw(case: Case, probe_seconds: float) -> float:
    """Two emulations and a reference for each input of a set, of each kind."""
    kinds = 2.0 if wants_variants(case) else 1.0
    return max(3.0 * probe_seconds * set_size(case) * kinds, 1e-6)


def spared(case: Case, kind: InputKind, count: int) -> int:
    """How many of ``count`` samples of ``kind`` may miss the requirement.

    Args:
        case: says what is asked for.
        kind: given, redrawn or variants.
        count: of samples; where they are judged in sets, the answer counts sets.
    """
    if set_size(case) > 1:
        count //= set_size(case)
    if case.settings.pick is not None:
        return count - at_least(case.settings.pick, count)
    if kind == InputKind.GIVEN:
        share = wanted_of_given(case)
    else:
        wanted = wanted_of_variants(case) if kind == InputKind.VARIANTS else wanted_of_unseen(case)
        # What bounds a share lets about half as many miss: what just keeps to the share on a
        # panel would be refused, and the panel would have learnt nothing.
        share = (1.0 + wanted) / 2.0
    return count - at_least(share, count)


def set_size(case: Case) -> int:
    """How many inputs are judged together: all that are given where a condition is on a set of
    them (a mean, a metric of all inputs), else each alone.
    """
    return len(case.samples) if case.requirements.of_sets else 1


def each_must_hold(case: Case) -> bool:
    """Whether every given input must meet the requirement by itself."""
    return case.settings.share_of_given >= 1.0 and set_size(case) == 1


def wanted_of_given(case: Case) -> float:
    """The share of the given inputs that must hold: of inputs judged together none is let miss."""
    return case.settings.share_of_given if set_size(case) == 1 else 1.0


def wanted_of_unseen(case: Case) -> float:
    """The share of unseen inputs that is asked for, or spoken of where a set is fitted.

    Where some of the given inputs need not meet the requirement no more of the unseen ones need to
    by themselves: a copy of an input that misses mostly misses too. Of inputs that are judged
    together none is let miss, but what is picked (``--pick``) is picked of their sets.
    """
    settings = case.settings
    held = settings.share_of_given if set_size(case) == 1 else settings.pick or 1.0
    return case.settings.robust or min(WANTED, held)


def wanted_of_variants(case: Case) -> float:
    """The share that must be a bound of the variants too: all that is asked for, where they are
    tested at all.

    Redrawn roundings say little of other inputs, and a few variants are too few: a plan for
    UniMatch that passed 190 of 192 copies and 24 of 24 variants held on 89.5 % of 200 variants, and
    on 89.3 % of unseen inputs (benchmarks/results/search.md).
    """
    return wanted_of_unseen(case) if wants_variants(case) else 0.0


_MOST_REMEMBERED = 1 << 14
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
        if self._count > _MOST_REMEMBERED:
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


def draw_ahead(case: Case, bench: Bench) -> None:
    """Make the draws of the next test, and of the frontier of few inputs, with their references,
    where the model has so many nodes that the reference's session and the second emulator's are
    open in turn: of 60,000 nodes each takes 5 to 10 s to open. What the second emulator passes is
    tested next. Once for each test; not where there is a budget, which the search has first.

    Args:
        case: the given samples.
        bench: where references come from.
    """
    spared = case.settings.fitted or math.isfinite(bench.time.left_s)
    if not case.reference.turns.many_nodes or spared or bench.drawn_ahead > bench.tests:
        return
    bench.drawn_ahead = bench.tests + 1
    test = asked(case, planned_test(case, bench.tests, bench.pace.usual_seconds, last=False))
    draws = Draws(case, bench, [bench.prober, bench.second], test)
    for kind in draws.kinds:
        deque(islice(draws.of(kind), test.enough * set_size(case)), maxlen=0)
    # Of more inputs others are drawn, by how many draws the frontier turns out to have.
    if len(case.samples) <= FRONTIER_DRAWS and set_size(case) == 1:
        deque(variants(case, bench, FRONTIER, FRONTIER_DRAWS), maxlen=0)
        deque(redraws(case, bench, FRONTIER, FRONTIER_DRAWS, emulated=True), maxlen=0)


_FEW = 0.1
"""Where strict FP32 misses on no more of the inputs, it is they that are near ties, and not the
model that is wrong."""


def missed_on(case: Case, prober: Prober, plan: PrecisionPlan) -> str:
    """A sentence that counts the given inputs on which ``plan`` misses the requirement, names the
    worst, and where they are few, says how to let so many miss; begins with a space. Nothing where
    one input is given or all are judged together.

    Args:
        case: the inputs.
        prober: has run ``plan`` on them.
        plan: what was run.
    """
    count = len(case.samples)
    if count == 1 or set_size(case) > 1:
        return ""
    scores = [
        (found.score, sample.name)
        for sample in case.samples
        if (found := prober.known(plan, sample)) is not None and not found.score <= 1.0
    ]
    if not scores:
        return ""
    said = f" It misses on {len(scores)} of {count} given inputs, most on {max(scores)[1]}."
    if len(scores) <= _FEW * count and case.settings.share_of_given == 1.0:
        share = math.floor(100.0 * (count - len(scores)) / count) / 100.0
        said += f" If those are near ties, --holds-on {share:g} lets so many miss."
    return said
