"""Tries other ways to build a model that an engine gets wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import BudgetSpentError, Observer, TimeBudget
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.outputs import mark_outputs
from bisect_trt.model.typed import to_typed
from bisect_trt.reduction.oracle import Budget, EngineTrials, Observation, Specimen
from bisect_trt.reduction.reduce import fresh_engines, model_and_samples, tensorrt_trials
from bisect_trt.runners.reference import outputs_of
from bisect_trt.runners.tensorrt.records import AS_USUAL, EngineOptions
from bisect_trt.search.find import find_pins
from bisect_trt.settings import Settings

OpenTrials = Callable[[EngineOptions], EngineTrials]
"""Makes the trials of engines built with given options; all share one budget."""

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Cure:
    """One change to how the model is built, and its result."""

    name: str
    how: str  # what the user must do
    seen: Observation  # results of all runs
    latency_ms: float  # engine latency, NaN where no engine was built
    engine_bytes: int  # engine size, 0 where no engine was built
    marks: tuple[str, ...] = ()  # tensors that become outputs
    model: onnx.ModelProto | None = None  # typed model with these outputs; None without marks

    @property
    def works(self) -> bool:
        """Whether every run in every process was right and reproducible."""
        return self.seen.runs > 0 and self.seen.suspect is None


@dataclass(frozen=True)
class Cures:
    """All cures tried on a model."""

    tried: tuple[Cure, ...]  # in order; the first is the model as it is
    complete: bool  # false where builds ran out or the user interrupted
    interrupted: bool = False  # whether the user ended the search

    @property
    def needed(self) -> bool:
        """Whether the model as it is was not found right and reproducible."""
        return not (self.tried and self.tried[0].works)

    @property
    def smallest(self) -> Cure | None:
        """The working cure with the fewest marks, else the first that works."""
        works = [cure for cure in self.tried[1:] if cure.works]
        marked = [cure for cure in works if cure.marks]
        return min(marked, key=lambda c: len(c.marks)) if marked else next(iter(works), None)


class _Search:
    """Tries cures on one model, on several samples."""

    def __init__(
        self,
        graph: Graph,
        samples: Sequence[Sample],
        open_trials: OpenTrials,
        observer: Observer,
        threads: int,
    ) -> None:
        self._graph, self._open_trials, self._observer = graph, open_trials, observer
        self._cases = [(s, outputs_of(graph.proto, s.arrays, s.name, threads)) for s in samples]
        self.marks_unfinished = False

    def run(self, suspects: Sequence[str]) -> Iterator[Cure]:
        """Yields the result of every cure; only the first for a model that is right."""
        first = self._try(AS_IT_IS, "")
        yield first
        if first.works:
            return
        for name, how, options in _options():
            yield self._try(name, how, options=options)
        layers = self._graph.layers
        inner = [t for la in layers for t in la.outputs if t not in self._graph.outputs]
        # Blocks of the same kind tend to fail alike, so marks in the suspect block may not suffice.
        ops = {node.op_type for node, name in self._graph.named_nodes() if name in suspects}
        near = [t for la in layers if la.op in ops for t in la.outputs if t in inner]
        found = self._fewest_marks(near) if near else None
        if found is None and not self.marks_unfinished and len(near) < len(inner):
            found = self._fewest_marks(inner)
        if found is not None:
            yield found

    def _try(
        self,
        name: str,
        how: str,
        *,
        options: EngineOptions = AS_USUAL,
        marks: tuple[str, ...] = (),
    ) -> Cure:
        """Tries one cure on every sample until one is bad."""
        proto = mark_outputs(self._graph.proto, marks) if marks else self._graph.proto
        trials = self._open_trials(options)
        whole, total = frozenset(self._graph.names), Observation()
        for sample, expected in self._cases:
            found = trials.look(Specimen(whole, proto, sample, expected))
            total = _added(total, found)
            if found.suspect is not None:
                break
        cure = Cure(
            name,
            how,
            total,
            latency_ms=float(trials.facts.get("latency_ms", float("nan"))),
            engine_bytes=int(trials.facts.get("engine_bytes", 0)),
            marks=marks,
            model=to_typed(proto, PrecisionPlan(trials.precision)) if marks else None,
        )
        word = "right and reproducible" if cure.works else str(total.suspect or "not run")
        self._observer.progress(trials.budget.spent, 0, f"{name}: {word}")
        return cure

    def _fewest_marks(self, candidates: Sequence[str]) -> Cure | None:
        """The smallest set of ``candidates`` that works as further outputs, if all of them do."""
        cures: dict[frozenset[str], Cure] = {}

        def verdict(marks: frozenset[str]) -> Verdict:
            if not marks:
                return Verdict.FAIL
            names = tuple(n for n in candidates if n in marks)
            name = f"{len(names)} more output{'s' if len(names) > 1 else ''}"
            how = f"make {', '.join(map(repr, names))} outputs, which the application may ignore"
            cures[marks] = self._try(name, how, marks=names)
            return Verdict.PASS if cures[marks].works else Verdict.FAIL

        # Marks behave as pins: fewer outputs are better, and all of them must work.
        found = find_pins(candidates, verdict)
        self.marks_unfinished = not found.complete
        return cures.get(found.pinned) if found.feasible else None


def try_cures(
    graph: Graph,
    samples: Sequence[Sample],
    suspects: Sequence[str],
    open_trials: OpenTrials,
    observer: Observer,
    threads: int = 0,
) -> Cures:
    """Tries every cure on the whole model; tensors of ``suspects`` are marked first."""
    search = _Search(graph, samples, open_trials, observer, threads)
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
    """Yields name, instruction and options of other ways to build the model."""
    for level in (0, 1, 2, 4, 5):  # 3 is the builder's default
        how = f"config.builder_optimization_level = {level}"
        how += f" (trtexec --builderOptimizationLevel={level})"
        yield f"optimisation level {level}", how, EngineOptions(optimisation_level=level)
    how = "config.set_tactic_sources(0) (trtexec --tacticSources=-CUBLAS,-CUDNN,...)"
    yield "no tactic sources", how, EngineOptions(tactics=False)
    how = "runtime_config.cuda_graph_strategy = CudaGraphStrategy.DISABLED"
    yield "no CUDA graphs", how, EngineOptions(cuda_graphs=False)


def _added(one: Observation, other: Observation) -> Observation:
    """Adds the observations of two samples, each in the same number of processes."""
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
    """Tries every cure of the settings' model on all its inputs."""
    if settings.runner not in ("auto", "tensorrt"):
        raise BadInputError(f"--runner {settings.runner}: cures are those of TensorRT's engines")
    graph, samples = model_and_samples(settings, observer)
    suspects = _nodes_of(subgraph, graph) if subgraph is not None else ()
    # Raises here without a GPU; later, every cure would seem to have failed.
    fresh_engines(settings)(graph, samples).close()
    observer.step("cures")
    budget = Budget(settings.max_builds, TimeBudget(settings.budget))
    threads = settings.threads or 0

    def open_trials(options: EngineOptions) -> EngineTrials:
        engines = fresh_engines(settings, options)
        return tensorrt_trials(engines, precision, budget, settings.workers, threads)

    return try_cures(graph, samples, suspects, open_trials, observer, threads)


def _nodes_of(subgraph: Path, graph: Graph) -> tuple[str, ...]:
    """The nodes of a reproducer that `bisect-trt reduce` wrote for this model."""
    path = subgraph / "reduce.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        nodes = tuple(str(node["name"]) for node in record["nodes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"--subgraph {subgraph}: no reproducer of `bisect-trt reduce` ({path.name} "
            "cannot be read)"
        ) from error
    unknown = sorted(set(nodes).difference(graph.names))
    if unknown:
        raise BadInputError(
            f"--subgraph {subgraph}: its node {unknown[0]!r} is not in the model; reduce this model"
        )
    return nodes
