"""Metrics of decisions: argmax, top-k, token match, boxes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.arrays import Arrays

BOX_MATCH = "box_match"
SCORE_DIFFERENCE = 0.05
"""By how much the scores of two matching boxes may differ."""

_IOU = 0.5
_CORNERS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "xyxy": lambda b: b,
    "yxyx": lambda b: b[:, [1, 0, 3, 2]],
    "xywh": lambda b: np.concatenate([b[:, :2], b[:, :2] + b[:, 2:]], 1),
    "cxcywh": lambda b: np.concatenate([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], 1),
}
"""How four numbers become two opposite corners."""

_ENTRY = re.compile(r"^(?P<name>.+?)(?:\[(?P<part>[-\d:, ]+)\])?$")
Slices = tuple[slice | int, ...]
_Boxes = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class BoxMatch:
    """The share of the reference's boxes that a plan's match, one to one. ``boxes``, ``scores`` and
    ``classes`` are outputs, each with the slice that is taken of it.
    """

    boxes: tuple[str, Slices]
    scores: tuple[str, Slices]
    classes: tuple[str, Slices] | None = None
    iou: float = _IOU
    layout: str = "xyxy"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that it looks at."""
        parts = (self.boxes, self.scores, *([self.classes] if self.classes else []))
        return tuple(dict.fromkeys(name for name, _ in parts))

    def __call__(self, reference: Arrays, candidate: Arrays) -> float:
        """The share in [0, 1]; 1 where the reference holds no box.

        Raises:
            BadInputError: an output has another shape.
        """
        matched = total = 0
        for ref, got in zip(self._images(reference), self._images(candidate), strict=True):
            total += len(ref[0])
            matched += self._matched(ref, got)
        return matched / total if total else 1.0

    def count(self, outputs: Arrays) -> int:
        """How many boxes ``outputs`` hold.

        Raises:
            BadInputError: an output has another shape.
        """
        return sum(len(boxes) for boxes, _, _ in self._images(outputs))

    def _images(self, outputs: Arrays) -> list[_Boxes]:
        """Corners, scores and classes of each image's boxes; rows without a score are padding."""
        boxes, scores = self._taken(outputs, self.boxes), self._taken(outputs, self.scores)
        if boxes.ndim == 2:
            boxes, scores = boxes[None], scores[None]
        images = boxes.shape[:2]
        if scores.ndim == 3 and scores.shape[:2] != images and scores.shape[::2] == images:
            scores = scores.swapaxes(1, 2)  # classes before boxes, as NonMaxSuppression takes them
        classes = self._taken(outputs, self.classes) if self.classes is not None else None
        size = int(np.prod(images)) if classes is None else classes.size
        fits = scores.shape[:2] == images and scores.ndim in (2, 3) and size == np.prod(images)
        if boxes.ndim != 3 or boxes.shape[-1] != 4 or not fits:
            told = "" if classes is None else f" and classes {classes.shape}"
            raise BadInputError(
                f"--requirement {BOX_MATCH}: boxes have shape {boxes.shape}, scores "
                f"{scores.shape}{told}; give boxes (batch, N, 4), scores and classes (batch, N), "
                "by slices of the outputs where they hold more"
            )
        found: list[_Boxes] = []
        classes = None if classes is None else classes.reshape(images)
        for image, (its, of_all) in enumerate(zip(boxes, scores, strict=True)):
            many = of_all.ndim == 2 and of_all.shape[1] > 1
            best = of_all.max(axis=1) if of_all.ndim == 2 else of_all
            kinds = of_all.argmax(axis=1) if many else np.zeros(len(best))
            if classes is not None:
                kinds = classes[image]
            real = best > 0.0
            found.append((_CORNERS[self.layout](its[real]), best[real], kinds[real]))
        return found

    def _taken(self, outputs: Arrays, part: tuple[str, Slices]) -> NDArray[Any]:
        name, slices = part
        try:
            return np.asarray(outputs[name][slices] if slices else outputs[name]).astype(np.float64)
        except IndexError as error:
            raise BadInputError(
                f"--requirement {BOX_MATCH}: output {name!r} has shape {outputs[name].shape}, "
                "which its slice does not fit"
            ) from error

    def _matched(self, ref: _Boxes, got: _Boxes) -> int:
        """How many boxes of one image have a partner: the pairs that overlap most first."""
        if not len(ref[0]) or not len(got[0]):
            return 0
        overlap = _iou(ref[0], got[0])
        near = np.abs(ref[1][:, None] - got[1][None]) <= SCORE_DIFFERENCE
        same = ref[2][:, None] == got[2][None]
        rows, columns = np.nonzero((overlap >= self.iou) & near & same)
        order = np.argsort(-overlap[rows, columns], kind="stable")
        free_rows, free_columns = np.ones(len(ref[0]), bool), np.ones(len(got[0]), bool)
        count = 0
        for pair in order:
            row, column = rows[pair], columns[pair]
            if free_rows[row] and free_columns[column]:
                free_rows[row] = free_columns[column] = False
                count += 1
        return count


