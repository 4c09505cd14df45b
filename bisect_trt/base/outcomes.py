"""What an evaluation, a diagnosis and a validation can end with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

AS_IS, REPAIRED, FITTED, KNEE = "as it is", "repaired", "weights fitted", "knee"
PLAN, BF16, FP32 = "plan", "BF16", "FP32"
"""Names of the choices."""

LISTED = "your list"
"""The first words of the row of another tool's list, which has its file's name too."""

MIXED = "reduced model given"
"""The first words of the row of another tool's mixed model, which has its file's name too."""


class Verdict(StrEnum):
    """The outcome of an evaluation."""

    PASS = "pass"
    FAIL = "fail"
    NON_FINITE = "non-finite"
    BUILD_FAILED = "build-failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed-out"
    UNSURE = "unsure"

    @property
    def passed(self) -> bool:
        """Whether it is a clear pass."""
        # Unsure and broken ones are none: they must never make a pin look superfluous.
        return self is Verdict.PASS


class Cause(StrEnum):
    """Why the numbers are wrong, as run.json has it."""

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
    """One of several causes: its ``name``, the ``layers`` that show it, and a sentence."""

    name: Cause
    layers: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Diagnosis:
    """The cause in a word and a sentence; ``causes`` are all, the largest first."""

    cause: Cause
    sentence: str
    causes: tuple[CauseFound, ...] = ()

    @property
    def all_causes(self) -> tuple[CauseFound, ...]:
        """``causes``, or the only cause without its layers."""
        if self.causes or self.cause is Cause.NONE:
            return self.causes
        return (CauseFound(self.cause, (), self.sentence),)

    @staticmethod
    def of(causes: Sequence[CauseFound]) -> Diagnosis:
        """The diagnosis of one or more ``causes``, the largest first."""
        return Diagnosis(causes[0].name, " ".join(c.sentence for c in causes), tuple(causes))


@dataclass(frozen=True)
class ErrorShare:
    """The few ``layers`` that make nearly all of the error, by measured scores.

    ``share``: the part of the worst score that goes where they are kept in FP32; NaN where that
    score is infinite. ``left``: the worst score that stays, in tolerances.
    """

    layers: tuple[str, ...]
    share: float
    left: float


VANISHING = "weight-underflow"
"""Kind of finding: a constant is partly below the format's smallest number."""

WRITTEN_OUT = "written-out"
"""Kind of finding: an engine computes a layer in several steps."""


@dataclass(frozen=True)
class Finding:
    """A sentence (``message``) on a layer or tensor (``where``), with its ``kind`` for machines.

    ``weighty``: the answer misleads without it, so the headline says it.
    """

    kind: str
    where: str
    message: str
    weighty: bool = False


@dataclass(frozen=True)
class Reproducibility:
    """How the repeated runs of an engine differ.

    ``runs``: how many there were; ``differing``: with other outputs than most runs of the sample.
    ``passed``: runs that met the requirements.
    ``best``, ``worst``: the scores on the sample whose outputs differ most.
    ``apart``: the largest difference between two runs over the reference's range, on ``output`` of
    ``sample``; infinite where only one is finite.
    ``processes``: how many there were; ``right``: those in which every run met the requirements,
    None if not counted.
    ``broken``: how a run without outputs ended.
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
        """The same runs with all samples judged together."""
        usual = self.runs - self.differing if best <= 1.0 else 0
        passed = self.runs if worst <= 1.0 else usual
        return replace(self, passed=passed, best=best, worst=worst)

    @property
    def reproducible(self) -> bool:
        """Whether all runs of each sample gave the same bits."""
        return self.differing == 0

    @property
    def decides(self) -> bool:
        """Whether the verdict depends on the run: one fails, and another is better by a tenth."""
        return self.worst > 1.0 and self.best < 0.9 * self.worst


def together(found: Sequence[Reproducibility]) -> Reproducibility:
    """Several samples as one: counts add up, the rest is the least reproducible sample's."""
    # A difference that decides counts more than a larger one that does not.
    last = max(found, key=lambda s: (s.decides, s.differing > 0, _gap(s), s.apart))
    return replace(
        last,
        runs=sum(s.runs for s in found),
        differing=sum(s.differing for s in found),
        passed=sum(s.passed for s in found),
        processes=max(s.processes for s in found),
    )


def _gap(one: Reproducibility) -> float:
    # inf - inf is NaN
    return 0.0 if one.best == one.worst else one.worst - one.best


CONFIDENCE = 0.95
"""The confidence of every statement on unseen inputs or runs."""


class InputKind(StrEnum):
    """The kind of inputs that a plan is judged on; the value is its name in files."""

    GIVEN = "given"
    PERTURBED = "perturbed"
    AUGMENTED = "augmented"
    HOLDOUT = "holdout"

    @property
    def words(self) -> str:
        """Its name in tables and plots."""
        return _WORDS[self]


_WORDS = {
    InputKind.GIVEN: "given inputs",
    InputKind.PERTURBED: "perturbed inputs",
    InputKind.AUGMENTED: "augmented inputs",
    InputKind.HOLDOUT: "held-out inputs",
}


class ValidationVerdict(StrEnum):
    """What validation says of unseen inputs."""

    VALIDATED = "validated"
    INCONCLUSIVE = "inconclusive"
    OVERFITTED = "overfitted"


