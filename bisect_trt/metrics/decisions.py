"""Metrics of decisions: argmax, top-k, equality, masks, boxes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.arrays import Arrays

BOX_MATCH = "box_match"
EQUAL = "equal"

BOX_LAYOUTS = ("xyxy", "yxyx", "xywh", "cxcywh")

TIE = 1e-5
"""The gap, over the tensor's RMS, below which two candidates are tied: ten times FP32's noise."""

_TOP = re.compile(r"^top([1-9]\d*)$")

Slices = tuple[slice | int, ...]
_Boxes = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def is_decision(metric: str) -> bool:
    """Whether ``metric`` is ``topK``, ``argmax``, ``equal``, ``mask_iou`` or ``box_match``."""
    named = metric in ("argmax", EQUAL, "mask_iou") or metric.startswith(BOX_MATCH)
    return named or _TOP.match(metric) is not None


def places_of(metric: str) -> int:
    """The K of ``topK``, 1 for ``argmax``, 0 for another metric."""
    top = _TOP.match(metric)
    return int(top[1]) if top is not None else int(metric == "argmax")


def choices(metric: str, output: NDArray[Any]) -> int | None:
    """How many values of ``output`` a ``topK`` or ``argmax`` chooses among; else None."""
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
    """The share of decisions that are the same, from 0 to 1.

    ``topK``: of the rows along the last axis, those whose largest element in the reference is among
    the K largest of the candidate.
    ``argmax``: of all places, those with the same largest channel. Channels are axis 1 from four
    dimensions on (N, C, H, W), else the last axis.
    ``equal``: of elements. So are ``topK`` and ``argmax`` of Booleans and integers of more than
    eight bits, which are decisions already.
    ``mask_iou``: the intersection over union of what is above 0.5, or above 0 for logits.
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
    expected = np.argmax(ref, axis=1)
    value = got[np.arange(len(got)), expected]
    # Counts what is larger, or as large and earlier: argmax breaks ties in this order.
    places = np.arange(ref.shape[1])
    ahead = (got > value[:, None]) | ((got == value[:, None]) & (places < expected[:, None]))
    return float(np.mean(ahead.sum(axis=1) < places_of(metric)))


def _is_decided(output: NDArray[Any]) -> bool:
    """Whether the elements are decisions already: Booleans, or integers that may be ids."""
    return output.dtype.kind == "b" or (output.dtype.kind in "iu" and output.itemsize > 1)


def _mask_iou(reference: NDArray[Any], candidate: NDArray[Any]) -> float:
    low, high = float(np.min(reference)), float(np.max(reference))
    # Interpolation after a sigmoid overshoots 0 to 1 by less than a quarter.
    probabilities = 0.0 <= low <= high <= 1.0 or (low >= -0.25 and 0.5 < high <= 1.25)
    threshold = 0.5 if probabilities else 0.0
    ref, got = reference > threshold, candidate > threshold
    union = int(np.count_nonzero(ref | got))
    return int(np.count_nonzero(ref & got)) / union if union else 1.0


def gaps(values: NDArray[Any], axis: int, *, smallest: bool = False) -> NDArray[np.float32]:
    """The gap of the two largest (or smallest) values along ``axis``, over the tensor's RMS."""
    if values.shape[axis] < 2:
        return np.full(tuple(np.delete(values.shape, axis)), np.inf, np.float32)
    top = np.partition(-values if smallest else values, -2, axis)
    first, second = np.take(top, -1, axis), np.take(top, -2, axis)
    finite = values[np.isfinite(values)]
    rms = float(np.sqrt(np.mean(np.square(finite, dtype=np.float64)))) if finite.size else 0.0
    with np.errstate(invalid="ignore"):
        return np.asarray((first - second) / (rms or 1.0), np.float32)


