"""The fastest engine that is right beside others' plans: ``python -m benchmarks.engines.speed``.

Each model has a row at the default requirement, one at 6 dB above the SNR that its FP16 engine has
on the worst of eight seeded inputs, and what :data:`CASES` asks besides. A row's engines are timed
in the same rounds and judged on these inputs. Needs a GPU, TensorRT, torch for the exported models
and ModelOpt for AutoCast's. ``--prepare`` makes the models alone, ``--out`` keeps each row: what is
there is not run again.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

import bisect_trt
from benchmarks.common import DETECTOR, machine
from benchmarks.models.weight_cases import photos, words
from benchmarks.weights import FP16, other_layers
from bisect_trt.base.atomic_files import FITTED_MODEL, REPAIRED_MODEL
from bisect_trt.base.errors import BisectError, one_line
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.limits import Limits
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.parser import DEFAULT_REQUIREMENTS
from bisect_trt.metrics.requirements import Requirement, Requirements
from bisect_trt.metrics.time_limits import saving_kept
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.report.choices import Choice, recommended
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.fastest import ALL_BUT_MATRIX
from bisect_trt.steps.problem import load
from bisect_trt.steps.timing import Build, Timing, time_engines
from examples.text_inputs import page

INPUTS = 8
BETTER_DB = 6.0
"""How much better than FP16's own the SNR of a model's second row must be."""

REDUCED, EXACT, OURS, AUTOCAST = "FP16", "FP32", "ours", "AutoCast"
"""Names of engines, beside those of a run's candidates."""

Make = Callable[[Path], Path]
ON_GPU = Limits(ranking_time_s=5.0, large_bytes=8 << 30)
"""What a run may take that emulates on a GPU: few reverse passes, since these run on the CPU, and
the memory to keep sessions of a gigabyte open."""

OnEngine = Callable[[Build, Sequence[Sample]], list[Arrays]]
OnClock = Callable[[Mapping[str, Build], Sample], Timing]


@dataclass(frozen=True)
class Case:
    """A model: what makes its file in a folder, and its input of each number.

    ``time_shape`` is the shape that engines are timed at where that is not the inputs'.
    ``further`` are requirements beside the default one.
    """

    make: Make
    inputs: Callable[[int], Arrays]
    time_shape: tuple[int, ...] = ()
    further: tuple[str, ...] = ()

    @property
    def samples(self) -> list[Sample]:
        """The eight inputs."""
        return [Sample(str(number), self.inputs(number)) for number in range(INPUTS)]

    def timed(self, sample: Sample) -> Sample:
        """``sample`` at the shape to time."""
        if not self.time_shape:
            return sample
        arrays = {name: np.resize(a, self.time_shape) for name, a in sample.arrays.items()}
        return Sample(sample.name, arrays)


def _exported(name: str, *shape: int) -> Case:
    def make(folder: Path) -> Path:
        return _kept(folder / f"{name}.onnx", partial(_export, name, shape))

    return Case(make, partial(words if name == "BERT" else photos, shape))


def _export(name: str, shape: tuple[int, ...], path: Path) -> None:
    from benchmarks.models.exported import export

    export(name, path.parent, shape).replace(path)


def _kept(path: Path, make: Callable[[Path], None]) -> Path:
    """``path``, which ``make`` writes whole where it is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / f"new-{path.name}"
            make(made)
            made.replace(path)
    return path


def _page(number: int) -> Arrays:
    return {"x": page(number)}


CASES: dict[str, Case] = {
    "det": Case(lambda _: DETECTOR, _page, (8, 3, 736, 1280), ("max_abs<=5e-2",)),
    "ViT-S": _exported("ViT-S", 32, 3, 224, 224),
    "ConvNeXt-T": _exported("ConvNeXt-T", 16, 3, 224, 224),
    "BERT": _exported("BERT", 32, 128),
    "U-Net": _exported("U-Net", 4, 3, 512, 512),
    "NAFNet": _exported("NAFNet", 1, 3, 256, 256),
    "RT-DETR-R101": _exported("RT-DETR-R101-anchors", 1, 3, 640, 640),
    "ViT-L": _exported("ViT-L", 8, 3, 224, 224),
}
"""The models. Exports have one batch, so that they are searched at the shape they are timed at."""


def autocast(case: Case, folder: Path) -> Path:
    """AutoCast's model with its default options, calibrated on the first input.

    Inputs and outputs keep their types, so that its outputs are not rounded once more.

    Raises:
        RuntimeError: AutoCast fails.
    """
    source = case.make(folder)

    def make(path: Path) -> None:
        inputs = path.with_suffix(".npz")
        np.savez(inputs, allow_pickle=False, **dict(case.samples[0].arrays))
        command = [sys.executable, "-m", "modelopt.onnx.autocast", "--keep_io_types"]
        command += ["--onnx_path", str(source), "--output_path", str(path)]
        command += ["--calibration_data", str(inputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError("\n".join(done.stderr.splitlines()[-3:]))

    return _kept(folder / f"{source.stem}.autocast.onnx", make)


@dataclass(frozen=True)
class Judge:
    """Compares outputs with the reference's of each input."""

    requirements: Requirements
    exact: Sequence[Arrays]

    def worst(self, item: Requirement, found: Sequence[Arrays]) -> float:
        """The worst value of the metric of ``item`` over the inputs; NaN if one is not finite."""
        place = next(n for n, i in enumerate(self.requirements.items) if i.metric == item.metric)
        pairs = zip(self.exact, found, strict=True)
        values = [self.requirements.judge(e, f).values[place] for e, f in pairs]
        return max(values, key=item.score_of)


