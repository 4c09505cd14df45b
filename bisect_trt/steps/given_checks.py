"""What the given inputs cannot show: alike inputs, near ties."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import Finding
from bisect_trt.evaluate.cache import Row
from bisect_trt.inputs.samples import ALIKE
from bisect_trt.metrics.arrays import Arrays, flat
from bisect_trt.metrics.decisions import EQUAL, TIE, gaps, places_of
from bisect_trt.metrics.requirements import gaps_of
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

_CLASSES = 3
"""An output of fewer values a row decides between no kinds of inputs."""

_MOST_LOOKED_AT = 64
"""Inputs whose outputs are looked at."""

_NEARLY = 0.99
_SUM = 1e-3
_MOST_COMPARED, _VALUES = 8, 1 << 16
"""Inputs whose outputs are compared, and values of each."""


def note_alike(problem: Problem, context: Context) -> None:
    """Say of the given inputs that all are of one class, or have nearly the same outputs."""
    if len(problem.samples) < 2:
        return
    key = context.evaluator.key("alike", *(sample.digest for sample in problem.samples))
    known = context.cache.recall(key)
    if known is None:
        told = _signs(
            problem, [context.references.of(sample) for sample in problem.samples[:_MOST_LOOKED_AT]]
        )
        context.cache.record_later(Row(key, "alike", told))
    else:
        told = known[0]
    for where, message in told:
        context.note(Finding(ALIKE, where, message))


def _signs(problem: Problem, references: Sequence[Any]) -> list[tuple[str, str]]:
    count, found = len(problem.samples), []
    for name, first in references[0].items():
        outputs = [reference[name] for reference in references]
        if all(np.array_equal(a, first) for a in outputs):
            continue  # of no input: anchors, say
        chosen = _top_class(outputs) if _are_classes(problem.graph.proto, name, outputs) else None
        if chosen is not None:
            called = _called(problem.graph.proto, chosen, first.shape[-1])
            found.append(
                (
                    name,
                    f"all {count} inputs are class {called} by output {name!r}: inputs of other "
                    "classes are not covered",
                )
            )
        elif _nearly_same(outputs):
            found.append(
                (
                    name,
                    f"output {name!r} is nearly the same for all {count} inputs (correlation above "
                    f"{_NEARLY:g}): other kinds of inputs are not covered",
                )
            )
    return found


def _top_class(outputs: Sequence[NDArray[Any]]) -> int | None:
    """The one class that each input has most of; None where they differ, or choose none."""
    rows = [a.reshape(-1, a.shape[-1]) for a in outputs if a.ndim in (1, 2) and a.dtype.kind == "f"]
    if len(rows) < len(outputs) or any(r.shape[1] < _CLASSES or len(r) != 1 for r in rows):
        return None
    chosen = {int(np.argmax(row)) for row in rows}
    return chosen.pop() if len(chosen) == 1 else None


_CALLED = re.compile("class|label|logit|prob|score", re.IGNORECASE)
_NAMES = ("names", "classes", "labels")
"""Keys under which exporters write the classes' names into a model."""


