"""Detections held against detections: rows of an NMS come in any number and order, so that they are
matched one to one and not compared element by element.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError
from bisect_trt.numerics.arrays import Arrays

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

        Args:
            reference: outputs by name, boxes (N, 4) or (batch, N, 4), scores and classes (N,),
                (batch, N), or scores with an axis of classes behind or before that of the boxes, of
                which the largest counts.
            candidate: the same of a plan, with any N.

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

    Args:
        text: the condition, for messages.
        arguments: outputs, each with a slice where it holds more, then options.

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