def judge_of(path: Path, samples: Sequence[Sample], texts: Sequence[str]) -> Judge:
    """A judge by the metrics of ``texts``, of which each is on all outputs."""
    with tempfile.TemporaryDirectory() as name:
        settings = Settings(
            model=path,
            inputs=[sample.arrays for sample in samples],
            runner="emulated",
            require=texts,
            out=Path(name),
        )
        with open_context(load(settings, Observer()), Observer()) as context:
            exact = [context.references.of(sample) for sample in samples]
            return Judge(context.problem.requirements, exact)


@dataclass(frozen=True)
class Engine:
    """A build on the engine: its time in ms by graph replay, and by single enqueues.

    ``value`` is the worst of the requirement's metric over the inputs. ``saving_kept`` is a share.
    ``failure`` says why something is missing.
    """

    name: str
    layers: int
    ms: float | None
    plain_ms: float | None
    saving_kept: float | None
    value: float
    passes: bool
    validated: str = ""
    failure: str = ""


@dataclass(frozen=True)
class Row:
    """A model at a requirement.

    ``choice`` is the recommended one of the run, which took ``seconds``. ``is_fastest`` says
    whether no engine that passes takes measurably less time than ours; None where ours misses.
    """

    model: str
    requirement: str
    cause: str
    choice: str
    seconds: float
    out_of_time: bool
    engines: Sequence[Engine]
    is_fastest: bool | None
    notes: Sequence[str]
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A model that is ready for its rows.

    ``standard`` are the builds of all rows, ``failures`` those that could not be made.
    """

    name: str
    case: Case
    path: Path
    samples: Sequence[Sample]
    judge: Judge
    standard: Mapping[str, Build]
    failures: Mapping[str, str]
    on_engine: OnEngine
    on_clock: OnClock

    def outputs(self, builds: Mapping[str, Build]) -> dict[str, list[Arrays] | str]:
        """The outputs of each build's engine, or why there are none."""

        def run(build: Build) -> list[Arrays] | str:
            try:
                return self.on_engine(build, self.samples)
            except BisectError as error:
                return one_line(error, 200)

        with ThreadPoolExecutor(4) as threads:
            return dict(zip(builds, threads.map(run, builds.values()), strict=True))


def bench_of(name: str, folder: Path, on_engine: OnEngine, on_clock: OnClock) -> Bench:
    """Makes or loads the model ``name`` and AutoCast's of it."""
    case = CASES[name]
    path = case.make(folder)
    graph = Graph(load_model(path).proto)
    standard = {
        REDUCED: Build(graph, PrecisionPlan(FP16)),
        EXACT: Build(graph, PrecisionPlan(Precision.FP32)),
        ALL_BUT_MATRIX: Build(graph, PrecisionPlan(FP16, other_layers(graph))),
    }
    failures = {}
    try:
        # Everything "stays in FP32": the types that AutoCast wrote stay as they are.
        cast = Graph(onnx.load(autocast(case, folder)))
        standard[AUTOCAST] = Build(cast, PrecisionPlan(Precision.FP32))
    except (RuntimeError, BisectError) as error:
        failures[AUTOCAST] = str(error)
    return Bench(
        name=name,
        case=case,
        path=path,
        samples=case.samples,
        judge=judge_of(path, case.samples, (*DEFAULT_REQUIREMENTS, *case.further)),
        standard=standard,
        failures=failures,
        on_engine=on_engine,
        on_clock=on_clock,
    )


