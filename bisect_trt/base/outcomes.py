"""What an evaluation, a diagnosis and a validation can end with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Verdict(StrEnum):
    """What trying one plan showed."""

    PASS = "pass"
    FAIL = "fail"
    NON_FINITE = "non-finite"
    BUILD_FAILED = "build-failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed-out"
    UNSURE = "unsure"

    @property
    def passed(self) -> bool:
        """Only a clear pass passes; an unsure or broken evaluation never makes a pin look
        superfluous.
        """
        return self is Verdict.PASS


class Cause(StrEnum):
    """Triage's word, as run.json holds it."""

    NONE = "none"
    GOLDEN_MISMATCH = "golden-mismatch"
    NOT_PRECISION = "not-precision"
    NOT_REPRODUCIBLE = "not-reproducible"
    ENGINE_FAILED = "engine-failed"
    TF32 = "tf32"
    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    ROUNDING = "rounding"
    ACCUMULATION = "accumulation"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class CauseFound:
    """One of several causes: its ``name``, the ``layers`` that it is seen in, and a sentence."""

    name: Cause
    layers: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Diagnosis:
    """A step that returns a bare one settles the case: nothing is searched. ``causes`` are all
    that were found, the largest first; empty where the sentence says all.
    """

    cause: Cause
    sentence: str
    causes: tuple[CauseFound, ...] = ()

    @property
    def all_causes(self) -> tuple[CauseFound, ...]:
        """The causes, also where there is one and nothing more is known of it."""
        if self.causes or self.cause is Cause.NONE:
            return self.causes
        return (CauseFound(self.cause, (), self.sentence),)

    @staticmethod
    def of(causes: Sequence[CauseFound]) -> Diagnosis:
        """The diagnosis of ``causes``, the largest first, one at least."""
        return Diagnosis(causes[0].name, " ".join(c.sentence for c in causes), tuple(causes))


VANISHING = "weight-underflow"
"""The kind of a constant that is partly below the smallest number; many models have dozens."""


WRITTEN_OUT = "written-out"
"""The kind of a layer that an engine computes in several steps."""


@dataclass(frozen=True)
class Finding:
    """``kind`` for machines, the layer or tensor that it is about (``where``), one sentence;
    ``weighty`` where the answer misleads without it, so that the headline has to say it.
    """

    kind: str
    where: str
    message: str
    weighty: bool = False


_APART = 0.1


@dataclass(frozen=True)
class Reproducibility:
    """``differing`` of ``runs`` gave another answer to a sample than most of its runs did.

    ``passed`` runs met the requirements; ``best`` and ``worst`` are the scores, in tolerances, of
    the answers to that sample which they differ most for. ``apart`` is the largest difference
    between two answers, over the range of the reference's output, on output ``output`` of sample
    ``sample``; 0 where no two differ, infinite where only one of them is finite there.
    ``processes`` counts those that the runs were made in, ``right`` those in which every run met
    the requirements; None where nobody counted. ``broken`` is how one ended that gave no answer,
    which counts as a run.
    """

    runs: int
    differing: int = 0
    passed: int = 0
    best: float = 0.0
    worst: float = 0.0
    apart: float = 0.0
    output: str = ""
    sample: str = ""
    processes: int = 1
    right: int | None = None
    broken: str = ""

    def of_set(self, best: float, worst: float) -> Reproducibility:
        """The same runs where all samples are judged together, of which no run of one passes or
        misses alone.
        """
        usual = self.runs - self.differing if best <= 1.0 else 0
        passed = self.runs if worst <= 1.0 else usual
        return replace(self, passed=passed, best=best, worst=worst)

    @property
    def reproducible(self) -> bool:
        """Whether all answers to each sample were the same, bit for bit."""
        return self.differing == 0

    @property
    def decides(self) -> bool:
        """Whether the verdict depends on it: a run fails, and others are better by more than a
        tenth. Sums whose order is left to chance differ too, but by last bits.
        """
        return self.worst > 1.0 and self.best < self.worst * (1.0 - _APART)


def together(found: Sequence[Reproducibility]) -> Reproducibility:
    """Those of several samples, one at least: counts added, the others of the least
    reproducible."""
    last = max(found, key=lambda s: (s.decides, s.differing > 0, _gap(s), s.apart))
    return replace(
        last,
        runs=sum(s.runs for s in found),
        differing=sum(s.differing for s in found),
        passed=sum(s.passed for s in found),
        processes=max(s.processes for s in found),
    )


