"""``load``: what a run works on, read and checked before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx

from bisect_trt.base.display import some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Movers, Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import content_key
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
from bisect_trt.metrics.arrays import Arrays, largest_finite
from bisect_trt.metrics.decisions import is_decision
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.metrics.parser import load_metrics, parse_requirements
from bisect_trt.metrics.requirements import Requirements
from bisect_trt.metrics.rounding import INFINITE_FROM
from bisect_trt.metrics.user_metric import UserMetric
from bisect_trt.model.cautions import cautions, doubles, refuse_unsupported
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import input_specs, length_axes
from bisect_trt.model.layernorm import Fused, fuse_layernorm
from bisect_trt.model.layers import Layer
from bisect_trt.model.lifted import load_source
from bisect_trt.model.load import LoadedModel
from bisect_trt.model.lost_constants import weight_findings
from bisect_trt.model.outputs import (
    decided_outputs,
    judged_part,
    judged_part_sentence,
    names_of,
    tail_outputs,
)
from bisect_trt.model.precision_rules import FLOATS
from bisect_trt.model.roundings import list_movers
from bisect_trt.runners.ort_session import reference_session, run_all
from bisect_trt.runners.reference import Lookups, Reference
from bisect_trt.runners.tensorrt.profile import profile_of
from bisect_trt.settings import Settings
from bisect_trt.steps.memory_need import check_need, need_of, need_of_samples, usual_seconds
from bisect_trt.steps.saved_plan import SavedPlan, begun_at, held_layers, marked_layers, read_plan
from bisect_trt.version import __version__

MAX_REWRITE_ERROR = 1e-6
"""Of an output's largest value, in FP32."""


def rewritten(model: onnx.ModelProto, samples: Sequence[Sample], name: str) -> Fused:
    """``model`` after a rewrite, checked on the inputs.

    Raises:
        BadInputError: nothing matches, or an output moves by more than :data:`MAX_REWRITE_ERROR`.
    """
    fused = {"layernorm": fuse_layernorm}[name](model)
    sessions = [reference_session(source) for source in (model, fused.model)]
    for sample in samples:
        old, new = (run_all(session, sample.arrays, sample.name) for session in sessions)
        for output, expected in old.items():
            error = tensor_error(expected, new[output])
            size = largest_finite(expected) if expected.dtype.kind == "f" else 0.0
            if error.finite and error.max_abs <= MAX_REWRITE_ERROR * size:
                continue
            moved = "becomes NaN or infinite"
            if error.finite:
                share = error.max_abs / max(size, 1e-30)
                moved = f"moves by {error.max_abs:.2g} ({share:.1g} of its largest value)"
            raise BadInputError(
                f"--rewrite {name}: output {output!r} {moved} in FP32 on {sample.name}; that is "
                f"more than {MAX_REWRITE_ERROR:g}, so the rewrite is refused"
            )
    return fused


def odd_outputs(
    graph: Graph, requirements: Requirements, layers: Sequence[str]
) -> tuple[Finding, ...]:
    """Outputs that no requirement looks at, and error bounds asked of classes or indices."""
    items = requirements.items
    if any(item.own for item in items):
        return ()
    found = []
    asked = {str(item.output) for item in items if item.output is not None}
    everywhere = [item for item in items if item.output is None]
    unasked = sorted(set(graph.outputs) - asked) if not everywhere else []
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


_ALL_TOGETHER = (
    "--allow-misses {:g} does nothing here: a requirement is on all inputs together, and none may "
    "miss"
)