def requirements(bench: Bench, reduced: Sequence[Arrays]) -> dict[str, Requirement]:
    """The requirement of each row by its key; ``reduced`` are the outputs of FP16's engine."""
    default, *further = bench.judge.requirements.items
    limit = round(bench.judge.worst(default, reduced) + BETTER_DB, 2)
    better = replace(default, limit=limit, text=f"snr_db>={limit:g}")
    return dict(zip(keys(bench.case), (default, better, *further), strict=True))


def keys(case: Case) -> list[str]:
    """A word for each row of a model, in the names of its files."""
    return ["default", "better", *(f"further{n}" for n in range(len(case.further)))]


def row(
    bench: Bench,
    item: Requirement,
    found: Mapping[str, list[Arrays] | str],
    answer: Callable[..., Any],
) -> Row:
    """The row of the requirement ``item``; ``found`` are the outputs of the standard builds."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        result = answer(require=(item.text,), out=name)
        seconds = time.perf_counter() - began
        chosen = recommended(result.choice_rows)
        builds = dict(bench.standard)
        if chosen is not None:
            ours = Build(_graph_of(chosen, bench, Path(name)), chosen.plan)
            builds[OURS] = ours
            graph = bench.standard[REDUCED].graph
            for candidate in result.engine.candidates if result.engine is not None else ():
                if not candidate.chosen:
                    plan = PrecisionPlan(FP16, frozenset(candidate.layers))
                    builds[candidate.name] = Build(graph, plan)
        # What a run adds is judged here; the standard ones are the same in each row.
        own = {n: v for n, v in builds.items() if bench.standard.get(n) is not v}
        outputs = {**found, **bench.outputs(own)}
        timing = bench.on_clock(builds, bench.case.timed(bench.samples[0]))
    validated = {OURS: chosen.passes.value} if chosen is not None else {}
    engines = [
        _engine(name, build, item, outputs[name], timing, bench.judge)
        for name, build in builds.items()
    ]
    missing = [
        Engine(name, 0, None, None, None, math.nan, False, failure=failure)
        for name, failure in bench.failures.items()
    ]
    right = [engine.name for engine in engines if engine.passes and engine.ms is not None]
    return Row(
        model=bench.name,
        requirement=item.text,
        cause=result.cause.value,
        choice=chosen.in_words(result.graph_rules) if chosen is not None else "none",
        seconds=seconds,
        out_of_time=result.out_of_time,
        engines=[
            *(replace(engine, validated=validated.get(engine.name, "")) for engine in engines),
            *missing,
        ],
        is_fastest=_is_fastest(timing, right),
        notes=[*timing.notes(), *filter(None, [timing.advice(REDUCED)])],
        versions=dict(timing.versions),
    )


def _engine(
    name: str,
    build: Build,
    item: Requirement,
    outputs: list[Arrays] | str,
    timing: Timing,
    judge: Judge,
) -> Engine:
    """One engine's line."""
    plan, fp16, fp32 = timing.plans[name], timing.ms(REDUCED), timing.ms(EXACT)
    ms = timing.ms(name)
    kept = saving_kept(ms, fp16, fp32)
    value = math.nan if isinstance(outputs, str) else judge.worst(item, outputs)
    return Engine(
        name=name,
        layers=len(build.plan.pinned),
        ms=None if math.isnan(ms) else ms,
        plain_ms=plan.plain.median_ms if plan.plain is not None else None,
        saving_kept=None if kept is None or math.isnan(kept) else kept,
        value=value,
        passes=item.score_of(value) <= 1.0,
        failure=" ".join(filter(None, [outputs if isinstance(outputs, str) else "", plan.failure])),
    )


def _graph_of(choice: Choice, bench: Bench, folder: Path) -> Graph:
    """The graph that the plan of a choice is for."""
    if choice.fitted:
        return Graph(load_model(folder / FITTED_MODEL).proto)
    if choice.repaired:
        return Graph(load_model(folder / REPAIRED_MODEL).proto)
    return bench.standard[REDUCED].graph


def _is_fastest(timing: Timing, right: Sequence[str]) -> bool | None:
    """Whether ours takes no measurably longer than any of ``right``; None where it is not one."""
    if OURS not in right:
        return None
    return all(
        timing.ms(OURS) <= timing.ms(name) or timing.equal(OURS, name)
        for name in right
        if name != OURS
    )


COLUMNS = (
    *("model", "requirement", "engine", "layers in FP32", "ms", "plain ms", "saving kept"),
    *("worst", "passes", "validated", "ours is the fastest", "s"),
)


