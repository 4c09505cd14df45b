"""Other ways to build a model that an engine gets wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import BudgetSpentError, Observer, TimeBudget
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan, Subgraph
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.patterns import nodes_alike
from bisect_trt.model.typed import mark_outputs, to_typed
from bisect_trt.reduction.oracle import Budget, EngineTrials, Observation, Specimen
from bisect_trt.reduction.reduce import fresh_engines, model_and_samples, tensorrt_trials
from bisect_trt.runners.reference import outputs_of
from bisect_trt.runners.tensorrt.records import AS_USUAL, EngineOptions
from bisect_trt.search.find import find_pins
from bisect_trt.settings import Settings

OpenTrials = Callable[[EngineOptions], EngineTrials]
"""Opens the trials of an engine that is built and run in some way; they share one budget."""

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Cure:
    """One thing tried, and whether the model is right and reproducible with it.

    ``how`` is what to do, ``marks`` the tensors that become outputs, ``model`` what is then built,
    typed; None without marks. ``latency_ms`` and ``engine_bytes`` are NaN and 0
    where nothing could be built.
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
    """What was ``tried`` in order, the first the model as it is.

    ``complete`` is false where the builds were spent, or the user ended the search
    (``interrupted``).
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
        """What to ship: the fewest marks that work, else whatever works."""
        works = [cure for cure in self.tried[1:] if cure.works]
        marked = [cure for cure in works if cure.marks]
        return min(marked, key=lambda c: len(c.marks)) if marked else next(iter(works), None)


class _Search:
    """Tries cures on one model, on several samples."""

    def __init__(
        self, graph: Graph, samples: Sequence[Sample], opens: OpenTrials, observer: Observer
    ) -> None:
        self._graph, self._opens, self._observer = graph, opens, observer
        self._cases = [(s, outputs_of(graph.proto, s.arrays, s.name)) for s in samples]
        self.marks_unfinished = False

    def run(self, suspects: Sequence[str]) -> Iterator[Cure]:
        """Every cure in turn; those of a right model are none."""
        first = self._tried(AS_IT_IS, "")
        yield first
        if first.works:
            return
        for name, how, options in _options():
            yield self._tried(name, how, options=options)
        layers = self._graph.layers
        inner = [t for la in layers for t in la.outputs if t not in self._graph.outputs]
        # Where one block goes wrong, those like it may: marks in it alone need not be enough.
        alike = set(nodes_alike(self._graph, suspects))
        near = [t for la in layers if la.name in alike for t in la.outputs if t in inner]
        found = self._fewest_marks(near) if near else None
        if found is None and not self.marks_unfinished and len(near) < len(inner):
            found = self._fewest_marks(inner)
        if found is not None:
            yield found

    def _tried(
        self,
        name: str,
        how: str,
        *,
        options: EngineOptions = AS_USUAL,
        marks: tuple[str, ...] = (),
    ) -> Cure:
        """What one cure shows, on every sample until one is bad."""
        proto = mark_outputs(self._graph.proto, marks) if marks else self._graph.proto
        trials = self._opens(options)
        whole, seen = Subgraph(frozenset(self._graph.names)), Observation()
        for sample, expected in self._cases:
            found = trials.look(Specimen(whole, proto, sample, expected))
            seen = _added(seen, found)
            if found.suspect is not None:
                break
        cure = Cure(
            name,
            how,
            seen,
            latency_ms=float(trials.facts.get("latency_ms", float("nan"))),
            engine_bytes=int(trials.facts.get("engine_bytes", 0)),
            marks=marks,
            model=to_typed(proto, PrecisionPlan(trials.precision)) if marks else None,
        )
        word = "right and reproducible" if cure.works else str(seen.suspect or "not run")
        self._observer.progress(trials.budget.spent, 0, f"{name}: {word}")
        return cure

    def _fewest_marks(self, candidates: Sequence[str]) -> Cure | None:
        """The smallest set of ``candidates`` that works as further outputs, if all of them do."""
        known: dict[frozenset[str], Cure] = {}

        def verdict(marks: frozenset[str]) -> Verdict:
            if not marks:
                return Verdict.FAIL
            names = tuple(n for n in candidates if n in marks)
            name = f"{len(names)} more output{'s' if len(names) > 1 else ''}"
            how = f"make {', '.join(map(repr, names))} outputs, which the application may ignore"
            known[marks] = self._tried(name, how, marks=names)
            return Verdict.PASS if known[marks].works else Verdict.FAIL

        found = find_pins(candidates, verdict)
        self.marks_unfinished = not found.complete
        return known.get(found.pinned) if found.feasible else None


def try_cures(
    graph: Graph,
    samples: Sequence[Sample],
    suspects: Sequence[str],
    opens: OpenTrials,
    observer: Observer,
) -> Cures:
    """Every cure on the whole model; tensors of ``suspects`` are marked first."""
    search = _Search(graph, samples, opens, observer)
    tried: list[Cure] = []
    try:
        for cure in search.run(suspects):
            tried.append(cure)
    except BudgetSpentError:
        return Cures(tuple(tried), False)
    except KeyboardInterrupt:
        return Cures(tuple(tried), False, interrupted=True)
    return Cures(tuple(tried), not search.marks_unfinished)


def _options() -> Iterator[tuple[str, str, EngineOptions]]:
    """Other ways to build and run the same model."""
    for level in (0, 1, 2, 4, 5):  # 3 is the builder's default
        how = f"config.builder_optimization_level = {level}"
        how += f" (trtexec --builderOptimizationLevel={level})"
        yield f"optimisation level {level}", how, EngineOptions(optimisation_level=level)
    how = "config.set_tactic_sources(0) (trtexec --tacticSources=-CUBLAS,-CUDNN,...)"
    yield "no tactic sources", how, EngineOptions(tactics=False)
    how = "runtime_config.cuda_graph_strategy = CudaGraphStrategy.DISABLED"
    yield "no CUDA graphs", how, EngineOptions(cuda_graphs=False)


def _added(one: Observation, other: Observation) -> Observation:
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
    """Every cure of the settings' model, tried on all its inputs."""
    if settings.runner not in ("auto", "tensorrt"):
        raise BadInputError(f"--runner {settings.runner}: cures are those of TensorRT's engines")
    graph, samples = model_and_samples(settings, observer)
    suspects = _nodes_of(subgraph, graph) if subgraph is not None else ()
    # Asked before anything is tried: without a GPU each cure would seem to have failed.
    fresh_engines(settings)(graph, samples).close()
    observer.step("cures")
    budget = Budget(settings.max_builds, TimeBudget(settings.budget))

    def opens(options: EngineOptions) -> EngineTrials:
        engines = fresh_engines(settings, options)
        return tensorrt_trials(engines, precision, budget, settings.workers)

    return try_cures(graph, samples, suspects, opens, observer)


def _nodes_of(subgraph: Path, graph: Graph) -> tuple[str, ...]:
    """The nodes of a reproducer that `bisect-trt reduce` wrote of the same model."""
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
