"""Runs a reverse model: one forward pass, then one backward pass for each weighing of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.limits import free_bytes, in_words
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.gradients import ForwardValues, ReverseModel, to_reverse
from bisect_trt.model.graph import Graph
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.node_by_node import NodeByNode
from bisect_trt.runners.ort_session import failure_of_session, opened, session_options
from bisect_trt.runners.values import Value, caller, owned, value_of, viewed

MAX_KEPT_BYTES = 8 << 30
"""The most bytes of activations and errors that a pass keeps."""

_WHERE = "the reverse model"


@dataclass(frozen=True)
class FirstOrderEffects:
    """What each layer's own error does to weighed sums of the output elements, to first order.

    ``effects``: by layer, shape (weighings,); zero where the outputs do not depend on the layer.
    ``broken``: layers that have none because their own error is not finite.
    ``uncovered``: all layers that have none; before an operator without a rule, too.
    """

    effects: Mapping[str, NDArray[np.float32]]
    broken: frozenset[str]
    uncovered: frozenset[str]


def first_order_effects(
    graph: Graph,
    nodes: NodeByNode,
    constants: ConstantStore,
    sample: Sample,
    precision: Precision,
    weighings: Sequence[Arrays],
    threads: int = 0,
    most_bytes: int = MAX_KEPT_BYTES,
) -> FirstOrderEffects:
    """The effects of all layers of ``graph`` that can run at ``precision``.

    Args:
        graph: the model that ``nodes`` executes with ``constants``.
        nodes: gives the exact values and each layer's own error.
        constants: the model's constants.
        sample: the input.
        precision: what each layer alone is reduced to.
        weighings: the weights of the output elements, by output name; one backward pass each.
        threads: the limit of one call; 0 for all cores.
        most_bytes: the limit of what the forward pass keeps; half of the free memory is one too.

    Raises:
        RunnerFailedError: a node or the reverse model cannot run, or its values need too much
            memory.
        MachineError: there is not enough memory.
    """
    known = _known(graph, nodes, sample)
    reverse = to_reverse(graph, precision, known, list(weighings[0]))
    most = min(most_bytes, (free_bytes() or most_bytes) // 2)
    needed = sum(4 * prod(known.shapes[n]) for n in (*reverse.reads, *reverse.errors))
    if needed > most:
        raise RunnerFailedError(f"{_WHERE}: its values take more than {in_words(most)}")
    forward = _Forward(nodes, constants, sample, precision, reverse)
    rows = _backward(reverse, forward.fed, weighings, threads)
    table = np.stack(rows, axis=1)
    effects = dict(zip(reverse.layers, table, strict=True))
    names = [layer.name for layer in graph.layers_at(precision)]
    found = {n: effects.get(n, np.zeros(len(weighings), np.float32)) for n in names}
    infinite = {n for n, row in found.items() if not np.isfinite(row).all()}
    broken = frozenset(forward.broken)
    return FirstOrderEffects(found, broken, reverse.uncovered | infinite | broken)


def _known(graph: Graph, nodes: NodeByNode, sample: Sample) -> ForwardValues:
    """The shapes of all tensors, and the values of those of integers, of a pass of its own."""
    # Only with them is it known which of the values are needed: the others take much memory.
    constants = graph.constants
    shapes = {name: tuple(constants[name].shape) for name in constants}
    shapes |= {name: tuple(array.shape) for name, array in sample.arrays.items()}
    integers = {n: constants[n] for n in constants if constants[n].dtype.kind in "iu"}
    integers |= {n: a for n, a in sample.arrays.items() if a.dtype.kind in "iu"}
    for step, exact, _ in nodes.introduced(sample, Precision.FP32):
        for name, value in zip(step.outputs, exact, strict=True):
            if value.is_tensor():
                shapes[name] = tuple(value.shape())
                if value.data_type() in ("tensor(int64)", "tensor(int32)"):
                    integers[name] = value.numpy()
    return ForwardValues(shapes, integers)


class _Forward:
    """A forward pass: ``fed`` is what ``reverse`` takes, ``broken`` are layers that overflow."""

    def __init__(
        self,
        nodes: NodeByNode,
        constants: ConstantStore,
        sample: Sample,
        precision: Precision,
        reverse: ReverseModel,
    ) -> None:
        self.broken: set[str] = set()
        self.fed: dict[str, ort.OrtValue | Value] = {}
        for name in reverse.reads:
            if name in sample.arrays:
                self.fed[name] = owned(sample.arrays[name])
            elif name in constants:
                self.fed[name] = constants.owner(name)
        reads = frozenset(reverse.reads)
        for step, exact, low in nodes.introduced(sample, precision):
            for name, value, reduced in zip(step.outputs, exact, low, strict=True):
                if name in reads:
                    self.fed[name] = value
                if low is not exact and value.data_type() == "tensor(float)":
                    error = self._error(step.name, viewed(reduced), viewed(value))
                    if name in reverse.errors:
                        self.fed[reverse.errors[name]] = owned(error)

    def _error(
        self, layer: str, reduced: NDArray[np.float32], exact: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        with np.errstate(invalid="ignore"):
            error = reduced - exact
        if not np.isfinite(error).all():
            self.broken.add(layer)
        return error


def _backward(
    reverse: ReverseModel,
    fed: Mapping[str, ort.OrtValue | Value],
    weighings: Sequence[Arrays],
    threads: int,
) -> list[NDArray[np.float32]]:
    """The effects of the layers for each weighing."""
    try:
        options = session_options(threads)
        options.enable_cpu_mem_arena = True  # faster, and the session is closed after the passes
        session = opened(reverse.proto, options)
        call = caller(session)
        values = {n: value_of(v) if isinstance(v, ort.OrtValue) else v for n, v in fed.items()}
        rows = []
        for weighing in weighings:
            owners = {reverse.weights[n]: owned(a) for n, a in weighing.items()}
            results = call(
                values | {n: value_of(o) for n, o in owners.items()}, [reverse.effects], None
            )
            rows.append(viewed(results[0]).copy())
        return rows
    except Exception as error:
        raise failure_of_session(_WHERE, error) from error
