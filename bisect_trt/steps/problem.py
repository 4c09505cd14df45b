"""Reads and checks what a run works on, before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from bisect_trt.base.display import some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Movers, Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import content_key
from bisect_trt.imports.entries import Form
from bisect_trt.inputs.augmentations import check_kinds
from bisect_trt.inputs.files import load_golden
from bisect_trt.inputs.perturbations import can_be_perturbed, can_perturb_lookups
from bisect_trt.inputs.samples import (
    few_ids,
    load_inputs,
    short_digest,
    suspicious_inputs,
    untested_sizes,
)
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.decisions import is_decision
from bisect_trt.metrics.parser import load_metrics, parse_requirements
from bisect_trt.metrics.requirements import Requirements
from bisect_trt.metrics.rounding import INFINITE_FROM
from bisect_trt.metrics.user_metric import UserMetric
from bisect_trt.model.cautions import cautions, doubles, refuse_unsupported
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import input_specs, length_axes
from bisect_trt.model.layers import Layer
from bisect_trt.model.lifted import Lifted, SourceModel, load_source
from bisect_trt.model.load import LoadedModel
from bisect_trt.model.lost_constants import weight_findings
from bisect_trt.model.mixed import MixedModel, load_mixed
from bisect_trt.model.outputs import (
    decided_outputs,
    judged_part,
    judged_part_sentence,
    names_of,
    tail_outputs,
)
from bisect_trt.model.precision_rules import FLOATS
from bisect_trt.model.roundings import list_movers
from bisect_trt.runners.reference import Lookups, Reference
from bisect_trt.runners.tensorrt.profile import profile_of, shape_of
from bisect_trt.settings import Settings
from bisect_trt.steps.import_plan import check_asked, import_notes, older_plan
from bisect_trt.steps.memory_need import check_need, need_of, usual_seconds
from bisect_trt.steps.saved_plan import SavedPlan, begun_at, held_layers, marked_layers
from bisect_trt.version import __version__


def odd_outputs(
    graph: Graph, requirements: Requirements, layers: Sequence[str]
) -> tuple[Finding, ...]:
    """Findings on outputs without a requirement, and on error bounds for classes or indices."""
    items = requirements.items
    if any(item.own for item in items):
        return ()
    found = []
    named = {str(item.output) for item in items if item.output is not None}
    everywhere = [item for item in items if item.output is None]
    unasked = sorted(set(graph.outputs) - named) if not everywhere else []
    if unasked:
        message = (
            f"no requirement looks at {some_of([repr(name) for name in unasked])}: but for "
            "infinities nothing there decides; outputs.csv has the errors"
        )
        found.append(Finding("unasked", unasked[0], message))
    bounds = [i.text for i in everywhere if not (is_decision(i.metric) or i.by_scale)]
    decided = sorted(decided_outputs(graph, layers)) if bounds else []
    if decided:
        message = (
            f"output {some_of([repr(name) for name in decided])} holds integers or truth "
            f"values, of which one other counts as an error of {bounds[0]}: ask for the share that "
            f"stays, --requirement '{decided[0]}:equal>=0.999', and name the outputs of the others"
        )
        found.append(Finding("decided", decided[0], message))
    return tuple(found)


@dataclass(frozen=True)
class Problem:
    """Model, inputs and requirements of one run, all of them usable.

    ``graph`` is the judged part of the ``whole`` model, with the outputs ``judged``, which are
    empty where all of it is judged. ``lifted`` says that the source is reduced already.
    ``layers`` can run at the settings' precision. No search sees ``holdout``.
    ``golden`` are the original framework's outputs, ``reference`` is the opened FP32 model,
    ``metrics`` are the user's own.
    ``held_pins`` stay in FP32 and ``kept_reduced`` reduced whatever the search finds. The engine
    does not take ``unsupported`` reduced; the lifted source keeps ``source_fp32`` in FP32.
    The search begins with ``begin``, pins of the ``older`` plan. Tables show the ``marked`` layers,
    all where it is None. ``usual_seconds`` estimates an emulated inference from the model.
    ``on_engine`` says that an engine decides. ``mixed`` is the mixed model of ``--reduced``.
    """

    settings: Settings
    model: LoadedModel
    graph: Graph
    whole: Graph
    judged: tuple[str, ...]
    lifted: bool
    samples: tuple[Sample, ...]
    holdout: tuple[Sample, ...]
    layers: tuple[Layer, ...]
    requirements: Requirements
    metrics: tuple[UserMetric, ...]
    golden: Arrays | None
    reference: Reference
    held_pins: frozenset[str]
    kept_reduced: frozenset[str]
    source_fp32: frozenset[str]
    older: SavedPlan | None
    begin: frozenset[str]
    marked: frozenset[str] | None
    findings: tuple[Finding, ...]
    usual_seconds: float
    unsupported: frozenset[str] = frozenset()
    on_engine: bool = False
    mixed: MixedModel | None = None

    def plan_of_whole(self, plan: PrecisionPlan) -> PrecisionPlan:
        """``plan`` for the model to ship, whose layers behind the judged part stay in FP32."""
        behind = {layer.name for layer in self.whole.layers}.difference(self.graph.names)
        return replace(plan, pinned=plan.pinned | behind, movers=Movers()) if behind else plan

    def holding(self, layers: Collection[str]) -> Problem:
        """The same problem with the unsupported ``layers`` held in FP32."""
        return replace(
            self,
            held_pins=self.held_pins.union(layers),
            unsupported=self.unsupported.union(layers),
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The ids of the layers that are searched, in network order."""
        held = self.held_pins | self.kept_reduced
        return tuple(layer.name for layer in self.layers if layer.name not in held)

    @cached_property
    def matrix_layers(self) -> frozenset[str]:
        """The layers that multiply matrices; others cost little in FP32."""
        return frozenset(layer.name for layer in self.graph.layers_at(Precision.TF32))

    @cached_property
    def base(self) -> PrecisionPlan:
        """The plan that reduces everything but the layers held in FP32."""
        movers = list_movers(self.graph, self.settings.precision).apart_from(self.kept_reduced)
        return PrecisionPlan(self.settings.precision, held=self.held_pins, movers=movers)

    @cached_property
    def chance(self) -> tuple[int, ...]:
        """The first numbers of all seeds of copies; others where the search begins at a plan."""
        # A plan that was searched with some copies must not be validated on the same ones.
        if self.older is None:
            return ()
        text = "\0".join([self.older.chance, *sorted(self.begin)])
        return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"),)

    @property
    def searched(self) -> dict[str, str]:
        """What plan.json says of the search, so that a later one is validated on other inputs."""
        seen = self.older.inputs if self.older is not None else frozenset[str]()
        digests = {short_digest(sample) for sample in self.samples}
        return {
            "chance": "".join(f"{n:016x}" for n in self.chance),
            "inputs": " ".join(sorted(seen | digests)),
        }

    @cached_property
    def lookups(self) -> Lookups:
        """The embeddings of token ids, for samples that cannot be perturbed themselves."""
        return Lookups(self.graph, self.settings.threads or 0)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """By input, the axis that is a sequence's length."""
        return length_axes(input_specs(self.graph.proto))

    @cached_property
    def moves_inputs(self) -> bool:
        """Whether some given input can be perturbed."""
        return any(can_be_perturbed(s.arrays, self.graph.discrete) for s in self.samples)

    @cached_property
    def moves_lookups(self) -> bool:
        """Whether no given input can be perturbed, but the embeddings of one can."""
        if self.moves_inputs or not self.graph.lookups:
            return False
        return any(can_perturb_lookups(self.lookups.of(s)) for s in self.samples)

    @cached_property
    def timed_sample(self) -> Sample:
        """The input that engines are timed on: the first one, resized as ``--time-shape`` says.

        Raises:
            BadInputError: ``--time-shape`` is wrong, or does not fit the model.
        """
        option, arrays = "--time-shape", dict(self.samples[0].arrays)
        specs = {spec.name: spec for spec in input_specs(self.graph.proto)}
        for text in self.settings.time_shape:
            name, shape = shape_of(option, text)
            if name not in specs:
                raise BadInputError(
                    f"{option} {text}: the model has no input {name!r}; it takes {', '.join(specs)}"
                )
            if len(shape) != arrays[name].ndim:
                raise BadInputError(
                    f"{option} {text}: {name!r} has {arrays[name].ndim} axes, not {len(shape)}"
                )
            for axis, (size, its) in enumerate(zip(shape, specs[name].shape or (), strict=False)):
                if isinstance(its, int) and its != size:
                    raise BadInputError(
                        f"{option} {text}: axis {axis} of {name!r} is fixed at {its}; export the "
                        "model with a dynamic axis"
                    )
            arrays[name] = np.resize(arrays[name], shape)
        return Sample(self.samples[0].name, arrays)

    @cached_property
    def key(self) -> str:
        """The hash of everything that each answer in the cache depends on, but the inputs."""
        requirements = self.requirements
        metrics = [metric.digest for metric in self.metrics]
        metrics += sorted(requirements.collective)
        scales = {name: scale.as_json() for name, scale in requirements.scales.items()}
        parts = (requirements.texts, metrics, scales, self.judged)
        return content_key(__version__, self.model.digest, *parts)


