"""What must hold of any network and any plan: relations, not tolerances."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx
import onnxruntime as ort

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import Graph, to_emulated, to_typed
from bisect_trt.model.cost import estimated_table
from bisect_trt.model.load import load_model
from bisect_trt.runners.emulator import EmulatedRunner
from tests.execute import run
from tests.fuzz.graphs import Network
from tests.fuzz.interpreter import Interpreter, Result, to_type
from tests.fuzz.lists import Reading, readings
from tests.fuzz.net import Arrays
from tests.fuzz.operators import Array
from tests.fuzz.transforms import SAME, with_identity

LISTS = "what import reads is what export wrote"
STORED = "__stored"
"""The end of the names of tensors of 16 bits in an emulated model."""


@dataclass(frozen=True)
class Failure:
    """A relation that does not hold, and what was seen instead.

    ``raised`` says which exception came from where; empty where none did.
    """

    relation: str
    detail: str
    raised: str = ""

    def is_like(self, other: Failure) -> bool:
        """Whether this is the same kind of failure: what a smaller network must show too."""
        return (self.relation, self.raised) == (other.relation, other.raised)


@dataclass(frozen=True)
class Case:
    """A network as the product reads it, and a plan for it; ``feeds`` are inputs."""

    model: onnx.ModelProto = field(repr=False)
    feeds: tuple[Arrays, ...] = field(repr=False)
    plan: PrecisionPlan
    seed: int = 0

    @cached_property
    def graph(self) -> Graph:
        """The model with its functions written out."""
        return Graph(load_model(self.model).proto)

    @cached_property
    def typed(self) -> onnx.ModelProto:
        """The plan as types."""
        return to_typed(self.graph, self.plan)

    @cached_property
    def emulated(self) -> onnx.ModelProto:
        """The plan as roundings."""
        return to_emulated(self.graph, self.plan)

    @cached_property
    def outputs(self) -> list[Arrays]:
        """The outputs of the emulated model."""
        return [run(self.emulated, feed) for feed in self.feeds]

    @cached_property
    def lists(self) -> list[Reading]:
        """The plan in the forms of other tools, read again."""
        return list(readings(self.graph, self.plan))

    def random(self, what: str) -> np.random.Generator:
        """Random numbers for the relation ``what``."""
        return np.random.default_rng([self.seed, *what.encode()])


Relation = Callable[[Case], Iterator[str]]


def cases(network: Network) -> Iterator[Case]:
    """The plans that a network is judged by: both precisions, some layers pinned."""
    random = np.random.default_rng([network.recipe.seed, 3])
    names = [layer.name for layer in Graph(load_model(network.model).proto).layers]
    for base in (Precision.FP16, Precision.BF16):
        share = float(random.choice([0.0, 0.0, 0.2, 0.5]))
        pinned = frozenset(n for n in names if random.random() < share)
        yield Case(network.model, network.feeds, PrecisionPlan(base, pinned), network.recipe.seed)


def raised_in(relation: str, error: Exception) -> Failure:
    """The failure that an exception is."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} at {last.filename.rpartition('/')[2]}:{last.lineno}"
    return Failure(relation, f"{where}: {str(error)[:200]}", where)


def failures(case: Case) -> list[Failure]:
    """The relations that do not hold; an exception of the product is one."""
    found = []
    for name, relation in RELATIONS.items():
        try:
            found += [Failure(name, detail) for detail in relation(case)]
        except Exception as error:  # the product's, of whatever kind
            found.append(raised_in(name, error))
    return found


def same(one: Arrays, other: Arrays) -> str:
    """Says which output differs by a bit; empty if none does."""
    for name, array in one.items():
        if name not in other:
            return f"output {name} is missing"
        if array.dtype != other[name].dtype:
            return f"output {name} is {other[name].dtype} instead of {array.dtype}"
        if not np.array_equal(array, other[name], equal_nan=array.dtype.kind == "f"):
            return f"output {name} differs"
    return ""


def kept_is_reference(case: Case) -> Iterator[str]:
    """Everything kept in FP32 is the reference, bit for bit."""
    names = [layer.name for layer in case.graph.layers]
    whole = PrecisionPlan(case.plan.base, names)
    for write in (to_typed, to_emulated):
        model = write(case.graph, whole)
        for feed in case.feeds[:1]:
            differs = same(run(case.graph.proto, feed), run(model, feed))
            if differs:
                yield f"{write.__name__}: {differs}"


def typed_is_valid(case: Case) -> Iterator[str]:
    """The typed model passes ONNX's check with strict inference where the original does."""
    try:
        onnx.checker.check_model(case.model, full_check=True)
        onnx.shape_inference.infer_shapes(case.model, check_type=True, strict_mode=True)
    except Exception:  # ONNX cannot infer through a GroupNormalization
        return
    onnx.checker.check_model(case.typed, full_check=True)
    onnx.shape_inference.infer_shapes(case.typed, check_type=True, strict_mode=True)
    for kept, written in zip(case.model.graph.output, case.typed.graph.output, strict=True):
        if kept.name != written.name:
            yield f"output {kept.name} became {written.name}"


def typed_loads(case: Case) -> Iterator[str]:
    """ONNX Runtime loads the typed model, where it has kernels of these types."""
    if case.plan.base is not Precision.FP16:  # the CPU provider has no kernels of BF16
        return
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # Its fusions take casts in, and have no kernel for what they make of them.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        ort.InferenceSession(case.typed.SerializeToString(), options)
    except Exception as error:  # ONNX Runtime's have no common base
        # It has few kernels of FP16: what it lacks is an engine's matter.
        if "NOT_IMPLEMENTED" not in str(error):
            yield str(error)[:200]