@dataclass(frozen=True)
class Problem:
    """Model, inputs and requirements of one run, all of them usable.

    ``graph`` is what is judged, with the outputs ``judged`` where that is a part of the ``whole``.
    ``holdout`` are inputs that no search sees, ``layers`` those that can run at the settings'
    precision, ``golden`` the original framework's outputs. ``reference`` is the opened FP32 model,
    ``metrics`` are the user's own, ``findings`` what could be said before anything ran.
    ``rewritten`` maps the layers that ``--rewrite`` made to those they stand for.
    ``held_pins`` and ``kept_reduced`` are layers that stay in FP32, or reduced, whatever the search
    would say; ``unsupported`` are the held pins that the engine does not take reduced, and
    ``source_fp32`` those that a source which is reduced already (``lifted``) keeps so. ``begin``
    are the pins of the ``older`` plan that it begins with. ``marked`` are the layers that the
    tables show, None for all. ``usual_seconds`` is about what an emulated inference takes, counted
    from the model. ``on_engine`` is true where an engine has the last word.
    """

    settings: Settings
    model: LoadedModel
    graph: Graph
    samples: tuple[Sample, ...]
    holdout: tuple[Sample, ...]
    layers: tuple[Layer, ...]
    requirements: Requirements
    golden: Arrays | None
    rewritten: Mapping[str, tuple[str, ...]]
    findings: tuple[Finding, ...]
    reference: Reference
    usual_seconds: float
    metrics: tuple[UserMetric, ...] = ()
    held_pins: frozenset[str] = frozenset()
    kept_reduced: frozenset[str] = frozenset()
    begin: frozenset[str] = frozenset()
    older: SavedPlan | None = None
    marked: frozenset[str] | None = None
    on_engine: bool = False
    unsupported: frozenset[str] = frozenset()
    lifted: bool = False
    source_fp32: frozenset[str] = frozenset()
    whole: Graph = field(default_factory=lambda: Graph(onnx.ModelProto()))
    judged: tuple[str, ...] = ()

    def plan_of_whole(self, plan: PrecisionPlan) -> PrecisionPlan:
        """``plan`` for the model to ship, whose layers behind the judged part stay in FP32."""
        behind = {layer.name for layer in self.whole.layers}.difference(self.graph.names)
        return replace(plan, pinned=plan.pinned | behind, movers=Movers()) if behind else plan

    def holding(self, layers: Collection[str]) -> Problem:
        """The same with ``layers`` held in FP32, which do not run reduced."""
        return replace(
            self,
            held_pins=self.held_pins.union(layers),
            unsupported=self.unsupported.union(layers),
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The ids of the layers that are searched, in network order: those that are not held."""
        held = self.held_pins | self.kept_reduced
        return tuple(layer.name for layer in self.layers if layer.name not in held)

    @cached_property
    def base(self) -> PrecisionPlan:
        """Everything reduced but for the layers that are held in FP32."""
        movers = list_movers(self.graph, self.settings.precision).apart_from(self.kept_reduced)
        return PrecisionPlan(self.settings.precision, held=self.held_pins, movers=movers)

    @cached_property
    def chance(self) -> tuple[int, ...]:
        """What copies' seeds begin with: another number where a search begins at a plan."""
        if self.older is None:
            return ()
        told = "\0".join([self.older.chance, *sorted(self.begin)])
        return (int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big"),)

    @property
    def searched(self) -> dict[str, str]:
        """What a plan of this search has seen, so that a later search tests on other inputs."""
        seen = self.older.inputs if self.older is not None else frozenset[str]()
        mine = {short_digest(sample) for sample in self.samples}
        return {
            "chance": "".join(f"{n:016x}" for n in self.chance),
            "inputs": " ".join(sorted(seen | mine)),
        }

    @cached_property
    def lookups(self) -> Lookups:
        """What token ids stand for, for samples that cannot be moved themselves."""
        return Lookups(self.graph)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """By input, the axis that is a sequence's length."""
        return length_axes(input_specs(self.graph.proto))

    @cached_property
    def moves_inputs(self) -> bool:
        """Whether some given input can be moved a little."""
        return any(can_be_perturbed(s.arrays, self.graph.discrete) for s in self.samples)

    @cached_property
    def moves_lookups(self) -> bool:
        """Whether none can, and what some given input looks up can."""
        if self.moves_inputs or not self.graph.lookups:
            return False
        return any(can_perturb_lookups(self.lookups.of(s)) for s in self.samples)

    @cached_property
    def key(self) -> str:
        """The content that every answer of the cache depends on, the inputs apart."""
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
    model, lifted = source.model, source.lifted
    if lifted is not None and settings.precision is Precision.FP16:  # the default
        settings = replace(settings, precision=lifted.precision)
    check_kinds(settings.augmented)
    graph, specs = source.graph, input_specs(model.proto)
    whole, outputs, cut_at = graph, list[str](), list[str]()
    if settings.outputs:
        outputs = names_of(settings.outputs, model.proto)
    else:
        outputs, cut_at = tail_outputs(model.proto, of_rows=not settings.require)
    if outputs:
        model = replace(model, proto=judged_part(model.proto, outputs))
        graph = replace(graph, proto=model.proto, stored_outputs={})
    refuse_unsupported(graph, model.name)
    check_need(need_of(graph, settings, specs), model.name)
    older = read_plan(settings.start_from) if settings.start_from is not None else None
    seen = older.inputs if older is not None else frozenset[str]()
    samples, holdout, counted = load_inputs(settings, specs, observer, seen, searches=searches)
    inputs = [*samples, *holdout]
    check_need(need_of_samples(graph, settings, inputs), model.name)
    replaced: Mapping[str, tuple[str, ...]] = {}
    if settings.rewrite is not None:
        fused = rewritten(model.proto, samples, settings.rewrite)
        replaced = fused.replaced
        digest = f"{model.digest}+{settings.rewrite}"
        model = replace(model, proto=fused.model, digest=digest, written_out=False)
        graph = replace(graph, proto=model.proto)
    layers = _layers(graph, settings, model.name)
    held_pins, kept_reduced = held_layers(settings, layers)
    source_fp32 = frozenset[str]()
    if lifted is not None:
        source_fp32 = lifted.islands.intersection(x.name for x in layers) - kept_reduced
    held_pins |= source_fp32
    searched = [x.name for x in layers if x.name not in held_pins | kept_reduced]
    begin, of_older = begun_at(older, searched)
    metrics, collective = load_metrics(settings.metrics)
    decided = [name for name in graph.outputs if graph.types.type_of(name) not in FLOATS]
    requirements = parse_requirements(settings.require, graph.outputs, metrics, collective, decided)
    if lifted is not None and (limit := INFINITE_FROM.get(lifted.precision)) is not None:
        stored = [name for name in graph.outputs if name in lifted.outputs]
        requirements = replace(requirements, limits=dict.fromkeys(stored, limit))
    if settings.profiles:  # nonsense is an error with every runner
        profile_of(graph.proto, inputs, settings.profiles)
    golden = load_golden(settings, graph, len(samples))
    findings = list[Finding]()
    if lifted is not None:
        kind = "lifted" if lifted.reduced else "stored-reduced"
        findings.append(Finding(kind, "", lifted.sentence))
    if outputs:
        findings.append(Finding("judged-part", outputs[0], judged_part_sentence(outputs, cut_at)))
    findings += counted
    if replaced:
        message = (
            f"{len(replaced)} LayerNorms were rewritten as one operator each; model.rewritten.onnx "
            "is what the plan is for"
        )
        findings.append(Finding("rewrite", next(iter(replaced)), message))
    for sentence in suspicious_inputs(samples):
        findings.append(Finding("input", sentence.partition(":")[0], sentence))
    findings += [*cautions(graph), *weight_findings(graph, settings.precision)]
    findings += [*untested_sizes(specs, inputs), *few_ids(graph, samples)]
    findings += odd_outputs(graph, requirements, [layer.name for layer in layers])
    if requirements.of_sets and settings.asked_of_given < 1.0:
        message = _ALL_TOGETHER.format(settings.allow_misses or 0.0)
        findings.append(Finding("allow-misses", "", message))
    if of_older is not None:
        findings.append(of_older)
    for finding in findings:
        observer.finding(finding.message)
    return Problem(
        settings=settings,
        model=model,
        graph=graph,
        samples=tuple(samples),
        holdout=tuple(holdout),
        layers=layers,
        requirements=requirements,
        golden=golden,
        rewritten=replaced,
        findings=tuple(findings),
        reference=Reference(graph, model.name),
        usual_seconds=usual_seconds(graph, samples),
        metrics=(*metrics.values(), *collective.values()),
        held_pins=held_pins,
        kept_reduced=kept_reduced,
        begin=begin,
        older=older,
        marked=marked_layers(settings, graph, layers),
        lifted=lifted is not None,
        source_fp32=source_fp32,
        whole=whole if outputs else graph,
        judged=tuple(outputs),
    )


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