def _are_classes(model: onnx.ModelProto, name: str, outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether an output's values are classes': probabilities, or called so, or named in the model.
    An embedding has a largest value too.
    """
    if _CALLED.search(name) or any(entry.key in _NAMES for entry in model.metadata_props):
        return True
    return all(a.size and a.min() >= 0.0 and abs(float(a.sum()) - 1.0) < _SUM for a in outputs)


def _called(model: onnx.ModelProto, chosen: int, classes: int) -> str:
    """A class by its name, where the exporter wrote names into the model, and by its number."""
    for entry in model.metadata_props:
        if entry.key in _NAMES:
            try:
                names = ast.literal_eval(entry.value)
                return f"{str(names[chosen])!r} ({chosen} of {classes})"
            except (ValueError, SyntaxError, KeyError, IndexError, TypeError):
                continue
    return f"{chosen} of {classes}"


def _nearly_same(outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether every output correlates with the first above 0.99."""
    shapes = {a.shape for a in outputs}
    if len(shapes) > 1 or outputs[0].dtype.kind != "f" or outputs[0].size < _CLASSES:
        return False
    step = -(-outputs[0].size // _VALUES)
    values = [flat(a)[::step].astype(np.float64) for a in outputs[:_MOST_COMPARED]]
    if not all(np.isfinite(v).all() for v in values):
        return False
    centred = [v - v.mean() for v in values]
    norms = [float(np.linalg.norm(v)) for v in centred]
    if min(norms) == 0.0:
        return False
    return all(
        float(v @ centred[0]) / (norm * norms[0]) > _NEARLY
        for v, norm in zip(centred[1:], norms[1:], strict=True)
    )


_NEAR = 1e-2
"""Of an output's RMS: what 40 dB leave to the error."""

_MOSTLY = 0.95
"""Share of an output's elements that stay: a mask or a map of classes, no single answer."""

_MOST_NEAR_TIES, _NAMED = 64, 3
"""Inputs that are looked at, and named."""


def note_near_ties(problem: Problem, context: Context) -> None:
    """Name the given inputs whose decisions are nearly ties, and count those that FP32's own noise
    could turn, which are judged by nobody.
    """
    asked = [i for i in problem.requirements.items if places_of(i.metric) or i.metric == EQUAL]
    if not asked:
        return
    samples = problem.samples[:_MOST_NEAR_TIES]
    key = context.evaluator.key("near ties", *(sample.digest for sample in samples))
    known = context.cache.recall(key)
    if known is None:
        found = [_least(problem, context.references.of(sample)) for sample in samples]
        context.cache.record_later(Row(key, "near ties", found))
    else:
        found = known[0]
    ties, decisions = sum(t for _, t, _ in found), sum(n for _, _, n in found)
    if ties:
        message = (
            f"{counted(ties, 'decision')} of {decisions:,} on the given inputs "
            f"{'is a tie' if ties == 1 else 'are ties'} within FP32's own noise, not counted "
            "whatever a plan makes of it"
        )
        context.note(Finding("ties", "", message))
    order = np.argsort([gap for gap, _, _ in found], kind="stable")
    near = [int(i) for i in order if TIE < found[i][0] < _NEAR]
    if near:
        named = ", ".join(f"{samples[i].name} ({100 * found[i][0]:.2g} %)" for i in near[:_NAMED])
        more = f" and {len(near) - _NAMED} more" if len(near) > _NAMED else ""
        message = (
            f"near ties: the two best candidates differ by less than 1 % of the output's RMS on "
            f"{named}{more}; such inputs ask for most of the layers, and a share of them may be "
            "let miss (@mean, --allow-misses)"
        )
        context.note(Finding("near-tie", samples[near[0]].name, message))


def note_few_differ(problem: Problem, context: Context) -> None:
    """Say of integers and truth values how many differ with everything reduced, where these are
    few: a class or a mask that is asked to be equal asks for FP32 as soon as one of them may turn.
    """
    found = [context.evaluator.known(problem.base, sample) for sample in problem.samples]
    for place, item in enumerate(problem.requirements.items):
        if item.metric != EQUAL or item.limit < 1.0:
            continue
        shares = [f.values[place] for f in found if f is not None and f.values]
        least = min(shares, default=1.0)
        if _MOSTLY <= least < 1.0:
            limit = np.floor(1e3 * (1.0 - 2.0 * (1.0 - least))) / 1e3
            asked = f"{item.output}:equal>={limit:g}" if item.output else f"equal>={limit:g}"
            message = (
                f"of output {item.output!r} {100.0 * (1.0 - least):.2g} % of the elements differ "
                f"with everything reduced: where that may be, ask for --requirement '{asked}'"
            )
            context.note(Finding("few-differ", item.output or "", message))


def _least(problem: Problem, reference: Arrays) -> tuple[float, int, int]:
    """The smallest gap of a decision that is no tie, the ties, and how many decisions there are."""
    every = [np.ravel(g) for g in _asked(problem, reference)]
    if not every:
        return float("inf"), 0, 0
    flat = np.concatenate(every)
    real = flat[flat > TIE]
    return float(real.min(initial=np.inf)), int(np.count_nonzero(flat <= TIE)), int(flat.size)


def _asked(problem: Problem, reference: Arrays) -> Iterator[NDArray[Any]]:
    """The gaps of each decision that is asked about."""
    known = gaps_of(reference)
    for item in problem.requirements.items:
        names: Sequence[str] = [n for n in reference if item.output in (None, n)]
        for name in names:
            output = reference[name]
            if item.metric == EQUAL and name in known:
                yield known[name]
            elif places_of(item.metric) and output.dtype.kind == "f" and output.ndim:
                channels = item.metric == "argmax" and output.ndim >= 4
                yield gaps(output, 1 if channels else -1)