def load(settings: Settings, observer: Observer, *, searches: bool = True) -> Problem:
    """Read and check everything.

    Raises:
        BadInputError: names the file, tensor or option that cannot be used.
    """
    observer.step("load")
    source = load_source(settings.model)
    lifted, specs = source.lifted, input_specs(source.model.proto)
    if lifted is not None and not _is_chosen(settings):
        settings = replace(settings, precision=lifted.precision)
    settings, mixed = _with_mixed(settings, source)
    settings, older = _with_older(settings, source)
    check_kinds(settings.augmented)
    model, graph, judged, findings = _judged(settings, source)
    findings += [Finding("mixed", "", note) for note in (mixed.notes if mixed is not None else ())]
    refuse_unsupported(graph, model.name)
    # Before the inputs are read, which may take long.
    check_need(need_of(graph, settings), model.name)
    if older is not None and older.imported is not None:
        findings += [Finding("imported", "", note) for note in import_notes(older.imported)]
    seen = older.inputs if older is not None else frozenset[str]()
    samples, holdout, counted = load_inputs(settings, specs, observer, seen, searches=searches)
    findings += counted
    check_need(need_of(graph, settings, [*samples, *holdout]), model.name)
    problem = _problem(
        settings,
        source,
        model,
        graph,
        judged=judged,
        samples=samples,
        holdout=holdout,
        older=older,
        findings=findings,
    )
    problem = replace(problem, mixed=mixed)
    if settings.time_shape:  # nonsense is an error before the run
        _ = problem.timed_sample
    for finding in problem.findings:
        observer.finding(finding.message)
    return problem


