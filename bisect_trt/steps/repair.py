"""Repairs the graph, and proves by running that the repaired one computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import onnx

from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.limits import give_back
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.cache import content_key
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.cautions import cautions
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import proto_digest
from bisect_trt.model.lost_constants import weight_findings
from bisect_trt.model.roundings import list_movers
from bisect_trt.model.tensor_types import complaint_of
from bisect_trt.model.walk import replace_nodes, tensors_read
from bisect_trt.repair.edits import (
    LARGEST_FP16,
    Edit,
    Range,
    Ranges,
    Refusal,
    Rule,
    beginning,
    origins_of,
)
from bisect_trt.repair.exponents import range_of
from bisect_trt.repair.rules import PROPOSE, Edited, edited
from bisect_trt.runners.concurrency import Headroom, side_by_side
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.reference import Reference
from bisect_trt.steps.context import Context
from bisect_trt.steps.fp32_proof import (
    RANGED_INPUTS,
    Change,
    fp32_change,
    probes_of,
    scaled,
    taken_by,
)
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.samples import SEARCH_STREAM, perturbs

Measured = TypeVar("Measured")

PERTURBED_INPUTS = 16
"""Perturbed inputs on which the repaired graph is compared with the original."""

JUDGED_INPUTS = 12
"""Given and perturbed inputs on which the repaired graph is run reduced."""

FACTORS = (2.0, 4.0, 8.0)
"""Factors on the inputs at which the headroom is measured."""

MIN_HEADROOM = 2.0
"""A repaired graph must stand inputs this many times as large as those given."""

MIN_GAIN = 0.8
"""A repair helps if it makes the score smaller than this part of what it was."""


ENOUGH = 0.7
"""A score that leaves room for other inputs: no edit is made to lower it further."""


@dataclass(frozen=True, order=True)
class Error:
    """How many inputs everything reduced misses, and its worst score."""

    missed: int
    score: float

    def helps(self, other: Error) -> bool:
        """Whether this is clearly less than ``other``, which is not small enough itself."""
        if other.missed == 0 and other.score <= ENOUGH:
            return False
        if self.missed != other.missed:
            return self.missed < other.missed
        return self.score < MIN_GAIN * other.score


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A repaired graph and what proves it.

    ``refused`` are proposals that were not made or were taken back. ``original`` and ``repaired``
    say how wrong everything reduced is on the ``tried`` inputs, ``without`` how wrong it is without
    a rule's edits, ``change`` what the edits change in FP32. ``headroom`` is the factor on the
    inputs up to which the repair holds. ``before`` and ``after`` are the ranges of the tensors.
    """

    graph: Graph
    edits: tuple[Edit, ...]
    refused: tuple[Refusal, ...]
    original: Error
    repaired: Error
    without: Mapping[Rule, Error]
    tried: int
    change: Change
    headroom: float
    before: Ranges
    after: Ranges

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that edits were made by, in their order."""
        return tuple(dict.fromkeys(edit.rule for edit in self.edits))

    @property
    def kept(self) -> frozenset[str]:
        """The layers of the repaired graph that edits keep in FP32."""
        return frozenset(name for edit in self.edits for name in edit.kept)


@dataclass(frozen=True)
class Refused:
    """No repair was made, and why; ``is_right`` where everything reduced needs none."""

    refused: tuple[Refusal, ...] = ()
    is_right: bool = False


def find_repair(problem: Problem, context: Context, rules: Collection[Rule]) -> Repair | Refused:
    """The edits among ``rules`` that make everything reduced less wrong, proved on inputs.

    Raises:
        RunnerFailedError: the original graph cannot be run on an input.
    """
    context.observer.step("repair")
    context.make_room()
    found = _Prover(problem, context).best(rules)
    if isinstance(found, Refused) or not (reason := _why_not_written(problem, found.graph)):
        return found
    taken = (Refusal(edit.rule, edit.nodes, reason) for edit in found.edits)
    return Refused((*found.refused, *taken))


def _why_not_written(problem: Problem, graph: Graph) -> str:
    """Why the model with the repaired ``graph`` must not be written; empty if it may be."""
    whole = whole_of(problem, graph)
    if whole is None:
        return "the rest of the model reads inner tensors of the judged part"
    complaint = complaint_of(whole.proto)
    if complaint and not complaint_of(problem.whole.proto):
        return f"ONNX's own check refuses the repaired model: {complaint}"
    return ""


def repaired_problem(problem: Problem, found: Repair) -> Problem:
    """``problem`` with the repaired graph, and its kept layers in FP32.

    The original stays the reference.
    """
    whole = whole_of(problem, found.graph)
    assert whole is not None, "find_repair refuses what cannot be put back"
    repaired = problem_on(problem, found.graph, whole)
    return replace(repaired, held_pins=repaired.held_pins | found.kept)


def problem_on(problem: Problem, graph: Graph, whole: Graph) -> Problem:
    """``problem`` with a repaired ``graph``, the judged part of ``whole``."""
    settings, original = problem.settings, problem.graph
    of_graph = {*cautions(original), *weight_findings(original, settings.precision)}
    findings = [finding for finding in problem.findings if finding not in of_graph]
    findings += [*cautions(graph), *weight_findings(graph, settings.precision)]
    digest = content_key(problem.model.digest, proto_digest(graph.proto))
    return replace(
        problem,
        settings=replace(settings, repair="none", weights="nearest"),
        model=replace(problem.model, proto=whole.proto, digest=digest, written_out=False),
        graph=graph,
        whole=whole,
        layers=graph.layers_at(settings.precision),
        golden=None,
        held_pins=_carried(graph, problem.held_pins),
        kept_reduced=_carried(graph, problem.kept_reduced),
        source_fp32=_carried(graph, problem.source_fp32),
        unsupported=_carried(graph, problem.unsupported),
        older=None,
        begin=frozenset(),
        marked=None if problem.marked is None else _carried(graph, problem.marked),
        findings=tuple(findings),
    )


def repair_alone(problem: Problem, context: Context, rules: Collection[Rule]) -> Repair | Refused:
    """As :func:`find_repair`, where everything reduced misses a given input."""
    check_fp16(problem, "the graph is repaired")
    context.observer.step("baselines")
    if context.evaluator.evaluate(problem.base).verdict.passed:
        return Refused(is_right=True)
    return find_repair(problem, context, rules)


def check_fp16(problem: Problem, what: str) -> None:
    """Refuse another precision than FP16; ``what`` says what is done in that alone.

    Raises:
        BadInputError: names the model.
    """
    precision = problem.settings.precision
    if precision is not Precision.FP16:
        raise BadInputError(
            f"{problem.model.name}: {what} only for FP16, and its precision is "
            f"{precision.value.upper()}"
        )


def whole_of(problem: Problem, graph: Graph) -> Graph | None:
    """The whole model with the repaired ``graph`` in place of its judged part.

    None where the rest reads inner tensors of that part, whose values may be others now.
    """
    if not problem.judged:
        return graph
    part, whole = problem.graph.proto.graph, problem.whole.proto.graph
    made = {name for node in part.node for name in node.output if name}
    behind, read = _behind(problem), read_behind(problem)
    constants = {n.output[0] for n in part.node if n.op_type == "Constant"}
    if not (read & made) <= {*problem.judged, *constants}:
        return None
    model = onnx.ModelProto()
    model.CopyFrom(graph.proto)
    present = {t.name for t in model.graph.initializer}
    present |= {name for node in model.graph.node for name in node.output}
    lost = [n for n in part.node if n.op_type == "Constant" and n.output[0] in read - present]
    replace_nodes(model.graph, [*lost, *model.graph.node, *behind])
    model.graph.initializer.extend(
        t for t in whole.initializer if t.name in read and t.name not in present
    )
    del model.graph.output[:]
    model.graph.output.extend(whole.output)
    return replace(problem.whole, proto=model)


def _behind(problem: Problem) -> list[onnx.NodeProto]:
    """The whole model's nodes that are not in the judged part."""
    part = problem.graph.proto.graph
    made = {name for node in part.node for name in node.output if name}
    return [n for n in problem.whole.proto.graph.node if made.isdisjoint(n.output)]