@dataclass(frozen=True)
class BoxMatch:
    """The share of the reference's boxes that have a match in the candidate, one to one.

    ``boxes``, ``scores``, ``classes``: outputs, each with a slice of it.
    ``iou``: the least overlap of a match; its scores differ by 0.05 at most.
    ``layout``: one of :data:`BOX_LAYOUTS`.
    """

    boxes: tuple[str, Slices]
    scores: tuple[str, Slices]
    classes: tuple[str, Slices] | None = None
    iou: float = 0.5
    layout: str = "xyxy"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that it reads."""
        parts = (self.boxes, self.scores, *([self.classes] if self.classes else []))
        return tuple(dict.fromkeys(name for name, _ in parts))

    def __call__(self, reference: Arrays, candidate: Arrays) -> float:
        """The share in [0, 1]; 1 if the reference has no box."""
        refs, gots = self._images(reference), self._images(candidate)
        matched = sum(self._matched(ref, got) for ref, got in zip(refs, gots, strict=True))
        total = sum(len(boxes) for boxes, _, _ in refs)
        return matched / total if total else 1.0

    def count(self, outputs: Arrays) -> int:
        """The number of boxes in ``outputs``."""
        return sum(len(boxes) for boxes, _, _ in self._images(outputs))

    def _images(self, outputs: Arrays) -> list[_Boxes]:
        """The corners, scores and classes of each image's boxes."""
        boxes, scores = _taken(outputs, self.boxes), _taken(outputs, self.scores)
        classes = _taken(outputs, self.classes) if self.classes is not None else None
        if boxes.ndim == 2:
            boxes, scores = boxes[None], scores[None]
        images = boxes.shape[:2]
        if scores.ndim == 3 and scores.shape[:2] != images and scores.shape[::2] == images:
            scores = scores.swapaxes(1, 2)  # NonMaxSuppression takes (batch, classes, boxes)
        fits = boxes.ndim == 3 and boxes.shape[-1] == 4 and scores.ndim in (2, 3)
        fits = fits and scores.shape[:2] == images
        if not fits or (classes is not None and classes.size != np.prod(images)):
            also = "" if classes is None else f" and classes {classes.shape}"
            raise BadInputError(
                f"--requirement {BOX_MATCH}: boxes have shape {boxes.shape}, scores "
                f"{scores.shape}{also}; give boxes (batch, N, 4), scores and classes (batch, N), "
                "by slices of the outputs where they hold more"
            )
        scores = scores if scores.ndim == 3 else scores[..., None]
        best = scores.max(axis=2)
        kinds = scores.argmax(axis=2) if classes is None else classes.reshape(images)
        images_of = zip(boxes, best, kinds, strict=True)
        # Rows with a score of 0 are padding.
        return [
            (_corners(b[s > 0.0], self.layout), s[s > 0.0], k[s > 0.0]) for b, s, k in images_of
        ]

    def _matched(self, ref: _Boxes, got: _Boxes) -> int:
        """How many boxes of one image are matched; pairs that overlap most come first."""
        overlap = _iou(ref[0], got[0])
        near = np.abs(ref[1][:, None] - got[1][None]) <= 0.05
        same = ref[2][:, None] == got[2][None]
        rows, columns = np.nonzero((overlap >= self.iou) & near & same)
        used_rows, used_columns = set[int](), set[int]()
        for pair in np.argsort(-overlap[rows, columns], kind="stable"):
            row, column = int(rows[pair]), int(columns[pair])
            if row not in used_rows and column not in used_columns:
                used_rows.add(row)
                used_columns.add(column)
        return len(used_rows)


def _taken(outputs: Arrays, part: tuple[str, Slices]) -> NDArray[Any]:
    name, slices = part
    try:
        return np.asarray(outputs[name][slices] if slices else outputs[name]).astype(np.float64)
    except IndexError as error:
        raise BadInputError(
            f"--requirement {BOX_MATCH}: output {name!r} has shape {outputs[name].shape}, "
            "which its slice does not fit"
        ) from error


def _corners(boxes: NDArray[Any], layout: str) -> NDArray[Any]:
    """Boxes (N, 4) as two opposite corners each."""
    first, second = boxes[:, :2], boxes[:, 2:]
    if layout == "yxyx":
        return boxes[:, [1, 0, 3, 2]]
    if layout == "cxcywh":
        return np.concatenate([first - second / 2, first + second / 2], 1)
    return np.concatenate([first, first + second], 1) if layout == "xywh" else boxes


def _iou(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """The intersection over union of boxes (N, 4) and (M, 4), shape (N, M)."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    both = np.prod(np.maximum(high - low, 0.0), axis=2)
    areas = [np.prod(np.maximum(b[:, 2:] - b[:, :2], 0.0), axis=1) for b in (one, other)]
    union = areas[0][:, None] + areas[1][None] - both
    share = np.zeros(both.shape)
    np.divide(both, union, out=share, where=union > 0.0)
    return share
