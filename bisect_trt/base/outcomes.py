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
    """The cause in a word and a sentence; ``causes`` are all, the largest first.

    A step that returns a bare one settles the case: nothing is searched.
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


@dataclass(frozen=True)
class Reproducibility:
    """``differing`` of ``runs`` gave another answer to a sample than most of its runs did.

    ``passed`` runs met the requirements; ``best`` and ``worst`` are the scores of the answers to
    the sample that they differ most for. ``apart`` is the largest difference between two answers,
    over the range of the reference's output, on ``output`` of ``sample``; infinite where only one
    is finite. In ``right`` of ``processes`` every run met the requirements; None where nobody
    counted. ``broken`` is how a run ended that gave no answer.
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
        """The same runs where all samples are judged together."""
        usual = self.runs - self.differing if best <= 1.0 else 0
        passed = self.runs if worst <= 1.0 else usual
        return replace(self, passed=passed, best=best, worst=worst)

    @property
    def reproducible(self) -> bool:
        """Whether all answers to each sample were the same, bit for bit."""
        return self.differing == 0

    @property
    def decides(self) -> bool:
        """Whether the verdict depends on it: a run fails, and others are better by a tenth."""
        return self.worst > 1.0 and self.best < 0.9 * self.worst


def together(found: Sequence[Reproducibility]) -> Reproducibility:
    """Those of several samples: counts added, the rest of the least reproducible."""
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

    ``lower_bound`` is the share of all such samples that do, at least; 0 for the given inputs,
    which the search saw. ``worst_score`` is the largest score, NaN where nothing was tested, and
    ``worst`` the sample that had it.
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
    """What a plan holds on: given, perturbed, augmented and held out inputs.

    The ``wanted`` shares are what is asked for of unseen, augmented and given inputs; ``fitted`` is
    true where only the given inputs were searched with. ``set_size`` inputs were judged together,
    and ``holdout_size`` of those kept apart. ``prediction_limit`` is what other inputs may score,
    by what copies do: infinite where nothing can be told, NaN where nothing was asked.
    ``has_margin`` is false where a score says only whether an input holds. ``copies`` are the
    stream of the copies and their number. ``unfinished`` is true where the run ended before any was
    tested, ``spent`` where the search had seen all augmented inputs that can be made, ``alike``
    where the given inputs are few and of one kind.
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
        """The verdict; None where the given inputs miss their share.

        Validated: the share is bounded (:attr:`is_bounded`), those kept apart have it, and there is
        room for other inputs (:attr:`leaves_room`). Overfitted: some kind misses its share by more
        than chance explains. Inconclusive: between the two.
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
        """The kinds beside the given inputs of which fewer hold than chance explains."""
        # A set of those kept apart is one observation, and of other inputs than the given sets.
        alone = [(self.holdout, self.wanted)] if self.holdout_size == 1 else []
        return tuple(kind for kind, wanted in (*self._copied, *alone) if kind.misses(wanted))

    @property
    def is_bounded(self) -> bool:
        """Whether each kind of copies, or inputs kept apart and judged alone, bound the share."""
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
        """Whether what was tested speaks for other inputs.

        Those kept apart bound the share, or the prediction limit is within the tolerance, or the
        real inputs bound the share, being many (59 for 0.95). Copies of one input are one text, or
        one scene: by themselves they say too little of others (benchmarks/results/validation.md).
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