def read_behind(problem: Problem) -> set[str]:
    """The tensors that the rest of the model reads; none where all of it is judged."""
    if not problem.judged:
        return set()
    return {name for node in _behind(problem) for name in tensors_read(node)}


def _carried(graph: Graph, names: Collection[str]) -> frozenset[str]:
    """The layers of a repaired graph that are among ``names`` or stand for one of them."""
    nodes = graph.proto.graph.node
    return frozenset(
        layer.name
        for layer in graph.layers
        if layer.name in names or not set(names).isdisjoint(origins_of(nodes[layer.index]))
    )


class _Prover:
    """Runs graphs on the inputs of a proof; measures each at most once."""

    def __init__(self, problem: Problem, context: Context) -> None:
        self._problem, self._context = problem, context
        self._start = beginning(problem.graph)
        self._given = list(problem.samples)
        self._perturbed = list(
            perturbs(problem, context, SEARCH_STREAM, PERTURBED_INPUTS, emulated=True)
        )
        half = JUDGED_INPUTS // 2
        self._judged = [*evenly(self._given, half), *self._perturbed[:half]]
        self._check_time = context.time.check
        self._threads = problem.settings.threads or 0
        self._rounds = 0
        self._known: dict[tuple[Rule, ...], Edited] = {}
        self._digests: dict[Graph, str] = {}

    def best(self, rules: Collection[Rule]) -> Repair | Refused:
        """Everything that ``rules`` propose, less what harms or does nothing."""
        found = self._edited(rules)
        refused = list(found.refusals)
        found, taken_back = self._provable(found)
        refused += taken_back
        found, taken_back, errors_without = self._needed(found)
        refused += taken_back
        if not found.edits:
            return Refused(tuple(refused))
        original, repaired = self._error(self._edited(())), self._error(found)
        headroom = self._headroom(found, repaired.score)
        if repaired.score <= 1.0 and headroom < MIN_HEADROOM:
            reason = f"it fails on inputs {MIN_HEADROOM:g} times as large"
            return Refused((*refused, *_taken_back(found.edits, reason)))
        return Repair(
            graph=found.graph,
            edits=found.edits,
            refused=tuple(refused),
            original=original,
            repaired=repaired,
            without=errors_without,
            tried=len(self._judged),
            change=self._change(found.graph),
            headroom=headroom,
            before=self._ranges(self._start),
            after=found.ranges,
        )

    def _edited(self, rules: Collection[Rule]) -> Edited:
        key = tuple(rule for rule in PROPOSE if rule in rules)
        if key not in self._known:
            found = edited(self._start, key, self._ranges)
            self._known[key] = _unless_reduced(found, self._problem.kept_reduced)
            give_back()  # what the rules have read of the weights
        return self._known[key]

    def _provable(self, found: Edited) -> tuple[Edited, list[Refusal]]:
        """``found`` without the rules whose edits change FP32's outputs."""
        refused = list[Refusal]()
        while found.edits and not (change := self._change(found.graph)).is_exact:
            reason = (
                f"it changes an FP32 output by {change.share:.3g} of its largest value on "
                f"{change.where}"
            )
            without = (self._edited(rules) for rules in self._without_one(_rules_of(found)))
            less = next((e for e in without if self._change(e.graph).is_exact), self._edited(()))
            kept = _rules_of(less)
            refused += _taken_back((e for e in found.edits if e.rule not in kept), reason)
            found = less
        return found, refused

    @staticmethod
    def _without_one(rules: Sequence[Rule]) -> Iterator[list[Rule]]:
        return ([r for r in rules if r is not left_out] for left_out in reversed(rules))

    def _needed(self, found: Edited) -> tuple[Edited, list[Refusal], dict[Rule, Error]]:
        """``found`` without the rules that do not make everything reduced less wrong.

        The errors are those without each rule that stays. A guard stays beside any other rule: it
        is for inputs that are 0, which the judged ones may not be.
        """
        refused, errors_without = list[Refusal](), dict[Rule, Error]()
        rules = _rules_of(found)[::-1]
        # The guard is the last to be judged, when it is known whether others stay.
        for rule in sorted(rules, key=lambda rule: rule is Rule.EPSILON):
            less = self._edited([r for r in _rules_of(found) if r is not rule])
            with_it, without = self._error(found), self._error(less)
            is_guard = rule is Rule.EPSILON and less.edits and not without.helps(with_it)
            if not is_guard and not with_it.helps(without):
                edits = (e for e in found.edits if e.rule is rule)
                refused += _taken_back(edits, "without it the error is as small")
                found = less
            else:
                errors_without[rule] = without
        return found, refused, errors_without

    def _beyond(self, found: Edited, samples: Sequence[Sample] = ()) -> int:
        """How many reduced tensors leave FP16's range on ``samples``, or on the given inputs."""
        exact = {
            t for layer in found.graph.layers if layer.name in found.kept for t in layer.outputs
        }
        ranges = self._ranges(found.graph, samples).items()
        return sum(r.largest > LARGEST_FP16 for tensor, r in ranges if tensor not in exact)

    def _ranges(self, graph: Graph, given: Sequence[Sample] = ()) -> dict[str, Range]:
        """The FP32 range of each tensor that can be reduced, and of the inputs."""
        key = [str(bool(given)), *(sample.digest for sample in given or self._given)]
        measured = self._recalled(
            "ranges",
            graph,
            key,
            lambda: {t: asdict(r) for t, r in self._ranges_now(graph, given).items()},
        )
        return {tensor: Range(**numbers) for tensor, numbers in measured.items()}

    def _ranges_now(self, graph: Graph, given: Sequence[Sample]) -> dict[str, Range]:
        found: dict[str, Range] = {}
        samples = evenly(given or self._given, RANGED_INPUTS)
        doubled = [] if given else [scaled(s, 2.0) for s in evenly(self._given, RANGED_INPUTS // 2)]
        each = self._observed(graph, [*samples, *doubled])
        for tensor, now in chain.from_iterable(islice(each, len(samples))):
            found[tensor] = now if tensor not in found else now.joined(found[tensor])
        for tensor, now in chain.from_iterable(each):
            if tensor in found:
                reach = max(found[tensor].reach, now.largest)
                found[tensor] = replace(found[tensor], reach=reach)
        return found

    def _observed(
        self, graph: Graph, samples: Sequence[Sample]
    ) -> Iterator[list[tuple[str, Range]]]:
        """The FP32 range of each tensor, for each of ``samples``."""
        precision = self._problem.settings.precision
        runner = _runner_of(graph, precision, self._threads)
        headroom = Headroom(graph, self._threads)
        self._rounds += 1

        def ranges(sample: Sample) -> list[tuple[str, Range]]:
            self._check_time()
            found = []
            inputs = ((n, a) for n, a in sample.arrays.items() if a.dtype == np.float32)
            made = ((tensor, values) for _, tensor, values in runner.exact(sample, precision))
            with suppress(RunnerFailedError):  # the model does not take inputs twice as large
                for name, values in chain(inputs, made):
                    if (observed := range_of(values)) is not None:
                        found.append((name, observed))
            return found

        # The first one opens the sessions of the nodes, which the others share.
        rest = side_by_side(ranges, samples[1:], headroom.at_once)
        for number, found in enumerate(chain(map(ranges, samples[:1]), rest)):
            self._context.observer.progress(number, len(samples), f"ranges, round {self._rounds}")
            yield found

    def _plan(self, graph: Graph, kept: frozenset[str] = frozenset()) -> PrecisionPlan:
        problem = self._problem
        precision = problem.settings.precision
        movers = list_movers(graph, precision).apart_from(_carried(graph, problem.kept_reduced))
        held = _carried(graph, problem.held_pins) | kept
        return PrecisionPlan(precision, held=held, movers=movers)

    def _error(self, found: Edited) -> Error:
        """How wrong everything reduced is on given and perturbed inputs."""

        def measured() -> list[float]:
            self._context.references.make_ready(self._judged, self._check_time)
            references = [self._context.references.of(sample) for sample in self._judged]
            return list(self._scores(found, self._judged, references))

        parts = [s.digest for s in self._judged]
        scores = self._recalled("errors", found.graph, parts, measured, found.kept)
        return Error(sum(not s <= 1.0 for s in scores), max(scores))

    def _recalled(
        self,
        what: str,
        graph: Graph,
        parts: Sequence[str],
        compute: Callable[[], Measured],
        kept: frozenset[str] = frozenset(),
    ) -> Measured:
        """What ``compute`` measures of ``graph``, or has measured in an earlier run."""
        if graph not in self._digests:
            self._digests[graph] = proto_digest(graph.proto)
        plan = self._plan(graph, kept).digest
        key = [self._digests[graph], plan, *parts]

        def computed() -> Measured:
            answer = compute()
            give_back()  # each measurement opens sessions of its own, which hold the weights
            return answer

        return self._context.recalled(f"repair-{what}", key, computed)

    def _scores(
        self, found: Edited, samples: Sequence[Sample], references: Sequence[Arrays]
    ) -> Iterator[float]:
        precision, requirements = self._problem.settings.precision, self._problem.requirements
        runner = _runner_of(found.graph, precision, self._threads)
        plan = self._plan(found.graph, found.kept)
        left = list(zip(samples, references, strict=True))
        while left:
            outputs = runner.outputs(plan, [sample for sample, _ in left])
            try:
                for candidate in outputs:
                    self._check_time()
                    yield requirements.judge(left.pop(0)[1], candidate).score
            except RunnerFailedError:  # such as an index that became NaN
                left.pop(0)
                yield math.inf

    def _headroom(self, found: Edited, score: float) -> float:
        """The largest factor on the inputs that the repaired graph takes.

        At a larger one an output is not finite, or misses because a tensor leaves the range that
        does not on the given inputs. Inputs that FP32 does not take are left out.
        """
        parts = [repr(score), *(sample.digest for sample in self._given)]
        return self._recalled(
            "headroom", found.graph, parts, lambda: self._headroom_now(found, score), found.kept
        )

    def _headroom_now(self, found: Edited, score: float) -> float:
        limit = max(1.0, 2.0 * score)
        # The repaired graph's own FP32 is right where the original's may not be.
        exact = Reference(found.graph, threads=self._threads)
        headroom = 1.0
        for factor in FACTORS:
            samples = [scaled(s, factor) for s in self._given[:RANGED_INPUTS]]
            taken = list(taken_by(exact, samples))
            scores = list(self._scores(found, [s for s, _ in taken], [o for _, o in taken]))
            worst = max(scores, default=0.0)
            if math.isinf(worst):
                break
            # A network that is sensitive to rounding is not to blame.
            if worst > limit and self._beyond(found, samples) > self._beyond(found):
                break
            headroom = factor
        exact.release()
        return headroom

    def _change(self, graph: Graph) -> Change:
        def measured() -> tuple[float, float, str]:
            probes = probes_of(self._given, self._perturbed)
            original = self._problem.graph
            return astuple(fp32_change(original, graph, probes, self._threads, self._check_time))

        parts = [sample.digest for sample in (*self._given, *self._perturbed)]
        return Change(*self._recalled("change", graph, parts, measured))


def _runner_of(graph: Graph, precision: Precision, threads: int) -> EmulatedRunner:
    """An emulator of ``graph`` that leaves nothing behind: what is derived holds the weights."""
    return EmulatedRunner(replace(graph), precision, threads=threads)


def _rules_of(found: Edited) -> list[Rule]:
    made = {edit.rule for edit in found.edits}
    return [rule for rule in PROPOSE if rule in made]


def _unless_reduced(found: Edited, kept_reduced: frozenset[str]) -> Edited:
    """``found`` without the edits that keep a layer in FP32 which the user keeps reduced."""
    edits = tuple(e for e in found.edits if kept_reduced.isdisjoint(e.kept))
    refusals = (
        Refusal(e.rule, e.nodes, "--keep-reduced names one of its layers")
        for e in found.edits
        if not kept_reduced.isdisjoint(e.kept)
    )
    return replace(found, edits=edits, refusals=(*found.refusals, *refusals))


def _taken_back(edits: Iterable[Edit], reason: str) -> list[Refusal]:
    return [Refusal(edit.rule, edit.nodes, f"taken back: {reason}") for edit in edits]