def _gap(one: Reproducibility) -> float:
    """In tolerances; infinite where only one of the two is finite."""
    return 0.0 if one.best == one.worst else one.worst - one.best


CONFIDENCE = 0.95
"""Of everything that is said of inputs, or of runs, that nobody has seen."""

_RARE = 1.0 - CONFIDENCE


class InputKind(StrEnum):
    """What a plan is judged on; the value is its name in files."""

    GIVEN = "given"
    PERTURBED = "perturbed"
    AUGMENTED = "augmented"
    HOLDOUT = "holdout"

    @property
    def words(self) -> str:
        """As tables and plots call it."""
        return _WORDS[self]


_WORDS = {
    InputKind.GIVEN: "given inputs",
    InputKind.PERTURBED: "perturbed inputs",
    InputKind.AUGMENTED: "augmented",
    InputKind.HOLDOUT: "held out",
}


class ValidationVerdict(StrEnum):
    """What the tests say of inputs that nobody has shown."""

    VALIDATED = "validated"
    INCONCLUSIVE = "inconclusive"
    OVERFITTED = "overfitted"


@dataclass(frozen=True)
class Tally:
    """``passed`` of ``tested`` samples of one kind met the requirements.

    ``lower_bound`` is the share of all such samples that do, at least, with 95 % confidence; 0
    where the samples are no copies (the given ones, which the search saw). ``worst_score`` is the
    largest score in tolerances, NaN where nothing was tested, and ``worst`` the sample that had it.
    """

    passed: int = 0
    tested: int = 0
    lower_bound: float = 0.0
    worst_score: float = float("nan")
    worst: str = ""

    @property
    def share(self) -> float:
        """The share that passed, NaN where nothing was tested."""
        return self.passed / self.tested if self.tested else float("nan")

    def misses(self, wanted: float) -> bool:
        """Whether fewer passed than chance explains, had ``wanted`` of all such samples passed."""
        return _chance(self.passed, self.tested, wanted) <= _RARE + 1e-9