def lines(row: Row) -> Iterator[list[str]]:
    """The lines of a row in the table: an engine each."""
    for engine in row.engines:
        is_ours = engine.name == OURS
        fastest = {True: "yes", False: "**no**", None: ""}[row.is_fastest]
        yield [
            row.model,
            row.requirement,
            f"**ours** ({row.choice})" if is_ours else engine.name,
            str(engine.layers) if engine.name != AUTOCAST else "",
            f"{engine.ms:.3f}" if engine.ms is not None else engine.failure[:60],
            f"{engine.plain_ms:.3f}" if engine.plain_ms is not None else "",
            f"{engine.saving_kept:.0%}" if engine.saving_kept is not None else "",
            f"{engine.value:.4g}",
            "yes" if engine.passes else "no",
            engine.validated,
            fastest if is_ours else "",
            f"{row.seconds:.0f}{', cut short' if row.out_of_time else ''}" if is_ours else "",
        ]


def as_json(row: Row) -> str:
    """The row as text, without NaN, which is no JSON."""
    data = asdict(row)
    for engine in data["engines"]:
        engine["value"] = None if not math.isfinite(engine["value"]) else engine["value"]
    return json.dumps(data, indent=1)


def _on_engine(module: str) -> OnEngine:
    def outputs(build: Build, samples: Sequence[Sample]) -> list[Arrays]:
        runner = TensorRTRunner(build.graph, samples, module, timeout_s=300.0)
        try:
            return list(runner.outputs(build.plan, samples))
        finally:
            runner.close()

    return outputs


def _answer(bench: Bench, module: str, emulate_on: str, budget: float) -> Callable[..., Any]:
    """What runs the product on a model."""
    shape = "x".join(map(str, bench.case.time_shape))
    (name,) = bench.samples[0].arrays
    last = bench.standard[REDUCED].graph.layers_at(FP16)[-1].name
    return partial(
        bisect_trt.bisect,
        bench.path,
        [sample.arrays for sample in bench.samples],
        runner="tensorrt",
        trt_module=module,
        emulate_on=emulate_on,
        time_shape=(f"{name}:{shape}",) if shape else (),
        budget=budget,
        # The engine's table of layers takes builds of its own and is not shown.
        mark=(last,),
        limits=ON_GPU if emulate_on == "cuda" else Limits(),
    )


def run(bench: Bench, out: Path, answer: Callable[..., Any]) -> None:
    """Writes and prints the rows of a model that ``out`` lacks.

    Raises:
        RuntimeError: FP16's engine gives nothing, so that its SNR is unknown.
    """
    found = bench.outputs(bench.standard)
    reduced = found[REDUCED]
    if isinstance(reduced, str):
        raise RuntimeError(f"FP16: {reduced}")
    for key, item in requirements(bench, reduced).items():
        file = _file(out, bench.name, key)
        # An engine that is not finite has no SNR that another could exceed.
        if file.exists() or math.isnan(item.limit):
            continue
        try:
            made = row(bench, item, found, answer)
        except Exception:  # one failing row does not end the others
            click.echo(f"{bench.name}, {item.text}: {traceback.format_exc()}")
            continue
        file.write_text(as_json(made))
        for line in lines(made):
            click.echo(f"| {' | '.join(line)} |")


def _file(out: Path, name: str, key: str) -> Path:
    return out / f"{name}.{key}.json"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(CASES)))
@click.option("--models", type=click.Path(path_type=Path), required=True, help="Their folder.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder for each row.")
@click.option("--prepare", is_flag=True, help="Make the models alone.")
@click.option("--emulate-on", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--budget", default=2.0, show_default=True, help="Minutes of each run.")
@click.option("--module", default="tensorrt_rtx", show_default=True, help="TensorRT's module.")
def main(
    names: tuple[str, ...],
    models: Path,
    out: Path | None,
    prepare: bool,
    emulate_on: str,
    budget: float,
    module: str,
) -> None:
    """Print a row as soon as it is there."""
    out = out or models / "rows"
    out.mkdir(parents=True, exist_ok=True)
    if not prepare:
        click.echo(f"`python -m benchmarks.engines.speed {' '.join(names)}`, {machine()}")
        click.echo(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    clock = partial(time_engines, module=module, builders=4, timeout_s=300.0)
    for name in names or CASES:
        case = CASES[name]
        try:
            if prepare:
                click.echo(f"{case.make(models)} {autocast(case, models)}")
            elif not all(_file(out, name, key).exists() for key in keys(case)):
                bench = bench_of(name, models, _on_engine(module), clock)
                run(bench, out, _answer(bench, module, emulate_on, budget))
        except Exception:  # one failing model does not end the others
            click.echo(f"{name}: {traceback.format_exc()}")


if __name__ == "__main__":
    main()
