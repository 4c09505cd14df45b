"""Finds the smallest subgraph that an engine gets wrong by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from bisect_trt.base.atomic_files import scratch, sweep
from bisect_trt.base.errors import (
    BadInputError,
    MachineError,
    RunnerFailedError,
    RunnerUnavailableError,
)
from bisect_trt.base.interrupt import BudgetSpentError, Observer, TimeBudget
from bisect_trt.base.outcomes import Cause, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.images import image_findings, image_options
from bisect_trt.inputs.samples import load_samples
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import input_specs
from bisect_trt.model.load import load_model
from bisect_trt.model.typed import to_typed
from bisect_trt.reduction.oracle import (
    Budget,
    CheckTrials,
    EngineTrials,
    Observation,
    OpenRunner,
    Specimen,
    Specimens,
    Suspect,
    Trials,
)
from bisect_trt.runners.base import Restartable
from bisect_trt.runners.process import IsolatedWorker, WorkerPool
from bisect_trt.runners.tensorrt.records import AS_USUAL, RTX, EngineOptions, installed_module
from bisect_trt.runners.tensorrt.runner import BuildOnlyRunner, TensorRTRunner
from bisect_trt.search.find import find_pins
from bisect_trt.search.minimise import one_minimal
from bisect_trt.settings import Settings
from bisect_trt.steps.answer import RunState
from bisect_trt.steps.context import Context
from bisect_trt.steps.memory_need import check_need, need_of
from bisect_trt.steps.open_runners import BY_ONNXRUNTIME, open_session


@dataclass(frozen=True)
class Step:
    """One step of the search."""

    what: str
    tried: int  # subgraphs tried
    left: int  # nodes left after it


@dataclass(frozen=True)
class Reduced:
    """The smallest subgraph found bad, and its results."""

    suspect: Suspect  # in which way it is bad
    precision: Precision  # the engine's precision
    explained: Precision  # precision whose rounding errors were allowed
    model: ModelProto  # typed model given to the engine
    sample: Sample  # inputs by name
    expected: Mapping[str, NDArray[Any]]  # FP32 outputs on ONNX Runtime
    nodes: tuple[tuple[str, str], ...]  # kept nodes with their operators
    of: int  # number of nodes in the whole model
    whole: Observation  # results of the whole model
    seen: Observation  # results of the subgraph
    steps: tuple[Step, ...]
    complete: bool  # whether no further node can be left out
    always: bool  # whether no tried subgraph was ever fine
    builds: int  # engine builds, or calls of the check
    seconds: float
    interrupted: bool = False  # whether the user ended the search
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of the engine


Nodes = frozenset[str]

Ask = Callable[[Nodes], Verdict]
"""Gives PASS for a subgraph that is still bad; may raise BudgetSpentError to end the search."""


@dataclass(frozen=True)
class SubgraphEvaluation:
    """The ``verdict`` on one subgraph, and the ``step`` that tried it."""

    step: str
    subgraph: Nodes
    verdict: Verdict


class SubgraphSearch:
    """Searches the smallest part of a network that is still bad.

    ``best``: its nodes; None if the whole is not bad. ``complete``: no node can be left out.
    ``interrupted``: the user ended the search. ``evaluations``: each subgraph tried, in order.
    """

    # "Bad" need not be monotone: an output in the middle may break the very fusion that is wrong.
    # So every step starts from a subgraph that was found to be bad.

    def __init__(self, nodes: Sequence[str], ask: Ask) -> None:
        self._nodes = list(nodes)
        self._ask = ask
        self._verdicts: dict[Nodes, Verdict] = {}
        self._step = "the whole model"
        self.best: Nodes | None = None
        self.complete = self.interrupted = False
        self.evaluations: list[SubgraphEvaluation] = []

    def run(self) -> None:
        """Run every step, until the budget is spent or the user ends it."""
        try:
            if self._is_bad(self._nodes):
                self._run_steps()
                self.complete = True
        except BudgetSpentError:
            pass
        except KeyboardInterrupt:
            self.interrupted = True

    @property
    def steps(self) -> tuple[Step, ...]:
        """The evaluations by step, each with the smallest bad size so far."""
        steps: list[Step] = []
        bad_sizes: list[int] = []
        for name, evaluations in groupby(self.evaluations, lambda evaluation: evaluation.step):
            tried = list(evaluations)
            bad_sizes += [len(e.subgraph) for e in tried if e.verdict.passed]
            steps.append(Step(name, len(tried), min(bad_sizes, default=0)))
        return tuple(steps)

    def _run_steps(self) -> None:
        nodes = self._nodes
        self._step = "outputs moved up"
        nodes = nodes[: _fewest(len(nodes), lambda n: self._is_bad(nodes[:n]))]
        self._step = "inputs moved down"
        nodes = nodes[-_fewest(len(nodes), lambda n: self._is_bad(nodes[-n:])) :]
        self._step = "nodes left out"
        if len(nodes) > 1:
            find_pins(nodes, self._verdict)
        self._step = "each node left out"
        smallest = self.best or frozenset()
        one_minimal([n for n in self._nodes if n in smallest], self._verdict, lambda v: v.passed)

    def _is_bad(self, kept: Sequence[str]) -> bool:
        return self._verdict(frozenset(kept)).passed

    def _verdict(self, kept: Nodes) -> Verdict:
        if not kept:
            return Verdict.FAIL  # an empty model is not bad
        if kept not in self._verdicts:
            verdict = self._verdicts[kept] = self._ask(kept)
            self.evaluations.append(SubgraphEvaluation(self._step, kept, verdict))
            if verdict.passed and (self.best is None or len(kept) < len(self.best)):
                self.best = kept
        return self._verdicts[kept]


def _fewest(length: int, is_bad: Callable[[int], bool]) -> int:
    """The smallest bad number by bisection, given that ``length`` is bad."""
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle, high)
    return high


def reduce_subgraph(
    graph: Graph, sample: Sample, trials: Trials, observer: Observer
) -> Reduced | Observation:
    """Finds the smallest bad subgraph on ``sample``; returns the whole model's results if good.

    Raises:
        BadInputError: ONNX Runtime cannot run the model, or the budget is spent before.
    """
    began = time.perf_counter()
    with scratch("recorded") as folder:
        specimens = Specimens(graph, sample, Path(folder), trials.threads)
        observer.step("the whole model")
        whole = _try_whole(specimens, trials, sample)
        if whole.suspect is None:
            return whole
        observer.step("reduce")
        search = SubgraphSearch(specimens.nodes, _question(specimens, trials, observer))
        search.run()
        specimen = specimens.of(search.best or specimens.whole)
        seen, interrupted = trials.observations[specimen.subgraph], search.interrupted
        if not interrupted:
            observer.step("the subgraph")
            seen, interrupted = _figures(specimen, trials)
    unclear = (Verdict.PASS, Verdict.UNSURE)
    return Reduced(
        suspect=seen.suspect or whole.suspect,
        precision=trials.precision,
        explained=trials.explained,
        model=to_typed(specimen.model, PrecisionPlan(trials.precision)),
        sample=specimen.sample,
        expected=specimen.expected,
        nodes=specimens.operators(specimen.subgraph),
        of=len(specimens.nodes),
        whole=whole,
        seen=seen,
        steps=search.steps,
        complete=search.complete,
        always=all(e.verdict in unclear for e in search.evaluations),
        builds=trials.budget.spent,
        seconds=time.perf_counter() - began,
        interrupted=interrupted,
        versions=trials.versions,
    )


def _figures(specimen: Specimen, trials: Trials) -> tuple[Observation, bool]:
    """The subgraph's results in all processes, and whether the user ended them."""
    seen = trials.observations[specimen.subgraph]
    # The subgraph is found; an error here only costs its figures.
    try:
        with suppress(BudgetSpentError, MachineError):
            seen = trials.figures(specimen)
    except KeyboardInterrupt:
        return seen, True
    return seen, False