def _iou(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """Intersection over union of every pair of boxes (N, 4) and (M, 4), shape (N, M)."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    both = np.prod(np.maximum(high - low, 0.0), axis=2)
    areas = [np.prod(np.maximum(b[:, 2:] - b[:, :2], 0.0), axis=1) for b in (one, other)]
    union = areas[0][:, None] + areas[1][None] - both
    found: NDArray[np.float64] = np.where(
        union > 0.0, both / np.where(union > 0.0, union, 1.0), 0.0
    )
    return found


def read_box_match(text: str, arguments: str) -> BoxMatch:
    """What stands between the parentheses of ``box_match(boxes,scores[,classes],iou=0.5)``.

    Raises:
        BadInputError: says which argument is wrong.
    """
    outputs: list[tuple[str, Slices]] = []
    options = {"iou": str(_IOU), "layout": "xyxy"}
    for entry in re.split(r",(?![^\[]*\])", arguments):
        name, equals, value = entry.strip().partition("=")
        if equals and name in options:
            options[name] = value.strip()
            continue
        found = _ENTRY.match(entry.strip())
        if found is None:
            raise BadInputError(f"--requirement {text!r}: {entry.strip()!r} names no output")
        outputs.append((found["name"], _slices(text, found["part"])))
    try:
        iou = float(options["iou"])
    except ValueError:
        iou = 0.0
    if not 0.0 < iou <= 1.0:
        raise BadInputError(f"--requirement {text!r}: iou is a number above 0 and at most 1")
    if options["layout"] not in _CORNERS:
        raise BadInputError(
            f"--requirement {text!r}: unknown layout {options['layout']!r}; known are "
            f"{', '.join(_CORNERS)}"
        )
    if len(outputs) not in (2, 3):
        raise BadInputError(
            f"--requirement {text!r}: give the outputs of boxes and scores, and of classes if "
            f"there are any: {BOX_MATCH}(boxes,scores,classes,iou=0.5,layout=xyxy)>=0.99"
        )
    classes = outputs[2] if len(outputs) > 2 else None
    return BoxMatch(outputs[0], outputs[1], classes, iou, options["layout"])


def _slices(text: str, part: str | None) -> Slices:
    found: list[slice | int] = []
    for entry in part.split(",") if part else ():
        numbers = entry.strip().split(":")
        try:
            bounds = [int(n) if n else None for n in numbers]
        except ValueError:
            bounds = []
        if not 1 <= len(bounds) <= 3 or bounds == [None] or bounds[2:] == [0]:
            raise BadInputError(f"--requirement {text!r}: [{part}] is no slice")
        first = bounds[0]
        found.append(slice(*bounds) if len(bounds) > 1 or first is None else first)
    return tuple(found)


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