def _with_older(settings: Settings, source: SourceModel) -> tuple[Settings, SavedPlan | None]:
    """The plan of ``--start-from``, None without it, and the settings with a mixed model's type.

    Raises:
        BadInputError: it is neither a plan nor another tool's list, or is at another precision.
    """
    if settings.start_from is None:
        return settings, None
    base = settings.precision if settings.precision.is_storage else None
    older = older_plan(settings.start_from, lambda: source, settings.trt_module, base)
    if older.imported is None or older.imported.form is not Form.MIXED:
        return settings, older
    return _at(settings, older.plan.base, str(settings.start_from)), older


def _is_chosen(settings: Settings) -> bool:
    """Whether the precision was given, or is not the default."""
    return settings.precision_given or settings.precision is not Precision.FP16


def _at(settings: Settings, precision: Precision, name: str) -> Settings:
    """The settings with the precision of a mixed model called ``name``.

    Raises:
        BadInputError: another one was given.
    """
    if _is_chosen(settings):
        check_asked(settings.precision, precision, name)
    return replace(settings, precision=precision, precision_given=True)


def _with_mixed(settings: Settings, source: SourceModel) -> tuple[Settings, MixedModel | None]:
    """The mixed model of ``--reduced``, and the settings with its precision.

    Raises:
        BadInputError: it cannot be judged against the model.
    """
    if settings.reduced is None:
        return settings, None
    if source.lifted is not None:
        raise BadInputError(
            f"--reduced {settings.reduced}: {source.model.name} is "
            f"{source.lifted.precision.value.upper()} already; give the FP32 model instead"
        )
    mixed = load_mixed(settings.reduced, source.graph, source.model.name)
    return _at(settings, mixed.precision, mixed.name), mixed


