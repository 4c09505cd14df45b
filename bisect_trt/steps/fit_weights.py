"""Chooses the roundings of a network's weights on samples, a layer at a time."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.model.graph import ExactConstant, Graph
from bisect_trt.model.save import weights_size
from bisect_trt.repair.matrices import (
    Matrices,
    MatrixLayer,
    from_matrices,
    matrix_layers,
    rows_of,
    to_matrices,
)
from bisect_trt.repair.weights import Choice, Moments, choose
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.repair import problem_on, read_behind, whole_of
from bisect_trt.steps.samples import SEARCH_STREAM, augmented, perturbs

GIVEN = 64
"""Given inputs on which weights are chosen at most."""

COPIES = 10
"""Perturbed and augmented inputs that are made of each kind."""

FIT_TIME_S = 120.0
"""How long the inferences of a fit usually take at most: else there are fewer inputs."""

LEAST_SAMPLES = 4
"""Inputs that weights are chosen on whatever the time."""

APART = 5
"""Every such copy is kept apart, to judge the network with the chosen weights on."""

ROWS = 16_384
"""Rows of a layer's input that are used, of all samples together."""

MOMENT_BYTES = 256 << 20
"""Memory for the moments of the layers that are fitted in one pass over the samples."""


@dataclass(frozen=True)
class FittedLayer:
    """What choosing did to a layer; SNRs are of its outputs on rows that were kept apart.

    ``moved`` is the share of weights that took the farther neighbour. ``kept`` says whether the
    chosen weights are kept, which they are where the SNR rises.
    """

    layer: str
    weight: str
    bias: str
    moved: float
    snr_before: float
    snr_after: float
    kept: bool


@dataclass(frozen=True)
class FittedWeights:
    """The graph with chosen weights, FP32 numbers that the precision has too.

    ``constants`` are the chosen ones by name, ``layers`` what was tried. ``samples`` are the
    digests of the inputs that they were chosen on.
    """

    graph: Graph
    constants: Mapping[str, NDArray[np.float32]] = field(repr=False)
    layers: tuple[FittedLayer, ...]
    samples: tuple[str, ...] = ()


