"""Opens what `reduce` and `cure` ask, and the engine that is to blame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from onnx import ModelProto

from bisect_trt.base.atomic_files import sweep
from bisect_trt.base.errors import BadInputError, MachineError, RunnerUnavailableError
from bisect_trt.base.interrupt import Observer, TimeBudget
from bisect_trt.base.outcomes import Cause
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.samples import load_samples
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import input_specs
from bisect_trt.model.load import load_model
from bisect_trt.reduction.oracle import Budget, CheckTrials, EngineTrials, Observation, OpenRunner
from bisect_trt.reduction.reduce import Reduced, Trials, reduce_subgraph
from bisect_trt.runners.base import Restartable
from bisect_trt.runners.ort_cuda import OrtCudaRunner
from bisect_trt.runners.process import IsolatedWorker, WorkerPool
from bisect_trt.runners.tensorrt.records import AS_USUAL, EngineOptions, installed_module
from bisect_trt.runners.tensorrt.runner import BuildOnlyRunner, TensorRTRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.answer import RunState
from bisect_trt.steps.context import Context
from bisect_trt.steps.memory_need import check_need, need_of, need_of_samples

_BUILDS_ANYWHERE = "tensorrt_rtx"
_RUNS = 20


def reduce_model(
    settings: Settings, precision: Precision, check: str | None, observer: Observer
) -> Reduced | Observation:
    """The smallest bad subgraph of the settings' model, on the first input on which the whole is
    bad; what the whole showed on the last one where it is on none.

    Raises:
        BadInputError: names the file, tensor or option that cannot be used.
        RunnerUnavailableError: the engine cannot work on this machine.
    """
    sweep(Path(gettempdir()))  # recorded tensors of a run that was killed
    graph, samples = model_and_samples(settings, observer)
    trials = _trials(settings, precision, check, graph, samples)
    for sample in samples:
        found = reduce_subgraph(graph, sample, trials, observer)
        if isinstance(found, Reduced):
            return found
    assert isinstance(found, Observation)  # there is a sample, and on none was the whole bad
    if check is None and not found.runs:
        raise RunnerUnavailableError(
            "the model builds; whether its engine is wrong or not reproducible can only be "
            "told with a GPU"
        )
    return found


def model_and_samples(settings: Settings, observer: Observer) -> tuple[Graph, list[Sample]]:
    """What the settings name.

    Raises:
        BadInputError: names the file or tensor that cannot be used.
    """
    observer.step("load")
    model = load_model(settings.model)
    specs, graph = input_specs(model.proto), Graph(model.proto)
    check_need(need_of(graph, settings, specs), model.name)
    samples = load_samples(
        settings.inputs,
        specs,
        stacked=settings.stacked,
        infinite=settings.infinite,
    )
    check_need(need_of_samples(graph, settings, samples), model.name)
    return graph, samples


def fresh_engines(settings: Settings, options: EngineOptions = AS_USUAL) -> OpenRunner:
    """TensorRT in a process of its own each time, which runs each sample many times."""

    def opens(graph: Graph, samples: Sequence[Sample]) -> TensorRTRunner:
        return TensorRTRunner(
            graph,
            samples,
            settings.trt_module,
            timeout_s=settings.evaluation_timeout_s,
            weak=settings.typing == "weak",
            options=options,
            repeats=_RUNS,
            hire=_once_more,
        )

    return opens


def _once_more(target: str, arguments: Mapping[str, Any]) -> WorkerPool:
    """A crash is an engine's answer only if it repeats."""
    return WorkerPool([IsolatedWorker(target, arguments)])


def result_folder(settings: Settings, what: str) -> Path:
    """Where the result goes: as asked for, else ``reports/MODEL-WHAT``."""
    if settings.out is not None:
        return settings.out
    model = settings.model
    name = model.graph.name or "model" if isinstance(model, ModelProto) else Path(model).stem
    return Path("reports") / f"{name.replace('/', '_')[:80]}-{what}"


def files_read(settings: Settings) -> list[Path]:
    """The files that the settings name as model and inputs."""
    named = (settings.model, *settings.inputs)
    return [Path(source) for source in named if isinstance(source, (str, Path))]


