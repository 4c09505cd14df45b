"""Layers that an engine does not take at the reduced precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Finding, Verdict
from bisect_trt.runners.base import UNSUPPORTED
from bisect_trt.search import find_pins
from bisect_trt.steps.context import Context
from bisect_trt.steps.engine_baselines import EngineBaselines
from bisect_trt.steps.problem import Problem

_UNSUPPORTED_SHOWN = 4


def keeping_unsupported(
    problem: Problem, context: Context, engine: EngineBaselines
) -> Problem | None:
    """``problem`` with the layers held in FP32 for whose sake the engine of everything reduced
    could not be had; None where it could, or nobody named them. Which layers do harm is another
    matter, that nothing tells before they are out of the way.

    Raises:
        BadInputError: such a layer was asked to be reduced.
    """
    if engine.base.worst or engine.diagnosis is not None:
        return None
    named = frozenset(engine.base.facts.get(UNSUPPORTED, ()))
    unsupported, asked_for = named.intersection(problem.names), named & problem.kept_reduced
    precision = problem.settings.precision.value.upper()
    if asked_for:
        raise BadInputError(
            f"--keep-reduced: the engine does not take {min(asked_for)!r} in {precision} "
            f"({engine.base.note}); leave it out"
        )
    if not unsupported:
        return None
    said = some_of(sorted(unsupported), _UNSUPPORTED_SHOWN)
    told = f"the engine does not take {said} in {precision}, so it stays in FP32 from the start"
    context.note(Finding("held", min(unsupported), f"{told} ({engine.base.note})"))
    return replace(
        problem,
        held_pins=problem.held_pins | unsupported,
        unsupported=problem.unsupported | unsupported,
    )


_TRIED_SHOWN = 4
_MOST = 16
"""Builds, where nobody says: of twenty operators one is found by five or six, and its layer among
thirty by as many."""
_BASELINES = 2
"""Evaluations of a search that cost no build: of no pins and of all, whose engines are known."""


def unsupported_by_trial(
    problem: Problem, context: Context, engine: EngineBaselines | None
) -> Problem | None:
    """``problem`` with the layers held in FP32 without which the engine of everything reduced is
    had: operators first, then layers of theirs. None where it was had, nothing but everything does,
    or the builds were spent before.
    """
    if engine is None or engine.base.worst or engine.diagnosis is not None:
        return None
    # A crash may have been a chance, and would hold innocent layers for good.
    broken = engine.base.verdict is Verdict.BUILD_FAILED
    if context.engine is None or not broken or not engine.fp32.worst or problem.kept_reduced:
        return None
    context.observer.step("engine: layers that it does not take")
    allowed = problem.settings.max_builds
    most = allowed if allowed is not None else _MOST
    trial = _Trial(problem, context, engine.base.note, most)
    by_op: dict[str, list[str]] = {}
    for layer in problem.layers:
        if layer.name in problem.names:
            by_op.setdefault(layer.op, []).append(layer.name)
    ops = trial.find(by_op) or frozenset(by_op)
    names = [name for op in by_op if op in ops for name in by_op[op]]
    unsupported = trial.find({name: [name] for name in names}) or frozenset(names)
    if len(unsupported) == len(problem.names):
        return None
    said = some_of([f"'{name}'" for name in names if name in unsupported], _TRIED_SHOWN)
    precision = problem.settings.precision.value.upper()
    more = "" if trial.complete else ", too few: some of them may not need it"
    stays = "it stays" if len(unsupported) == 1 else "they stay"
    context.note(
        Finding(
            "held",
            min(unsupported),
            f"the engine does not take {said} in {precision}, so {stays} in FP32 from the start; "
            f"found by trial (engines built: {trial.builds}{more}), since it names no layer "
            f"({engine.base.note})",
        )
    )
    return replace(
        problem,
        held_pins=problem.held_pins | unsupported,
        unsupported=problem.unsupported | unsupported,
    )


@dataclass
class _Trial:
    """Asks the engine which groups of layers keep it from being had.

    ``told`` is what the engine said: what it mentions is suspected first. ``builds`` counts the
    engines tried, ``most`` at most; ``complete`` is false where they did not suffice.
    """

    problem: Problem
    context: Context
    told: str
    most: int
    builds: int = field(default=0, init=False)
    complete: bool = field(default=True, init=False)

    def find(self, groups: Mapping[str, Sequence[str]]) -> frozenset[str]:
        """The groups that have to be held, none of which can be spared if the builds were enough;
        none where nothing smaller than all of them does.
        """
        if len(groups) == 1:
            return frozenset(groups)
        suspicion = {
            group: float(any(name in self.told for name in (group, *names)))
            for group, names in groups.items()
        }
        found = find_pins(
            list(groups),
            self._asking(groups),
            suspicion=suspicion if any(suspicion.values()) else None,
            max_probes=max(0, self.most - self.builds) + _BASELINES,
        )
        if self.context.time.left_s <= 0.0:  # which the search takes for the end of its builds
            raise BudgetSpentError
        self.complete = found.complete
        return found.pinned if len(found.pinned) < len(groups) else frozenset()

    def _asking(self, groups: Mapping[str, Sequence[str]]) -> Callable[[frozenset[str]], Verdict]:
        """Whether an engine is had with some groups in FP32: with none it is not, with all it is,
        or was where all of their operators were.
        """

        def had(pinned: frozenset[str]) -> Verdict:
            if not pinned:
                return Verdict.FAIL
            if len(pinned) == len(groups):
                return Verdict.PASS
            layers = frozenset(name for group in pinned for name in groups[group])
            self.context.tell(f"an engine with {counted(len(layers), 'layer')} in FP32")
            self.builds += 1
            assert self.context.engine is not None
            result = self.context.engine.evaluate(self.problem.base.with_pins(layers))
            return Verdict.PASS if result.worst else Verdict.BUILD_FAILED

        return had