def _problem(
    settings: Settings,
    source: SourceModel,
    model: LoadedModel,
    graph: Graph,
    *,
    judged: tuple[str, ...],
    samples: Sequence[Sample],
    holdout: Sequence[Sample],
    older: SavedPlan | None,
    findings: Sequence[Finding],
) -> Problem:
    """The problem of a model and its inputs, with layers, requirements and further findings."""
    lifted, inputs = source.lifted, [*samples, *holdout]
    layers = _layers(graph, settings, model.name)
    names = [layer.name for layer in layers]
    held_pins, kept_reduced = held_layers(settings, layers)
    islands = lifted.islands if lifted is not None else frozenset[str]()
    source_fp32 = islands.intersection(names) - kept_reduced
    held_pins |= source_fp32
    searched = [name for name in names if name not in held_pins | kept_reduced]
    begin, of_older = begun_at(older, searched)
    requirements, metrics = _requirements(settings, graph, lifted)
    if settings.profile:  # nonsense is an error with every runner
        profile_of(graph.proto, inputs, settings.profile)
    return Problem(
        settings=settings,
        model=model,
        graph=graph,
        whole=source.graph if judged else graph,
        judged=judged,
        lifted=lifted is not None,
        samples=tuple(samples),
        holdout=tuple(holdout),
        layers=layers,
        requirements=requirements,
        metrics=metrics,
        golden=load_golden(settings, graph, len(samples)),
        reference=Reference(graph, model.name, settings.threads or 0, settings.limits.large_bytes),
        held_pins=held_pins,
        kept_reduced=kept_reduced,
        source_fp32=source_fp32,
        older=older,
        begin=begin,
        marked=marked_layers(settings, graph, layers),
        findings=(
            *findings,
            *_input_findings(samples),
            *cautions(graph),
            *weight_findings(graph, settings.precision),
            *untested_sizes(input_specs(source.model.proto), inputs),
            *few_ids(graph, samples),
            *odd_outputs(graph, requirements, names),
            *_idle_misses(settings, requirements),
            *of_older,
        ),
        usual_seconds=usual_seconds(graph, samples),
    )


def _judged(
    settings: Settings, source: SourceModel
) -> tuple[LoadedModel, Graph, tuple[str, ...], list[Finding]]:
    """The part of the source that is judged, its outputs if it is not the whole, and findings."""
    model, graph, lifted = source.model, source.graph, source.lifted
    findings = []
    if lifted is not None:
        kind = "lifted" if lifted.reduced else "stored-reduced"
        findings.append(Finding(kind, "", lifted.sentence))
    if settings.outputs:
        outputs, cut_at = names_of(settings.outputs, model.proto), list[str]()
    else:
        outputs, cut_at = tail_outputs(model.proto, of_rows=not settings.require)
    if outputs:
        model = replace(model, proto=judged_part(model.proto, outputs))
        graph = replace(graph, proto=model.proto, stored_outputs={})
        findings.append(Finding("judged-part", outputs[0], judged_part_sentence(outputs, cut_at)))
    return model, graph, tuple(outputs), findings


def _layers(graph: Graph, settings: Settings, name: str) -> tuple[Layer, ...]:
    """The layers that can run at the settings' precision.

    Raises:
        BadInputError: there are none; says why.
    """
    layers = graph.layers_at(settings.precision)
    if not layers:
        others = sorted({f"{n.domain}.{n.op_type}" for n in graph.proto.graph.node if n.domain})
        why = "integer, quantised or already reduced models have no FP32 layers"
        if others:
            why = f"{others[0]} and other operators that are not ONNX's own are never reduced"
        if doubles(graph):
            why = "what computes in double precision is never reduced: cast to float in the model"
        raise BadInputError(
            f"{name}: no layer can run in {settings.precision.value}: there is nothing to search "
            f"({why})"
        )
    return layers


def _requirements(
    settings: Settings, graph: Graph, lifted: Lifted | None
) -> tuple[Requirements, tuple[UserMetric, ...]]:
    """The requirements on the judged outputs, and the user's metrics in them."""
    metrics, collective = load_metrics(settings.metric)
    decided = [name for name in graph.outputs if graph.types.type_of(name) not in FLOATS]
    found = parse_requirements(settings.require, graph.outputs, metrics, collective, decided)
    # What the source stores as FP16 is infinite where FP16 ends, whatever the FP32 reference says.
    if lifted is not None and (limit := INFINITE_FROM.get(lifted.precision)) is not None:
        stored = [name for name in graph.outputs if name in lifted.outputs]
        found = replace(found, limits=dict.fromkeys(stored, limit))
    return found, (*metrics.values(), *collective.values())


def _input_findings(samples: Sequence[Sample]) -> list[Finding]:
    sentences = suspicious_inputs(samples)
    return [Finding("input", sentence.partition(":")[0], sentence) for sentence in sentences]


def _idle_misses(settings: Settings, requirements: Requirements) -> list[Finding]:
    """A finding if ``--allow-misses`` was given and the requirement judges inputs together."""
    if not requirements.of_sets or settings.share_of_given >= 1.0:
        return []
    message = (
        f"--allow-misses {settings.allow_misses or 0.0:g} does nothing here: a requirement is on "
        "all inputs together, and none may miss"
    )
    return [Finding("allow-misses", "", message)]
