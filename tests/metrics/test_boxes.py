"""Detections matched one to one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.decisions import BoxMatch
from bisect_trt.metrics.parser import parse_requirements

OUTPUTS = ["boxes", "scores", "classes", "det"]


def detections(seed: int, count: int = 6) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    low = np.stack([np.arange(count) * 100.0, random.uniform(0, 50, count)], 1)
    boxes = np.concatenate([low, low + random.uniform(20, 60, (count, 2))], 1)
    return {
        "boxes": boxes[None].astype(np.float32),
        "scores": random.uniform(0.3, 1, (1, count)).astype(np.float32),
        "classes": random.integers(0, 3, (1, count)),
    }


def share(text: str, reference: dict[str, np.ndarray], candidate: dict[str, np.ndarray]) -> float:
    judge = parse_requirements([f"{text}>=0.99"], OUTPUTS)
    return judge.judge(reference, candidate).values[0]


ALL = "box_match(boxes,scores,classes,iou=0.5)"


@given(st.integers(0, 1000))
def test_rows_in_any_order_and_number_match_themselves(seed: int) -> None:
    right = detections(seed)
    order = np.random.default_rng(seed).permutation(6)
    turned = {n: a[:, order] for n, a in right.items()}
    assert share(ALL, right, turned) == 1.0
    more = {n: np.concatenate([a, a[:, :1]], 1) for n, a in turned.items()}
    assert share(ALL, right, more) == 1.0
    assert share(ALL, more, turned) == pytest.approx(6 / 7), "one to one: no box serves twice"


def test_what_differs_does_not_match() -> None:
    right = detections(1)
    moved = {**right, "boxes": right["boxes"] + np.float32([100.0, 0, 100.0, 0]) * 0.5}
    assert share(ALL, right, moved) < 0.5
    scores = right["scores"].copy()
    scores[0, 0] -= 0.06
    assert share(ALL, right, {**right, "scores": scores}) == pytest.approx(5 / 6)
    classes = right["classes"].copy()
    classes[0, 2] += 1
    changed = {**right, "classes": classes}
    assert share(ALL, right, changed) == pytest.approx(5 / 6)
    assert share("box_match(boxes,scores)", right, changed) == 1.0
    assert share(ALL, right, {n: a[:, :0] for n, a in right.items()}) == 0.0
    empty = {n: a[:, :0] for n, a in right.items()}
    assert share(ALL, empty, right) == 1.0


def test_layouts_slices_and_padding() -> None:
    right = detections(2)
    low, high = right["boxes"][..., :2], right["boxes"][..., 2:]
    sized = {**right, "boxes": np.concatenate([low, high - low], -1)}
    centred = {**right, "boxes": np.concatenate([(low + high) / 2, high - low], -1)}
    for layout, given_ in (("xywh", sized), ("cxcywh", centred)):
        assert share(f"box_match(boxes,scores,layout={layout})", given_, given_) == 1.0
    rows = np.concatenate(
        [right["boxes"], right["scores"][..., None], right["classes"][..., None]], -1
    ).astype(np.float32)
    padded = np.concatenate([rows, np.zeros((1, 10, 6), np.float32)], 1)
    text = "box_match(det[:,:,0:4],det[:,:,4],det[:,:,5])"
    assert share(text, {"det": rows}, {"det": padded}) == 1.0
    assert share(text, {"det": rows[0][None]}, {"det": padded[:, ::-1]}) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "box_match(boxes)>=0.9",
        "box_match(boxes,nothing)>=0.9",
        "box_match(boxes,scores,iou=2)>=0.9",
        "box_match(boxes,scores,layout=polar)>=0.9",
        "box_match(boxes,scores)>=1.5",
        "box_match(boxes,scores)<=0.9",
        "box_match(boxes[x],scores)>=0.9",
    ],
)
def test_what_cannot_be_asked_is_told(text: str) -> None:
    with pytest.raises(BadInputError, match="--requirement"):
        parse_requirements([text], OUTPUTS)


def test_of_another_rank_it_is_told() -> None:
    with pytest.raises(BadInputError, match="give boxes"):
        share("box_match(scores,scores)", detections(0), detections(0))


def test_classes_may_stand_before_boxes() -> None:
    """As NonMaxSuppression takes them."""
    boxes = np.array([[[0, 0, 4, 4], [5, 5, 9, 9], [20, 20, 30, 30]]], np.float32)
    scores = np.array([[[0.9, 0.1, 0.2], [0.1, 0.8, 0.7]]], np.float32)
    match = BoxMatch(("boxes", ()), ("scores", ()))
    same = {"boxes": boxes, "scores": scores}
    assert match(same, same) == 1.0 and match.count(same) == 3
    turned = {"boxes": boxes, "scores": scores[:, ::-1]}
    assert match(same, turned) == 0.0, "the classes changed places"
    assert match(same, {"boxes": boxes, "scores": scores.swapaxes(1, 2)}) == 1.0