def _question(specimens: Specimens, trials: Trials, observer: Observer) -> Ask:
    """The function that answers the search's questions by ``trials``."""
    numbers = count(1)

    def ask(nodes: Nodes) -> Verdict:
        if nodes == specimens.whole:
            return Verdict.PASS  # it was tried before the search
        try:
            verdict = trials.ask(specimens.of(nodes))
        except (RunnerFailedError, MachineError):  # this subgraph cannot be cut out or run
            return Verdict.UNSURE
        word = {Verdict.PASS: "still bad", Verdict.FAIL: "not bad"}.get(verdict, verdict)
        observer.progress(next(numbers), 0, f"{len(nodes)} nodes: {word}")
        return verdict

    return ask


def _try_whole(specimens: Specimens, trials: Trials, sample: Sample) -> Observation:
    """Tries the whole model, with errors in the user's terms."""
    try:
        return trials.try_whole(specimens.of(specimens.whole))
    except RunnerFailedError as error:
        raise BadInputError(f"the model cannot be run on the reference: {error}") from error
    except BudgetSpentError:
        raise BadInputError(
            f"{sample.name}: not even the whole model can be tried on it, and no input before "
            "it showed it bad: raise --max-builds or --budget"
        ) from None


def reduce_model(
    settings: Settings, precision: Precision, check: str | None, observer: Observer
) -> Reduced | Observation:
    """Reduces on the first input on which the model is bad; else returns the last results."""
    sweep(Path(gettempdir()))  # recorded tensors of a run that was killed
    graph, samples = model_and_samples(settings, observer)
    budget = Budget(settings.max_builds, TimeBudget(settings.budget))
    trials: Trials
    if check is None:
        trials = engine_trials(settings, precision, graph, samples, budget)
    elif precision is Precision.FP32:
        trials = CheckTrials(check, settings.evaluation_timeout, budget, settings.threads or 0)
    else:
        raise BadInputError(
            f"--check: the command chooses what {precision.value} means, its subgraphs are FP32; "
            "leave --precision out"
        )
    for sample in samples:
        found = reduce_subgraph(graph, sample, trials, observer)
        if isinstance(found, Reduced):
            return found
    assert isinstance(found, Observation)  # load_samples returns at least one
    if check is None and not found.runs:
        raise RunnerUnavailableError(
            "the model builds; whether its engine is wrong or not reproducible can only be "
            "told with a GPU"
        )
    return found