@dataclass(frozen=True)
class Validation:
    """What a plan holds on: the ``given`` inputs, copies of them with roundings ``perturbed``,
    ``augmented`` of them, and the inputs that were kept apart (``holdout``).

    ``wanted`` is the share of unseen inputs that is asked for, ``wanted_of_augmented`` the share of
    augmented inputs, which stand in for inputs that nobody has shown, ``wanted_of_given`` the share
    of the given inputs (``--allow-misses``); ``fitted`` is true where only these were searched
    with. ``set_size`` is how many inputs were judged together: one, or all that were given.
    ``prediction_limit`` is what other inputs may score, in tolerances, by what copies of the given
    ones do (:mod:`bisect_trt.metrics.statistics`): infinite where nothing can be told, NaN where
    nothing was asked. ``holdout_size`` is how many of the inputs kept apart were judged together.
    ``has_margin`` is false where an input's score says only whether it holds, and not how nearly.
    ``copies`` says which copies were tested: the stream of the test, and how many it may make.
    ``unfinished`` is true where the run ended before it had tested any, ``spent`` where augmented
    inputs are asked for and the search had seen all that could be made: those test nothing.
    ``alike`` is true where the given inputs are few and of one kind.
    """

    given: Tally
    perturbed: Tally
    augmented: Tally
    holdout: Tally
    wanted: float
    wanted_of_augmented: float = 0.0
    fitted: bool = False
    wanted_of_given: float = 1.0
    set_size: int = 1
    prediction_limit: float = math.nan
    holdout_size: int = 1
    has_margin: bool = True
    copies: tuple[int, int] | None = None
    unfinished: bool = False
    spent: bool = False
    alike: bool = False

    def of(self, kind: InputKind) -> Tally:
        """What was found on inputs of ``kind``."""
        found: Tally = getattr(self, kind.value)
        return found

    @property
    def word(self) -> ValidationVerdict | None:
        """None where the given inputs miss their share: then no word on other inputs is due.

        Validated: the given inputs hold, the shares of perturbed inputs and of augmented inputs are
        bounded by what is wanted of them (of one of the two, where the other cannot be made or is
        not asked for) or inputs kept apart bound it by themselves, so many of those hold as were
        asked for, and there is room for other inputs (:attr:`leaves_room`). Overfitted: some kind
        misses its share by more than chance explains (fewer pass than would in 5 % of such tests,
        had it the share).
        Inconclusive: between the two.
        """
        if not self.given_hold:
            return None
        if self.missed:
            return ValidationVerdict.OVERFITTED
        if self.holdout.passed < at_least(self.wanted, self.holdout.tested):
            return ValidationVerdict.INCONCLUSIVE
        robust = self.is_bounded and self.leaves_room and not self.alike
        return ValidationVerdict.VALIDATED if robust else ValidationVerdict.INCONCLUSIVE

    @property
    def given_hold(self) -> bool:
        """Whether so many of the given inputs hold as must."""
        return self.given.passed >= at_least(self.wanted_of_given, self.given.tested)

    @property
    def missed(self) -> tuple[Tally, ...]:
        """The kinds beside the given inputs of which fewer hold than chance explains. A set of
        those kept apart is one observation, and of other inputs than the given sets.
        """
        alone = [(self.holdout, self.wanted)] if self.holdout_size == 1 else []
        return tuple(kind for kind, wanted in (*self._copied, *alone) if kind.misses(wanted))

    @property
    def is_bounded(self) -> bool:
        """Whether inputs kept apart, each judged alone, bound the share that is wanted; or copies
        were tested, and the share of each kind of them is bounded by what is wanted.
        """
        tested = [(kind, wanted) for kind, wanted in self._copied if kind.tested]
        bounded = bool(tested) and all(kind.lower_bound >= wanted for kind, wanted in tested)
        bounded = bounded and not self.spent
        return bounded or (self.holdout_size == 1 and self._apart)

    @property
    def _apart(self) -> bool:
        """Whether inputs kept apart bound the share that is wanted."""
        return self.holdout.tested > 0 and self.holdout.lower_bound >= self.wanted

    @property
    def _copied(self) -> tuple[tuple[Tally, float], ...]:
        return (self.perturbed, self.wanted), (self.augmented, self.wanted_of_augmented)

    @property
    def of_one(self) -> bool:
        """Whether a single input is given."""
        return self.given.tested == self.set_size == 1

    @property
    def leaves_room(self) -> bool:
        """Whether what was tested speaks for other inputs: those kept apart bound the share, or all
        real ones do, being so many (59 for 0.95), or copies of the few reach so far only that
        others are within, too; of a decision, which is met or not and by no margin, they tell
        nothing. A set of inputs is one observation: its inputs must lie so near to each other that
        another set is within.

        Copies of one input are one text, or one scene. Of small models' plans whose copies held as
        often as was asked, 20 of 60 from two inputs and 10 of 60 from eight held on less than 93 %
        of 200 others; of 23 called validated from 24 inputs two held on 91 and 93 %, those whose
        copies reach beyond the tolerance (benchmarks/results/validation.md).
        """
        if self._apart or not self.prediction_limit > 1.0:
            return True
        if self.set_size > 1:
            return False
        passed = self.given.passed + self.holdout.passed
        tested = self.given.tested + self.holdout.tested
        return 1.0 - _chance(passed - 1, tested, self.wanted) <= _RARE + 1e-9


def word_of(validation: Validation | None) -> str | None:
    """The word as files have it; None where no plan was tested, or none is due."""
    return validation.word.value if validation is not None and validation.word is not None else None


def _chance(passed: int, tested: int, share: float) -> float:
    """That ``passed`` or fewer of ``tested`` pass where ``share`` of all do: the binomial tail."""
    if share <= 0.0 or passed >= tested:
        return 1.0
    ways = math.lgamma(tested + 1)
    return math.fsum(
        math.exp(
            ways
            - math.lgamma(k + 1)
            - math.lgamma(tested - k + 1)
            + k * math.log(share)
            + (tested - k) * math.log1p(-share)
        )
        for k in range(passed + 1)
    )


def at_least(share: float, count: int) -> int:
    """How many of ``count`` are ``share`` of them or more: 5 of 5 for 0.95, 1 of 1."""
    return math.ceil(share * count - 1e-9)
