"""Whether the decision is the same: what an application takes from an output, held against what it
takes from the reference's.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.numerics.requirements.boxes import BOX_MATCH

EQUAL = "equal"
_TOP = re.compile(r"^top([1-9]\d*)$")
_MASK_AT, _OVERSHOOT = 0.5, 0.25
"""What is interpolated after a sigmoid overshoots 0 to 1 by less; logits do by more, as a rule."""


def is_decision(metric: str) -> bool:
    """Whether ``metric`` is ``top1``, ``top5`` (any number), ``argmax``, ``equal``, ``mask_iou`` or
    ``box_match``.
    """
    named = metric in ("argmax", EQUAL, "mask_iou") or metric.startswith(BOX_MATCH)
    return named or _TOP.match(metric) is not None


def places_of(metric: str) -> int:
    """The K of ``topK``, 1 of ``argmax``: of an output with no more values to choose among it is
    always true. 0 for another metric.
    """
    found = _TOP.match(metric)
    return int(found[1]) if found is not None else int(metric == "argmax")


def choices(metric: str, output: NDArray[Any]) -> int | None:
    """How many values of ``output`` a ``topK`` or ``argmax`` chooses among; None for another
    metric, and where it asks for the same elements.

    Args:
        metric: any.
        output: any shape and dtype.
    """
    if not places_of(metric) or _is_decided(output):
        return None
    shape: tuple[int, ...] = (1, *output.shape)
    return shape[2] if metric == "argmax" and output.ndim >= 4 else shape[-1]


def decision(
    metric: str,
    reference: NDArray[Any],
    candidate: NDArray[Any],
    ties: NDArray[np.bool_] | None = None,
) -> float:
    """The share of decisions that are the same. ``equal``: of all elements, those that are.

    ``topK``: of the rows along the last axis, those whose largest element in the reference is among
    the K largest of the candidate. ``argmax``: of all places, those whose largest channel is the
    same; channels are axis 1 from four dimensions on (N, C, H, W), else the last axis. Of an output
    of truth values or integers of more than eight bits, which are decisions already (the ids of
    classes), both are the share of elements that are the same. ``mask_iou``: intersection over
    union of what lies above 0.5, or above 0 where the reference holds values well outside of 0 to 1
    (logits); 1 where both masks are empty.

    Args:
        metric: one that :func:`is_decision` knows.
        reference: one output, any shape, any numeric or boolean dtype.
        candidate: the same output of a plan, of the same shape.
        ties: of an output that holds decisions already, those that FP32's own noise could turn;
            they are not counted.

    Returns:
        A share in [0, 1]; 1 for an output without elements.

    Raises:
        ValueError: ``metric`` is none.
    """
    if reference.size == 0:
        return 1.0
    if metric == "mask_iou":
        return _mask_iou(reference, candidate)
    if not is_decision(metric):
        raise ValueError(f"{metric!r} is no decision")
    if metric == EQUAL or _is_decided(reference):
        same = reference == candidate
        return float(np.mean(same if ties is None else same | ties))
    if metric == "argmax":
        axis = 1 if reference.ndim >= 4 else -1
        return float(np.mean(np.argmax(reference, axis) == np.argmax(candidate, axis)))
    ref = np.atleast_1d(reference).reshape(-1, np.atleast_1d(reference).shape[-1])
    got = np.atleast_1d(candidate).reshape(ref.shape)
    wanted = np.argmax(ref, axis=1)
    chosen = got[np.arange(len(got)), wanted]
    # How many are larger, or as large and earlier: the order that argmax breaks ties in.
    places = np.arange(ref.shape[1])
    ahead = (got > chosen[:, None]) | ((got == chosen[:, None]) & (places < wanted[:, None]))
    return float(np.mean(ahead.sum(axis=1) < places_of(metric)))


TIE = 1e-5
"""Of a tensor's RMS: two candidates nearer than that may change places in FP32 itself, whose own
noise is about 1e-6 of an output's RMS (120 dB on PP-OCRv4)."""


def gaps(values: NDArray[Any], axis: int, *, smallest: bool = False) -> NDArray[np.float32]:
    """How far the two largest (or smallest) values along ``axis`` are apart, over the tensor's RMS;
    infinite where there is one value.

    Args:
        values: floats of any shape.
        axis: along which the decision is made.
        smallest: whether the smallest wins.

    Returns:
        The shape of ``values`` without ``axis``; at most :data:`TIE` is a tie.
    """
    if values.shape[axis] < 2:
        return np.full(tuple(np.delete(values.shape, axis)), np.inf, np.float32)
    signed = -values if smallest else values
    top = np.partition(signed, -2, axis)
    first, second = np.take(top, -1, axis), np.take(top, -2, axis)
    finite = values[np.isfinite(values)]
    rms = float(np.sqrt(np.mean(np.square(finite, dtype=np.float64)))) if finite.size else 0.0
    with np.errstate(invalid="ignore"):
        return np.asarray((first - second) / (rms or 1.0), np.float32)


def _is_decided(output: NDArray[Any]) -> bool:
    """Whether its elements are decisions already: truth values, or integers that may be ids."""
    return output.dtype.kind == "b" or (output.dtype.kind in "iu" and output.itemsize > 1)


def _mask_iou(reference: NDArray[Any], candidate: NDArray[Any]) -> float:
    low, high = float(np.min(reference)), float(np.max(reference))
    within = low >= -_OVERSHOOT and high <= 1.0 + _OVERSHOOT and high > _MASK_AT
    threshold = _MASK_AT if within or 0.0 <= low <= high <= 1.0 else 0.0
    ref, got = reference > threshold, candidate > threshold
    union = int(np.count_nonzero(ref | got))
    return int(np.count_nonzero(ref & got)) / union if union else 1.0