@dataclass(frozen=True)
class Tally:
    """``passed`` of ``tested`` samples of one kind met the requirements.

    ``lower_bound``: the share of all such samples that do, at least; 0 for the given inputs, which
    the search saw. ``worst_score``: the largest score, NaN if nothing was tested; ``worst``: the
    sample that has it.
    """

    passed: int = 0
    tested: int = 0
    lower_bound: float = 0.0
    worst_score: float = float("nan")
    worst: str = ""

    @property
    def share(self) -> float:
        """The share that passed; NaN if nothing was tested."""
        return self.passed / self.tested if self.tested else float("nan")

    def misses(self, wanted: float) -> bool:
        """Whether fewer passed than chance explains if ``wanted`` of all such samples pass."""
        return _is_rare(_chance(self.passed, self.tested, wanted))


@dataclass(frozen=True)
class Validation:
    """The outcome of a plan on the given inputs and on inputs that the search has not used.

    ``given``, ``perturbed``, ``augmented``, ``holdout``: what passed of each kind.
    ``wanted``, ``wanted_of_augmented``, ``wanted_of_given``: the shares that have to pass.
    ``fitted``: the search used the given inputs only.
    ``set_size``, ``holdout_size``: how many given, or held out, inputs are judged together.
    ``prediction_limit``: what an unseen input may score; infinite if unknown, NaN if not computed.
    ``has_margin``: the score says more than pass or fail.
    ``unfinished``: the run ended before anything was tested.
    ``spent``: the search has used every augmented input that can be made.
    ``alike``: the given inputs are few and of one kind.
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
    unfinished: bool = False
    spent: bool = False
    alike: bool = False

    def of(self, kind: InputKind) -> Tally:
        """The tally of inputs of ``kind``."""
        tally: Tally = getattr(self, kind.value)
        return tally

    @property
    def tested(self) -> list[tuple[InputKind, Tally]]:
        """The kinds of inputs that were tested."""
        return [(kind, self.of(kind)) for kind in InputKind if self.of(kind).tested]

    @property
    def word(self) -> ValidationVerdict | None:
        """The verdict; None where the given inputs miss their share."""
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
        """Whether enough of the given inputs pass."""
        return self.given.passed >= at_least(self.wanted_of_given, self.given.tested)

    @property
    def missed(self) -> tuple[Tally, ...]:
        """The kinds beside the given inputs that miss their share by more than chance."""
        # A set of held out inputs is one observation: too few for a share.
        alone = [(self.holdout, self.wanted)] if self.holdout_size == 1 else []
        return tuple(kind for kind, wanted in (*self._copied, *alone) if kind.misses(wanted))

    @property
    def is_bounded(self) -> bool:
        """Whether the copies of each kind, or the held out inputs, prove the wanted share."""
        tested = [(kind, wanted) for kind, wanted in self._copied if kind.tested]
        bounded = bool(tested) and all(kind.lower_bound >= wanted for kind, wanted in tested)
        # Copies that the search has used prove nothing of unseen inputs.
        bounded = bounded and not self.spent
        return bounded or (self.holdout_size == 1 and self._holdout_proves)

    @property
    def _holdout_proves(self) -> bool:
        """Whether the held out inputs prove the wanted share."""
        return self.holdout.tested > 0 and self.holdout.lower_bound >= self.wanted

    @property
    def _copied(self) -> tuple[tuple[Tally, float], ...]:
        return (self.perturbed, self.wanted), (self.augmented, self.wanted_of_augmented)

    @property
    def of_one(self) -> bool:
        """Whether there is a single given input."""
        return self.given.tested == self.set_size == 1

    @property
    def leaves_room(self) -> bool:
        """Whether the tested inputs say enough of other inputs."""
        # Copies of one input are one text or one scene: alone they say too little of others
        # (benchmarks/results/validation.md). Enough are held out inputs, a prediction limit within
        # the tolerance, or many real inputs (59 for a share of 0.95).
        if self._holdout_proves or not self.prediction_limit > 1.0:
            return True
        if self.set_size > 1:
            return False
        passed = self.given.passed + self.holdout.passed
        tested = self.given.tested + self.holdout.tested
        return _is_rare(1.0 - _chance(passed - 1, tested, self.wanted))


def word_of(validation: Validation | None) -> str | None:
    """The verdict as files have it; None if there is none."""
    return validation.word.value if validation is not None and validation.word is not None else None


def _is_rare(chance: float) -> bool:
    return chance <= 1.0 - CONFIDENCE + 1e-9  # equality must not depend on a last bit


def _chance(passed: int, tested: int, share: float) -> float:
    """The binomial probability of ``passed`` or fewer of ``tested`` if ``share`` of all pass."""
    if share <= 0.0 or passed >= tested:
        return 1.0
    # In logarithms: binomial coefficients of thousands of samples overflow a float.
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
    """The fewest of ``count`` that are at least ``share`` of them: all 5 of 5 for 0.95."""
    return math.ceil(share * count - 1e-9)  # 0.55 * 100 is 55.00000000000001


@dataclass(frozen=True)
class Candidate:
    """A plan that was built beside others: how it was found, its ``layers`` in FP32, its time.

    ``score`` and ``passed`` are of the engine on the given inputs. ``latency_ms`` is None where it
    was not timed, as of a plan that is wrong. ``chosen`` marks the answer.
    """

    name: str
    layers: tuple[str, ...]
    score: float
    passed: bool
    latency_ms: float | None
    chosen: bool


@dataclass(frozen=True)
class ChoiceTimes:
    """The times of a choice's engine in ms, from rounds in which engines took turns.

    ``graph_ms`` is the median replay of a captured CUDA graph, None where none can be captured;
    ``plain_ms`` is that of single enqueues. ``spread_ms`` lies between the quartiles of the former,
    or of the latter where there is no graph.
    """

    name: str
    graph_ms: float | None
    plain_ms: float
    spread_ms: float
