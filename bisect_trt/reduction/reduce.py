"""Finds the smallest subgraph that is bad by itself."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, numpy_helper

from bisect_trt.base.atomic_files import scratch
from bisect_trt.base.errors import BadInputError, MachineError, RunnerFailedError
from bisect_trt.base.interrupt import BudgetSpentError, Observer
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan, Subgraph
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import weights_size
from bisect_trt.model.tensor_values import array_of, size_of, take_in
from bisect_trt.model.typed import to_typed
from bisect_trt.reduction.oracle import Budget, Observation, Specimen, Specimens, Suspect
from bisect_trt.search.reduce import Reduction, reduce

_LARGE = 4096
"""Elements; smaller constants (scales, variances, shapes) mean something, and cost little."""

_MOST, _BLOCK = 256 << 20, 1 << 20
"""Bytes that are drawn at most, and elements at a time."""


@dataclass(frozen=True)
class Seeded:
    """An initialiser drawn with NumPy's ``RandomState(seed)``, whose numbers never change: normal,
    of the mean and deviation of what it replaces; ``dtype`` is float32 or float16.
    """

    name: str
    seed: int
    size: int
    mean: float
    deviation: float
    dtype: str = "float32"

    def values(self) -> NDArray[Any]:
        """Of shape (``size``,)."""
        random, found = np.random.RandomState(self.seed), np.empty(self.size, self.dtype)
        for first in range(0, self.size, _BLOCK):
            part = found[first : first + _BLOCK]
            copied = random.standard_normal(part.size) * self.deviation + self.mean
            # By way of FP32, as a typed model's constants are converted.
            part[:] = copied.astype(np.float32)
        return found


def worth_copying(model: onnx.ModelProto, most_left: int) -> bool:
    """Whether what :func:`with_seeded_weights` leaves of the weights takes ``most_left`` bytes at
    most, and what it copies is no more than a script copies in seconds. Nothing is read.
    """
    copied = sum(size_of(t) for t in model.graph.initializer if _is_large(t))
    return copied <= _MOST and weights_size(model) - copied <= most_left


def with_seeded_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[Seeded, ...]]:
    """A copy of ``model`` whose large FP32 initialisers are drawn, and how."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found: list[Seeded] = []
    for tensor in copy.graph.initializer:
        if not _is_large(tensor):
            continue
        array = array_of(tensor)
        if not np.isfinite(array).all():
            continue
        seeded = Seeded(
            tensor.name, len(found), array.size, float(array.mean()), float(array.std())
        )
        values = seeded.values().reshape(array.shape)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        found.append(seeded)
    return copy, tuple(found)


def _is_large(tensor: TensorProto) -> bool:
    return tensor.data_type == TensorProto.FLOAT and size_of(tensor) >= 4 * _LARGE


def kept_apart(
    model: onnx.ModelProto, seeded: Sequence[Seeded], location: str
) -> tuple[onnx.ModelProto, tuple[Seeded, ...]]:
    """A copy of ``model`` that reads its seeded weights from a file, and those in the file's order;
    ``model`` itself where there are none.
    """
    if not seeded:
        return model, ()
    by_content = {}
    for weights in seeded:
        for dtype in ("float32", "float16"):
            typed = replace(weights, dtype=dtype)
            by_content[_digest(typed.values().data)] = typed
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found: list[Seeded] = []
    offset = 0
    for tensor in copy.graph.initializer:
        copied = by_content.get(_digest(tensor.raw_data))
        if copied is None:
            take_in(tensor)  # a reproducer goes to another machine
            continue
        length = size_of(tensor)
        external_data_helper.set_external_data(tensor, location, offset=offset, length=length)
        tensor.ClearField("raw_data")
        found.append(replace(copied, name=tensor.name))
        offset += length
    return copy, tuple(found)


def _digest(values: memoryview | bytes) -> bytes:
    return hashlib.sha256(values).digest()


SMALL = 5 << 20
"""Bytes: what bug trackers take as an attachment."""


class Trials(Protocol):
    """Says of a subgraph whether it is bad: an engine's answers, or a command's exit code."""

    budget: Budget
    precision: Precision
    explained: Precision
    versions: Mapping[str, str]

    def try_whole(self, specimen: Specimen) -> Observation:
        """What the whole model shows; no suspect where it is fine."""
        ...

    def ask(self, specimen: Specimen) -> Verdict:
        """PASS where ``specimen`` is still bad. May raise :class:`BudgetSpentError`."""
        ...

    def figures(self, specimen: Specimen) -> Observation:
        """What ``specimen`` shows in full; it was seen to be bad before."""
        ...

    def known(self, specimen: Specimen) -> Observation:
        """What ``specimen`` showed when it was last asked about."""
        ...


@dataclass(frozen=True)
class Step:
    """One step of the search: how many subgraphs it tried, and how many nodes were left after
    it."""

    what: str
    tried: int
    left: int


