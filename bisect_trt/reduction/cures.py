"""Other ways to build a model that an engine gets wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx

from bisect_trt.base.errors import BadInputError, BisectError
from bisect_trt.base.interrupt import BudgetSpentError, Observer, TimeBudget
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan, Subgraph
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.layernorm import fuse_layernorm
from bisect_trt.model.patterns import nodes_alike
from bisect_trt.model.typed import mark_outputs, to_typed
from bisect_trt.reduction.oracle import (
    PROCESSES,
    Budget,
    EngineTrials,
    Observation,
    OpenRunner,
    Specimen,
)
from bisect_trt.reduction.reduce_model import fresh_engines, model_and_samples
from bisect_trt.runners.reference import outputs_of
from bisect_trt.runners.tensorrt.records import AS_USUAL, EngineOptions
from bisect_trt.search.find import find_pins
from bisect_trt.settings import Settings

OpenWith = Callable[[EngineOptions], OpenRunner]
"""What opens a runner of a model that is built and run in some way."""

LEVELS = (0, 1, 2, 4, 5)
"""The builder's optimisation levels beside its default, which is 3."""

OPSETS = (18, 21, 23)

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Cure:
    """One thing tried. ``how`` is what to do, ``marks`` the tensors that become outputs, ``model``
    what is then built, typed; None where it is the model as it is.

    ``seen`` says whether it is right and reproducible, ``latency_ms`` and ``engine_bytes`` what it
    costs, NaN and 0 where nothing could be built.
    """

    name: str
    how: str
    seen: Observation
    latency_ms: float
    engine_bytes: int
    marks: tuple[str, ...] = ()
    model: onnx.ModelProto | None = None

    @property
    def works(self) -> bool:
        """Whether every run in every process was right and reproducible."""
        return self.seen.runs > 0 and self.seen.suspect is None


@dataclass(frozen=True)
class Cures:
    """``tried`` in order, the first the model as it is; ``complete`` is false where the builds were
    spent, or the search was ``interrupted``. ``smallest`` is what to ship, None where nothing
    works.
    """

    tried: tuple[Cure, ...]
    complete: bool
    interrupted: bool = False

    @property
    def needed(self) -> bool:
        """Whether the model as it is needs one, or may: nothing may have been tried."""
        return not (self.tried and self.tried[0].works)

    @property
    def smallest(self) -> Cure | None:
        """The fewest marks of those that are a model to ship; else whatever works."""
        works = [cure for cure in self.tried[1:] if cure.works]
        marked = [cure for cure in works if cure.marks]
        return min(marked, key=lambda c: len(c.marks)) if marked else next(iter(works), None)


class _Ward:
    """Tries cures on one model, on several samples."""

    def __init__(
        self,
        graph: Graph,
        samples: Sequence[Sample],
        opens: OpenWith,
        budget: Budget,
        workers: int,
        observer: Observer,
        processes: int,
    ) -> None:
        self._graph, self._samples, self._opens = graph, samples, opens
        self._budget, self._workers, self._observer = budget, workers, observer
        self._processes = processes
        self._whole = Subgraph(frozenset(graph.names))
        self._expected = [outputs_of(graph.proto, s.arrays, s.name) for s in samples]
        self.cut_short = False

    def tried(
        self,
        name: str,
        how: str,
        precision: Precision,
        model: onnx.ModelProto | None = None,
        options: EngineOptions = AS_USUAL,
        marks: tuple[str, ...] = (),
    ) -> Cure:
        """What one cure shows, on every sample until one is bad."""
        proto = self._graph.proto if model is None else model
        explained = Precision.TF32 if precision is Precision.FP32 else precision
        seen, latency, size = Observation(), float("nan"), 0
        for sample, expected in zip(self._samples, self._expected, strict=True):
            trials = EngineTrials(
                self._opens(options),
                precision,
                explained,
                self._budget,
                self._workers,
                self._processes,
            )
            found = trials.look(Specimen(self._whole, proto, sample, expected))
            seen = _both(seen, found)
            latency = float(trials.facts.get("latency_ms", latency))
            size = int(trials.facts.get("engine_bytes", size))
            if found.suspect is not None:
                break
        typed = None if model is None else to_typed(Graph(proto), PrecisionPlan(precision))
        cure = Cure(name, how, seen, latency, size, marks, typed)
        word = "right and reproducible" if cure.works else str(seen.suspect or "not run")
        self._observer.progress(self._budget.spent, 0, f"{name}: {word}")
        return cure

    def marked(self, candidates: Sequence[str], precision: Precision) -> Cure | None:
        """The smallest set of ``candidates`` that works as further outputs; None if not even all of
        them do. ``cut_short`` is true from then on if the builds were spent before it was found.
        """
        known: dict[frozenset[str], Cure] = {}

        def verdict(marks: frozenset[str]) -> Verdict:
            if not marks:
                return Verdict.FAIL
            names = tuple(n for n in candidates if n in marks)
            listed = f"{len(names)} more output{'s' if len(names) > 1 else ''}"
            how = f"make {', '.join(map(repr, names))} outputs, which the application may ignore"
            model = mark_outputs(self._graph.proto, names)
            known[marks] = self.tried(listed, how, precision, model, marks=names)
            return Verdict.PASS if known[marks].works else Verdict.FAIL

        found = find_pins(candidates, verdict)
        self.cut_short = not found.complete
        return known[found.pinned] if found.feasible and found.pinned in known else None