def _trials(
    settings: Settings,
    precision: Precision,
    check: str | None,
    graph: Graph,
    samples: Sequence[Sample],
) -> Trials:
    budget = Budget(settings.max_builds, TimeBudget(settings.budget))
    if check is not None:
        if precision is not Precision.FP32:
            raise BadInputError(
                f"--check: the command chooses what {precision.value} means, its subgraphs are "
                "FP32; "
                "leave --precision out"
            )
        return CheckTrials(check, settings.evaluation_timeout_s, budget)
    return engine_trials(settings, precision, graph, samples, budget)


def engine_trials(
    settings: Settings,
    precision: Precision,
    graph: Graph,
    samples: Sequence[Sample],
    budget: Budget,
) -> EngineTrials:
    """What asks the settings' engine about subgraphs.

    Raises:
        BadInputError: the settings name no engine.
        RunnerUnavailableError: the engine cannot work on this machine.
    """
    if settings.runner == "emulated":
        raise BadInputError(
            "--runner emulated: reduce looks into what an engine does wrong; choose tensorrt or "
            "onnxruntime-cuda, or give a --check of your own"
        )
    if settings.runner == "onnxruntime-cuda":
        opens: OpenRunner = partial(_open_cuda, settings)
        return EngineTrials(opens, precision, precision, budget, settings.workers)
    # A cleared TF32 flag was seen to be ignored: TF32's error is no bug of a kernel.
    explained = Precision.TF32 if precision is Precision.FP32 else precision
    opens = _tensorrt(settings, graph, samples)
    return EngineTrials(opens, precision, explained, budget, settings.workers)


def _open_cuda(settings: Settings, graph: Graph, samples: Sequence[Sample]) -> OrtCudaRunner:
    return OrtCudaRunner(graph, timeout_s=settings.evaluation_timeout_s)


def _open_builder(
    module: str, settings: Settings, graph: Graph, samples: Sequence[Sample]
) -> BuildOnlyRunner:
    return BuildOnlyRunner(graph, samples, module, settings.evaluation_timeout_s)


def _tensorrt(settings: Settings, graph: Graph, samples: Sequence[Sample]) -> OpenRunner:
    """Engines, or where no GPU can run them and none is needed to build them, builds."""
    opens = fresh_engines(settings)
    try:
        opens(graph, samples).close()
    except RunnerUnavailableError:
        module = installed_module(settings.trt_module)
        if module != _BUILDS_ANYWHERE:
            raise
        return partial(_open_builder, module, settings)
    return opens


REPRODUCER = "reproducer"
"""The folder within the run's."""

BUILDS = 60
"""Engine builds that a run spends on the subgraph where --max-builds says nothing; `bisect-trt
reduce` takes as many as it needs."""

SECONDS = 30.0
"""That a run spends on it at most, but for the build in work: its answer is there already. An
engine of thousands of layers takes that long to build, and sixty of them would take an hour."""

_ENGINE = (Cause.NOT_REPRODUCIBLE, Cause.NOT_PRECISION, Cause.ENGINE_FAILED)


def subgraph_to_blame(known: RunState, context: Context) -> Reduced | Observation | None:
    """The smallest bad subgraph found within the builds and the time that may be spent; what the
    whole shows where it was not seen to be bad again; None where the engine is not to blame.
    """
    diagnosis, engine, settings = known.diagnosis, known.engine, known.problem.settings
    blamed = diagnosis is not None and diagnosis.cause in _ENGINE
    if not blamed or engine is None or not isinstance(context.opened, Restartable):
        return None
    precision = settings.precision if engine.fp32.verdict.passed else Precision.FP32
    builds = settings.max_builds if settings.max_builds is not None else BUILDS
    budget = Budget(builds, _time_for_it(context))
    if budget.is_spent:
        return None
    seen = known.reproducibility or engine.reproducibility
    sample = _named(known.problem.samples, seen.sample if seen is not None else "")
    trials = engine_trials(settings, precision, known.problem.graph, [sample], budget)
    try:
        return reduce_subgraph(known.problem.graph, sample, trials, context.observer)
    # The answer stands, also where there was no time to try the whole, or no memory.
    except (BadInputError, MachineError):
        return None


def _time_for_it(context: Context) -> TimeBudget:
    found = TimeBudget(min(SECONDS, context.time.left_s) / 60.0)
    found.search_ended()
    return found


def _named(samples: Sequence[Sample], name: str) -> Sample:
    return next((sample for sample in samples if sample.name == name), samples[0])