def model_and_samples(settings: Settings, observer: Observer) -> tuple[Graph, list[Sample]]:
    """Loads the model and inputs that the settings name, if they fit into memory."""
    observer.step("load")
    model = load_model(settings.model)
    specs, graph = input_specs(model.proto), Graph(model.proto)
    check_need(need_of(graph, settings), model.name)
    images = image_options(settings)
    samples = load_samples(
        settings.inputs,
        specs,
        stacked=settings.stacked,
        infinite=settings.infinite,
        images=images,
    )
    for finding in image_findings([sample.name for sample in samples], specs, images):
        observer.finding(finding.message)
    check_need(need_of(graph, settings, samples), model.name)
    return graph, samples


def result_folder(settings: Settings, what: str) -> Path:
    """The folder of ``--out``, else ``reports/MODEL-WHAT``."""
    if settings.out is not None:
        return settings.out
    model = settings.model
    name = model.graph.name or "model" if isinstance(model, ModelProto) else Path(model).stem
    return Path("reports") / f"{name.replace('/', '_')[:80]}-{what}"


def files_read(settings: Settings) -> list[Path]:
    """The files of the model and the inputs."""
    named = (settings.model, *settings.inputs)
    return [Path(source) for source in named if isinstance(source, (str, Path))]


def engine_trials(
    settings: Settings,
    precision: Precision,
    graph: Graph,
    samples: Sequence[Sample],
    budget: Budget,
) -> EngineTrials:
    """Makes the judge by the settings' engine, which only builds where there is no GPU.

    Raises:
        BadInputError: the settings name no engine.
        RunnerUnavailableError: the engine cannot work on this machine.
    """
    if settings.runner == "emulated":
        raise BadInputError(
            "--runner emulated: reduce looks into what an engine does wrong; choose another "
            "runner, or give a --check of your own"
        )
    if settings.runner in BY_ONNXRUNTIME:
        if settings.typing == "weak" or settings.trt_module is not None:
            raise BadInputError(
                f"--runner {settings.runner} takes no --typing weak, no --trt-module; leave it out"
            )
        opened = partial(open_session, settings)
        threads = settings.threads or 0
        return EngineTrials(opened, precision, precision, budget, settings.workers, threads)
    open_runner = fresh_engines(settings)
    try:
        open_runner(graph, samples).close()
    except RunnerUnavailableError:
        module = installed_module(settings.trt_module)
        if module != RTX:  # only TensorRT RTX builds without a GPU
            raise
        open_runner = partial(BuildOnlyRunner, module=module, timeout_s=settings.evaluation_timeout)
    return tensorrt_trials(open_runner, precision, budget, settings.workers, settings.threads or 0)