def try_cures(
    graph: Graph,
    samples: Sequence[Sample],
    precision: Precision,
    suspects: Sequence[str],
    opens: OpenWith,
    budget: Budget,
    observer: Observer,
    workers: int = 1,
    processes: int = PROCESSES,
) -> Cures:
    """Every cure on the whole model.

    Raises:
        BadInputError: ONNX Runtime cannot run the model.
    """
    ward = _Ward(graph, samples, opens, budget, workers, observer, processes)
    tried: list[Cure] = []
    try:
        for cure in _in_turn(ward, graph, precision, suspects):
            tried.append(cure)
            if len(tried) == 1 and cure.works:
                break
    except BudgetSpentError:
        return Cures(tuple(tried), False)
    except KeyboardInterrupt:
        return Cures(tuple(tried), False, interrupted=True)
    return Cures(tuple(tried), not ward.cut_short)


def _in_turn(
    ward: _Ward, graph: Graph, precision: Precision, suspects: Sequence[str]
) -> Iterator[Cure]:
    yield ward.tried(AS_IT_IS, "", precision)
    for name, how, options in _builds():
        yield ward.tried(name, how, precision, options=options)
    for other in Precision:
        if other is not precision:
            how = f"build it in {other.value}"
            yield ward.tried(f"in {other.value.upper()}", how, other, graph.proto)
    for name, how, model in _forms(graph):
        yield ward.tried(name, how, precision, model)
    floats = [tensor for layer in graph.layers for tensor in layer.outputs]
    inner = [t for t in floats if t not in graph.outputs]
    # Where one block goes wrong, those like it may: marks in it alone need not be enough.
    alike = set(nodes_alike(graph, suspects))
    near = [t for layer in graph.layers if layer.name in alike for t in layer.outputs if t in inner]
    found = ward.marked(near, precision) if near else None
    if found is None and not ward.cut_short and len(near) < len(inner):
        found = ward.marked(inner, precision)
    if found is not None:
        yield found


def _builds() -> Iterator[tuple[str, str, EngineOptions]]:
    """Other ways to build and run the same model."""
    for level in LEVELS:
        yield (
            f"optimisation level {level}",
            f"config.builder_optimization_level = {level} (trtexec "
            f"--builderOptimizationLevel={level})",
            replace(AS_USUAL, optimisation_level=level),
        )
    yield (
        "no tactic sources",
        "config.set_tactic_sources(0) (trtexec --tacticSources=-CUBLAS,-CUDNN,...)",
        replace(AS_USUAL, tactics=False),
    )
    yield (
        "no CUDA graphs",
        "runtime_config.cuda_graph_strategy = CudaGraphStrategy.DISABLED",
        replace(AS_USUAL, cuda_graphs=False),
    )


def _forms(graph: Graph) -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """The same model written otherwise, as far as that can be done."""
    for target in OPSETS:
        if target <= graph.opset:
            continue
        try:
            yield f"opset {target}", f"convert it to opset {target}", graph.raised(target).proto
        except BisectError:
            continue
    try:
        yield "LayerNorms as one operator", "--rewrite layernorm", fuse_layernorm(graph.proto).model
    except BisectError:
        return


def _both(one: Observation, other: Observation) -> Observation:
    """What was seen on two samples, as many processes each."""
    return replace(
        other,
        processes=max(one.processes, other.processes),
        runs=one.runs + other.runs,
        wrong=one.wrong + other.wrong,
        worst=max(one.worst, other.worst),
        differing=one.differing + other.differing,
    )


def cure_model(
    settings: Settings, precision: Precision, subgraph: Path | None, observer: Observer
) -> Cures:
    """Every cure of the settings' model, tried on all its inputs.

    Raises:
        BadInputError: names the file, tensor or option that cannot be used.
        RunnerUnavailableError: no engine can run on this machine.
    """
    if settings.runner not in ("auto", "tensorrt"):
        raise BadInputError(f"--runner {settings.runner}: cures are those of TensorRT's engines")
    graph, samples = model_and_samples(settings, observer)
    suspects = _nodes_of(subgraph, graph) if subgraph is not None else ()
    # Asked before anything is tried: without a GPU each cure would be told to have failed.
    fresh_engines(settings)(graph, samples).close()
    observer.step("cures")

    budget = Budget(settings.max_builds, TimeBudget(settings.budget))
    opens, workers = partial(fresh_engines, settings), settings.workers
    return try_cures(graph, samples, precision, suspects, opens, budget, observer, workers)


def _nodes_of(subgraph: Path, graph: Graph) -> tuple[str, ...]:
    record = subgraph / "reduce.json"
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        nodes = tuple(str(node["name"]) for node in found["nodes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"--subgraph {subgraph}: no reproducer of `bisect-trt reduce` ({record.name} "
            "cannot be read)"
        ) from error
    unknown = sorted(set(nodes).difference(graph.names))
    if unknown:
        raise BadInputError(
            f"--subgraph {subgraph}: its node {unknown[0]!r} is not in the model; reduce this model"
        )
    return nodes