def fit_weights(
    graph: Graph,
    samples: Sequence[Sample],
    precision: Precision,
    *,
    threads: int = 0,
    before_each: Callable[[], None] = lambda: None,
    inferences: int | None = None,
    rows: int = ROWS,
    moment_bytes: int = MOMENT_BYTES,
    but: Collection[str] = (),
) -> FittedWeights:
    """``graph`` with each weight rounded so that its layer's outputs change least on ``samples``.

    ``rows`` of a layer's input are used; moments take up to ``moment_bytes`` of memory. Where the
    samples take more than ``inferences``, some are left out. The constants ``but`` keep their
    values.

    ``before_each`` is called before each inference and each layer. Layers whose input is not seen,
    or has fewer rows than are needed to keep some apart, keep the nearest rounding.

    Raises:
        RunnerFailedError: the graph cannot be run on a sample.
    """
    runner = EmulatedRunner(graph, precision, threads=threads)
    constants, found = dict[str, NDArray[np.float32]](), list[FittedLayer]()
    free = [x for x in matrix_layers(graph, precision) if {x.weight, x.bias}.isdisjoint(but)]
    passes = list(_passes([_Layer(graph, layer) for layer in free], moment_bytes))
    if inferences is not None and passes:
        samples = evenly(samples, max(LEAST_SAMPLES, inferences // len(passes)))
    for layers in passes:
        for number, sample in enumerate(samples):
            before_each()
            _gather(runner, sample, number, layers, precision, -(-rows // len(samples)))
        for layer in layers:
            before_each()
            row, chosen = layer.fitted(precision)
            found.append(row)
            constants |= chosen
    digests = tuple(sample.digest for sample in samples)
    return _fitted_weights(graph, constants, tuple(found), digests)


def fitted_weights(problem: Problem, context: Context) -> FittedWeights:
    """The weights of ``problem`` chosen on the search's inputs: given, perturbed, augmented.

    All keep the nearest rounding where :func:`kept_if_better` says so. What was chosen in an
    earlier run is not chosen again.

    Raises:
        RunnerFailedError: the graph cannot be run on a sample.
    """
    made = (
        *perturbs(problem, context, SEARCH_STREAM, COPIES, emulated=True),
        *augmented(problem, context, SEARCH_STREAM, COPIES),
    )
    # What can be augmented in few ways only repeats itself.
    copies = list({sample.digest: sample for sample in made}.values())
    apart = copies[APART - 1 :: APART]
    del copies[APART - 1 :: APART]
    samples = [*evenly(problem.samples, GIVEN), *copies]
    precision, threads = problem.settings.precision, problem.settings.threads or 0
    graph, check = problem.graph, context.time.check

    def chosen() -> list[Any]:
        found = fit_weights(
            graph,
            samples,
            precision,
            threads=threads,
            before_each=check,
            inferences=int(FIT_TIME_S / context.pace.usual_seconds),
            moment_bytes=max(MOMENT_BYTES, weights_size(graph.proto)),
            but=read_behind(problem),
        )
        found = kept_if_better(problem, context, found, apart)
        constants = {name: _packed(values) for name, values in found.constants.items()}
        return [constants, [astuple(row) for row in found.layers], list(found.samples)]

    # Held layers decide whether the network errs less.
    parts = [problem.model.digest, problem.base.digest]
    key = [*parts, *(s.digest for s in (*samples, *apart))]
    packed, rows, digests = context.recalled("weights", key, chosen)
    constants = {name: _unpacked(text, graph.constants[name]) for name, text in packed.items()}
    layers = tuple(FittedLayer(*row) for row in rows)
    return _fitted_weights(graph, constants, layers, tuple(digests))


def _fitted_weights(
    graph: Graph,
    constants: Mapping[str, NDArray[np.float32]],
    layers: tuple[FittedLayer, ...],
    samples: tuple[str, ...] = (),
) -> FittedWeights:
    """Puts ``constants`` into ``graph``, which keeps their FP32 values for pinned layers."""
    exact = {
        name: ExactConstant(row.layer, graph.constants[name])
        for row in layers
        for name in (row.weight, row.bias)
        if name in constants
    }
    fitted = replace(graph.with_constants(constants), exact_constants=exact)
    return FittedWeights(fitted, constants, layers, samples)


def kept_if_better(
    problem: Problem, context: Context, found: FittedWeights, apart: Sequence[Sample]
) -> FittedWeights:
    """``found``, or no chosen weights where the network errs as much with them.

    It is judged on the samples ``apart``, by the mean square of the outputs' errors and by the mean
    score. All layers but matrix ones are in FP32: the roundings of activations would hide what the
    weights do.

    Raises:
        RunnerFailedError: the graph cannot be run on a sample.
    """
    if not found.constants or not apart:
        return found
    before, after = (
        _mean_errors(problem, context, graph, apart) for graph in (problem.graph, found.graph)
    )
    # Where the nearest weights give no finite error, there is nothing to compare with.
    if all(a < b or not math.isfinite(b) for a, b in zip(after, before, strict=True)):
        return found
    rows = tuple(replace(row, kept=False) for row in found.layers)
    return FittedWeights(problem.graph, {}, rows, found.samples)


def _mean_errors(
    problem: Problem, context: Context, graph: Graph, samples: Sequence[Sample]
) -> tuple[float, float]:
    """The mean square error of the float outputs, each relative to its own, and the mean score.

    Both are infinite where the graph fails. The score is NaN where single inputs have none.
    """
    threads = problem.settings.threads or 0
    runner = EmulatedRunner(replace(graph), problem.settings.precision, threads=threads)
    plan = problem.base.with_pins(frozenset(problem.names) - problem.matrix_layers)
    found, scores = list[float](), list[float]()
    for sample in samples:
        context.time.check()
        exact = context.references.of(sample)
        try:
            (outputs,) = runner.outputs(plan, [sample])
        except RunnerFailedError:  # such as an index that became NaN
            return math.inf, math.inf
        if not problem.requirements.tells_of_all:
            scores.append(problem.requirements.score(exact, outputs))
        for name, reference in exact.items():
            if reference.dtype.kind == "f" and (finite := np.isfinite(reference)).any():
                if outputs[name].shape != reference.shape:
                    return math.inf, math.inf
                values = reference[finite].astype(np.float64)
                with np.errstate(invalid="ignore", over="ignore"):
                    error = np.mean((outputs[name][finite] - values) ** 2)
                found.append(float(error) / (float(np.mean(values**2)) or 1.0))
    square, score = (float(np.mean(of)) if of else math.nan for of in (found, scores))
    return square, score


def _packed(values: NDArray[np.float32]) -> str:
    with np.errstate(over="ignore"):
        stored = values.astype(np.float16)
    return base64.b64encode(zlib.compress(stored.tobytes(), 1)).decode()


def _unpacked(text: str, exact: NDArray[Any]) -> NDArray[np.float32]:
    stored = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.float16)
    values = stored.reshape(exact.shape).astype(np.float32)
    # Beyond FP16 a weight stays as it is, for a layer that is kept in FP32.
    return np.where(np.isfinite(values), values, exact).astype(np.float32)


def fitted_problem(problem: Problem, weights: FittedWeights) -> Problem:
    """``problem`` with the chosen weights; the original stays the reference."""
    whole = whole_of(problem, weights.graph)
    assert whole is not None, "the graph has the nodes that it had"
    whole = replace(whole, exact_constants=weights.graph.exact_constants)
    return problem_on(problem, weights.graph, whole)


class _Layer:
    """A layer while it is fitted."""

    def __init__(self, graph: Graph, layer: MatrixLayer) -> None:
        self.layer, self._constants = layer, graph.constants
        self.shape = self._constants[layer.weight].shape
        groups, width, _ = self._matrices().shape
        self._moments: Moments | None = None
        self.groups, self.width = groups, width
        self.nbytes = Moments.nbytes(groups, width)

    def _matrices(self) -> Matrices:
        """The weight as matrices, with the bias as their first row."""
        layer = self.layer
        weight = to_matrices(layer.node, layer.slot, self._constants[layer.weight])
        if layer.bias:
            bias = self._constants[layer.bias].reshape(weight.shape[0], 1, -1)
            weight = np.concatenate([bias, weight], axis=1)
        return weight.astype(np.float64)

    def add(self, values: NDArray[np.float32], limit: int, random: np.random.Generator) -> None:
        if self._moments is None:
            self._moments = Moments(self.groups, self.width)
        for rows in rows_of(self.layer, self.shape, values, limit, random):
            self._moments.add(rows)

    def fitted(self, precision: Precision) -> tuple[FittedLayer, dict[str, NDArray[np.float32]]]:
        """What choosing did, and the chosen constants if they are kept; frees the moments."""
        layer = self.layer
        moments = self._moments or Moments(self.groups, self.width)
        choice = choose(self._matrices(), moments, precision, biased=bool(layer.bias))
        self._moments = None
        row = FittedLayer(
            layer=layer.name,
            weight=layer.weight,
            bias=layer.bias,
            moved=choice.moved,
            snr_before=_db(choice.signal, choice.before),
            snr_after=_db(choice.signal, choice.after),
            kept=choice.helps,
        )
        return row, self._chosen(choice) if choice.helps else {}

    def _chosen(self, choice: Choice) -> dict[str, NDArray[np.float32]]:
        layer, matrices = self.layer, choice.matrices.astype(np.float32)
        found = {}
        if layer.bias:
            found[layer.bias] = matrices[:, 0].reshape(self._constants[layer.bias].shape)
            matrices = matrices[:, 1:]
        found[layer.weight] = from_matrices(layer.node, layer.slot, matrices, self.shape)
        # What is not finite at the precision stays as it is.
        return {
            name: np.where(np.isfinite(values), values, self._constants[name])
            for name, values in found.items()
        }


def _db(signal: float, error: float) -> float:
    """The signal-to-noise ratio of two mean squares."""
    if not error:
        return math.inf
    return 10.0 * math.log10(signal / error) if signal else -math.inf


def _passes(layers: Sequence[_Layer], moment_bytes: int) -> Iterator[list[_Layer]]:
    """``layers`` in groups whose moments are in memory together."""
    group, size = list[_Layer](), 0
    for layer in layers:
        if group and size + layer.nbytes > moment_bytes:
            yield group
            group, size = [], 0
        group.append(layer)
        size += layer.nbytes
    if group:
        yield group


def _gather(
    runner: EmulatedRunner,
    sample: Sample,
    number: int,
    layers: Sequence[_Layer],
    precision: Precision,
    limit: int,
) -> None:
    """Adds the FP32 inputs of ``layers`` on a sample to their moments."""
    readers: dict[str, list[_Layer]] = {}
    for layer in layers:
        readers.setdefault(layer.layer.source, []).append(layer)

    def give(tensor: str, values: NDArray[Any]) -> None:
        for layer in readers.pop(tensor, ()):
            layer.add(values, limit, np.random.default_rng([layer.layer.index, number]))

    for name, array in sample.arrays.items():
        if array.dtype == np.float32:
            give(name, array)
    for _, tensor, values in runner.exact(sample, precision):
        give(tensor, values)
        if not readers:
            break