def tensorrt_trials(
    open_runner: OpenRunner, precision: Precision, budget: Budget, workers: int, threads: int = 0
) -> EngineTrials:
    """Makes the judge by TensorRT."""
    # TensorRT may ignore a cleared TF32 flag, so an FP32 engine is allowed TF32's errors.
    explained = Precision.TF32 if precision is Precision.FP32 else precision
    return EngineTrials(open_runner, precision, explained, budget, workers, threads)


def fresh_engines(settings: Settings, options: EngineOptions = AS_USUAL) -> OpenRunner:
    """Returns a function that opens TensorRT in a fresh process and repeats each sample."""

    def hire(target: str, arguments: Mapping[str, Any]) -> WorkerPool:
        # The pool tries again after a crash: only a repeated crash counts as the engine's answer.
        return WorkerPool([IsolatedWorker(target, arguments)])

    def open_runner(graph: Graph, samples: Sequence[Sample]) -> TensorRTRunner:
        return TensorRTRunner(
            graph,
            samples,
            settings.trt_module,
            timeout_s=settings.evaluation_timeout,
            weak=settings.typing == "weak",
            options=options,
            repeats=20,
            hire=hire,
        )

    return open_runner


def subgraph_to_blame(state: RunState, context: Context) -> Reduced | Observation | None:
    """Reduces for ``run`` where the engine is to blame, within a budget; None elsewhere."""
    diagnosis, engine, settings = state.diagnosis, state.engine, state.problem.settings
    blamed = diagnosis is not None and diagnosis.cause in (
        Cause.NOT_REPRODUCIBLE,
        Cause.NOT_PRECISION,
        Cause.ENGINE_FAILED,
    )
    if not blamed or engine is None or not isinstance(context.opened, Restartable):
        return None
    time_budget = TimeBudget(min(settings.limits.reduction_time_s, context.time.left_s) / 60.0)
    time_budget.search_ended()  # nothing of it is set aside for tests
    builds = settings.max_builds if settings.max_builds is not None else 60
    budget = Budget(builds, time_budget)
    if budget.is_spent:
        return None
    graph, samples = state.problem.graph, state.problem.samples
    precision = settings.precision if engine.fp32.verdict.passed else Precision.FP32
    # The sample on which the engine was found not reproducible, if any.
    last = state.reproducibility or engine.reproducibility
    named = [sample for sample in samples if last is not None and sample.name == last.sample]
    sample = named[0] if named else samples[0]
    trials = engine_trials(settings, precision, graph, [sample], budget)
    try:
        return reduce_subgraph(graph, sample, trials, context.observer)
    except (BadInputError, MachineError):  # no time or memory: the run's answer stands without
        return None