def typed_is_emulated(case: Case) -> Iterator[str]:
    """The typed model, interpreted by its types, gives what the emulated one gives.

    Each node reads the emulated values. Elementwise and moving operators agree bit for bit, sums
    within what their order explains.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.emulated)
    present = {o.name for o in model.graph.output}
    inner = [o for n in model.graph.node for o in n.output if o and not o.endswith(STORED)]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in inner if n not in present)
    given = {n.input[0]: n.output[0] for n in case.typed.graph.node if n.op_type == "Cast"}
    for feed in case.feeds[:2]:
        values = run(model, feed) | feed
        wrong: list[str] = []

        def watch(
            name: str,
            node: onnx.NodeProto,
            found: Result,
            values: Arrays = values,
            wrong: list[str] = wrong,
        ) -> Array | None:
            shared = name if name in values else given.get(name, "")
            if shared not in values or values[shared].dtype.kind != found.values.dtype.kind:
                return None
            differs = found.disagreement(values[shared])
            if differs:
                wrong.append(f"{node.op_type} {node.name}: {name}: {differs}")
            return to_type(values[shared], found.dtype)

        Interpreter(case.typed, watch).run(feed)
        yield from wrong[:1]


def twice_is_same(case: Case) -> Iterator[str]:
    """Writing a plan again gives the same bytes."""
    again = Graph(load_model(case.model).proto)
    if to_typed(again, case.plan).SerializeToString() != case.typed.SerializeToString():
        yield "the typed model differs"
    if to_emulated(again, case.plan).SerializeToString() != case.emulated.SerializeToString():
        yield "the emulated model differs"


def runner_is_model(case: Case) -> Iterator[str]:
    """The runner of searches gives non-finite numbers where the emulated model does."""
    runner = EmulatedRunner(case.graph, case.plan.base, threads=1)
    samples = [Sample(f"s{i}", feed) for i, feed in enumerate(case.feeds[:2])]
    for found, expected in zip(runner.outputs(case.plan, samples), case.outputs, strict=False):
        for name, array in expected.items():
            if array.dtype.kind == "f" and not np.array_equal(
                np.isfinite(array), np.isfinite(found[name])
            ):
                yield f"output {name} is not finite at other places"


def lists_read_back(case: Case) -> Iterator[str]:
    """What ``import`` reads is the plan that ``export`` wrote."""
    yield from (f"{r.form}: {r.detail}" for r in case.lists if r.outcome == "differs")


def more_costs_more(case: Case) -> Iterator[str]:
    """A plan that keeps more layers is never predicted to be faster."""
    shapes = {name: array.shape for name, array in case.feeds[0].items()}
    table = estimated_table(case.graph, shapes, case.plan.base)
    random = case.random("cost")
    names = [layer.name for layer in case.graph.layers_at(case.plan.base)]
    pinned: frozenset[str] = frozenset()
    before = table.predicted(PrecisionPlan(case.plan.base))
    for name in random.permutation(names):
        pinned |= {str(name)}
        now = table.predicted(PrecisionPlan(case.plan.base, pinned))
        if now < before * (1 - 1e-12):
            yield f"{name} kept too: {now} after {before}"
            return
        before = now


def transforms_change_nothing(case: Case) -> Iterator[str]:
    """Two other forms of the model have the same answer, where a plan is by kind of operator."""
    kinds = _some_kinds(case)
    expected = _by_kind(case, case.model, kinds)
    for name in case.random("forms").choice(list(SAME), 2, replace=False):
        other = SAME[name](case.model, case.random(name))
        differs = same(expected, _by_kind(case, other, kinds))
        if differs:
            yield f"{name}, with {sorted(kinds)} pinned: {differs}"


def identity_changes_nothing(case: Case) -> Iterator[str]:
    """An Identity behind a reduced layer changes no output."""
    kinds = _some_kinds(case) - {"Identity"}
    outputs = set(case.graph.outputs)
    layers = case.graph.layers_at(case.plan.base)
    behind = {o for x in layers if x.op not in kinds for o in x.outputs} - outputs
    # What ends in a body or a function has other readers than the main graph's nodes.
    behind &= {o for n in case.model.graph.node for o in n.output}
    if not behind:
        return
    other = with_identity(case.model, behind, case.random("identity"))
    differs = same(_by_kind(case, case.model, kinds), _by_kind(case, other, kinds))
    if differs:
        yield f"with {sorted(kinds)} pinned: {differs}"


def _some_kinds(case: Case) -> set[str]:
    random = case.random("kinds")
    kinds = sorted({layer.op for layer in case.graph.layers})
    return {kind for kind in kinds if random.random() < 0.3}


def _by_kind(case: Case, model: onnx.ModelProto, kinds: Collection[str]) -> Arrays:
    """The emulated outputs of ``model`` with all layers of ``kinds`` pinned."""
    graph = Graph(load_model(model).proto)
    pinned = [layer.name for layer in graph.layers if layer.op in kinds]
    return run(to_emulated(graph, PrecisionPlan(case.plan.base, pinned)), case.feeds[-1])


RELATIONS: dict[str, Relation] = {
    "everything kept in FP32 is the reference": kept_is_reference,
    "the typed model is valid": typed_is_valid,
    "the typed model loads": typed_loads,
    "typed and emulated agree": typed_is_emulated,
    "twice is the same": twice_is_same,
    "the runner agrees with the model": runner_is_model,
    LISTS: lists_read_back,
    "keeping more costs more": more_costs_more,
    "another form has the same answer": transforms_change_nothing,
    "an Identity changes nothing": identity_changes_nothing,
}
"""Every relation of a network and a plan, none of which searches."""