@dataclass(frozen=True)
class Reduced:
    """The smallest subgraph that was seen to be bad, and what it showed.

    ``explained`` is the precision whose rounding was allowed for. ``model`` is what the engine was
    given, typed at ``precision``; ``sample`` its inputs, by name, and ``expected`` its outputs in
    FP32 on ONNX Runtime. ``nodes`` are the kept ones with their operators, ``bypassed`` those whose
    input is read in place of their output, ``of`` the number in the whole model. ``seeded`` are
    weights that were drawn anew. ``complete`` says that no node can be left out, ``interrupted``
    that the user ended the search, ``always`` that no subgraph tried was ever fine.
    """

    suspect: Suspect
    precision: Precision
    explained: Precision
    model: onnx.ModelProto
    sample: Sample
    expected: Mapping[str, NDArray[Any]]
    nodes: tuple[tuple[str, str], ...]
    bypassed: tuple[str, ...]
    of: int
    whole: Observation
    seen: Observation
    steps: tuple[Step, ...]
    complete: bool
    always: bool
    builds: int
    seconds: float
    interrupted: bool = False
    seeded: tuple[Seeded, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def reduce_subgraph(
    graph: Graph, sample: Sample, trials: Trials, observer: Observer
) -> Reduced | Observation:
    """The smallest bad subgraph of a model on one input; what the whole shows where it is not bad.

    Args: graph: the FP32 model. sample: the input on which it is bad. trials: says of a subgraph
        whether it is; counts the builds and ends the search when they are spent. observer: hears of
        each subgraph.

    Raises:
        BadInputError: ONNX Runtime cannot run the model on the sample, or the budget does not allow
            for trying the whole.
    """
    began = time.perf_counter()
    with scratch("recorded") as folder:
        specimens = Specimens(graph, sample, Path(folder))
        search = _Search(specimens, trials, observer, sample)
        whole = search.try_whole()
        if whole.suspect is None:
            return whole
        observer.step("reduce")
        found = reduce(specimens.nodes, search.ask, specimens.bypasses)
        subgraph = found.subgraph or specimens.whole
        specimen, seeded, seen = specimens.of(subgraph), tuple[Seeded, ...](), None
        interrupted = found.interrupted
        if not interrupted:
            observer.step("the subgraph")
            try:  # the subgraph is found, whatever ends what else would be told of it
                specimen, seeded = search.seeded(specimen)
                seen = search.figures(specimen)
            except KeyboardInterrupt:
                interrupted = True
        seen = seen or trials.known(specimen)
        return Reduced(
            # Not seen again, it is still what it was seen to be before.
            seen.suspect or whole.suspect,
            trials.precision,
            trials.explained,
            to_typed(specimen.model, PrecisionPlan(trials.precision)),
            specimen.sample,
            specimen.expected,
            specimens.described(subgraph),
            tuple(sorted(b.node for b in subgraph.bypassed)),
            len(specimens.nodes),
            whole,
            seen,
            _steps(found),
            found.complete,
            all(probe.verdict in (Verdict.PASS, Verdict.UNSURE) for probe in found.probes),
            trials.budget.spent,
            time.perf_counter() - began,
            interrupted,
            seeded,
            trials.versions,
        )


class _Search:
    """What is asked of the trials, told to the observer."""

    def __init__(
        self, specimens: Specimens, trials: Trials, observer: Observer, sample: Sample
    ) -> None:
        self._specimens = specimens
        self._input = sample.name
        self._trials = trials
        self._observer = observer
        self._tried = 0

    def try_whole(self) -> Observation:
        self._observer.step("the whole model")
        try:
            return self._trials.try_whole(self._specimens.of(self._specimens.whole))
        except RunnerFailedError as error:
            raise BadInputError(f"the model cannot be run on the reference: {error}") from error
        except BudgetSpentError:
            raise BadInputError(
                f"{self._input}: not even the whole model can be tried on it, and no input before "
                "it showed it bad: raise --max-builds or --budget"
            ) from None

    def ask(self, subgraph: Subgraph) -> Verdict:
        """The whole was seen to be bad already; a subgraph that cannot be made is unclear."""
        if subgraph == self._specimens.whole:
            return Verdict.PASS
        try:
            specimen = self._specimens.of(subgraph)
        except RunnerFailedError:
            return Verdict.UNSURE
        try:
            verdict = self._trials.ask(specimen)
        except MachineError:  # nothing is concluded, and the subgraph so far is not lost
            verdict = Verdict.UNSURE
        self._tried += 1
        word = "still bad" if verdict.passed else "not bad" if verdict is Verdict.FAIL else verdict
        self._observer.progress(self._tried, 0, f"{len(subgraph.kept)} nodes: {word}")
        return verdict

    def seeded(self, specimen: Specimen) -> tuple[Specimen, tuple[Seeded, ...]]:
        """``specimen`` with drawn weights, where it is large and they show the same."""
        arrays = [*specimen.sample.arrays.values(), *specimen.expected.values()]
        if weights_size(specimen.model) + sum(a.nbytes for a in arrays) <= SMALL:
            return specimen, ()
        # A script writes FP32 and FP16; of BF16 NumPy knows nothing.
        if self._trials.precision is Precision.BF16 or self._trials.budget.is_spent:
            return specimen, ()
        if not worth_copying(specimen.model, SMALL):
            return specimen, ()
        model, seeded = with_seeded_weights(specimen.model)
        if not seeded:
            return specimen, ()
        try:
            copied = self._specimens.with_weights(specimen, model)
            if self._trials.ask(copied).passed:
                return copied, seeded
        except (RunnerFailedError, MachineError, BudgetSpentError):
            pass
        return specimen, ()

    def figures(self, specimen: Specimen) -> Observation | None:
        """What it shows in all processes; None where that cannot be paid for any more."""
        with suppress(BudgetSpentError, MachineError):
            return self._trials.figures(specimen)
        return None


def _steps(found: Reduction) -> tuple[Step, ...]:
    steps: list[Step] = []
    left = 0
    for probe in found.probes:
        if probe.verdict.passed:
            left = min(left or len(probe.subgraph.kept), len(probe.subgraph.kept))
        if steps and steps[-1].what == probe.step:
            steps[-1] = replace(steps[-1], tried=steps[-1].tried + 1, left=left)
        else:
            steps.append(Step(probe.step, 1, left))
    return tuple(steps)
