"""RT-DETR with ResNet-101 by seeded code: the operators, shapes and counts of what PyTorch exports
(``benchmarks.models.exported`` does that where torch is installed), so that it costs what a trained
one costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.models.model_builder import Builder, Made


def _bottlenecks(to: Builder, x: str, depths: Sequence[int]) -> list[str]:
    """The stages of a ResNet of bottlenecks, augmented input D; the last three."""
    inside, found = 64, []
    for stage, depth in enumerate(depths):
        middle = 64 << stage
        for block in range(depth):
            to.scope = f"/backbone/stage{stage}/block{block}"
            stride = 2 if stage and not block else 1
            y = to.add("Relu", to.convolution(x, inside, middle, 1))
            y = to.add("Relu", to.convolution(y, middle, middle, 3, stride))
            y = to.convolution(y, middle, 4 * middle, 1)
            if not block:
                if stride == 2:
                    x = to.add("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
                x = to.convolution(x, inside, 4 * middle, 1)
            # Seeded weights have no training to keep the sums of residuals small.
            x = to.add("Relu", to.add("Add", x, to.add("Mul", y, to.scalar(0.3))))
            inside = 4 * middle
        found.append(x)
    return found[1:]


def _cross_stage(to: Builder, x: str, inside: int, width: int) -> str:
    """RT-DETR's block: three RepVGG convolutions beside a short way."""
    long = to.silu(to.convolution(x, inside, width, 1))
    short = to.silu(to.convolution(x, inside, width, 1))
    for _ in range(3):
        both = to.add(
            "Add", to.convolution(long, width, width, 3), to.convolution(long, width, width, 1)
        )
        long = to.silu(both)
    return to.add("Add", long, short)


def _encoder(to: Builder, maps: Sequence[str], width: int, side: int) -> list[str]:
    """The hybrid encoder: attention on the coarsest map, then up and down the pyramid."""
    to.scope = "/encoder"
    low, middle, high = (
        to.convolution(x, channels, width, 1)
        for x, channels in zip(maps, (512, 1024, 2048), strict=True)
    )
    places = (side // 32) ** 2
    flat = to.add("Transpose", to.reshape(high, 1, width, places), perm=[0, 2, 1])
    placed = to.add("Add", flat, to.normal(1, places, width, deviation=0.5))
    flat = to.layer_norm(
        to.add("Add", flat, to.attention(placed, flat, width, 8, places, places)), width
    )
    hidden = to.gelu(to.linear(flat, width, 1024))
    flat = to.layer_norm(to.add("Add", flat, to.linear(hidden, 1024, width)), width)
    back = to.add("Transpose", flat, perm=[0, 2, 1])
    high = to.reshape(back, 1, width, side // 32, side // 32)
    found = [high]
    for level, lateral in enumerate((middle, low)):
        to.scope = f"/encoder/up{level}"
        found[0] = to.silu(to.convolution(found[0], width, width, 1))
        scales = to.constant(np.asarray([1, 1, 2, 2], np.float32))
        larger = to.add("Resize", found[0], "", scales, mode="nearest")
        joined = to.add("Concat", larger, lateral, axis=1)
        found.insert(0, _cross_stage(to, joined, 2 * width, width))
    for level in range(2):
        to.scope = f"/encoder/down{level}"
        smaller = to.silu(to.convolution(found[level], width, width, 3, 2))
        joined = to.add("Concat", smaller, found[level + 1], axis=1)
        found[level + 1] = _cross_stage(to, joined, 2 * width, width)
    return found


@dataclass(frozen=True)
class _Memory:
    """What the decoder looks at: ``flat`` of ``places`` rows, which are maps of ``sides``."""

    flat: str
    places: int
    sides: tuple[int, ...]


def _deformable(to: Builder, x: str, boxes: str, memory: _Memory, width: int) -> str:
    """Deformable attention: 8 heads, 3 maps, 4 points, sampled by GridSample."""
    heads, points, queries, levels = 8, 4, 300, len(memory.sides)
    each = width // heads
    values = to.reshape(to.linear(memory.flat, width, width), 1, memory.places, heads, each)
    offsets = to.reshape(
        to.linear(x, width, heads * levels * points * 2), 1, queries, heads, levels, points, 2
    )
    weights = to.add(
        "Softmax",
        to.reshape(
            to.linear(x, width, heads * levels * points), 1, queries, heads, levels * points
        ),
        axis=-1,
    )
    ends = to.integers(2), to.integers(4)
    centre = to.add("Slice", boxes, to.integers(0), ends[0], to.integers(-1))
    size = to.add("Slice", boxes, *ends, to.integers(-1))
    around = to.add(
        "Mul",
        to.add("Mul", offsets, to.scalar(1.0 / points)),
        to.reshape(size, 1, queries, 1, 1, 1, 2),
    )
    where = to.add(
        "Add", to.reshape(centre, 1, queries, 1, 1, 1, 2), to.add("Mul", around, to.scalar(0.5))
    )
    grid = to.add("Sub", to.add("Mul", where, to.scalar(2.0)), to.scalar(1.0))
    sizes = to.integers(*(side * side for side in memory.sides))
    parts = to.add_many("Split", levels, values, sizes, axis=1)
    sampled = []
    for level, side in enumerate(memory.sides):
        rows = to.add("Transpose", parts[level], perm=[0, 2, 3, 1])
        image = to.reshape(rows, heads, each, side, side)
        there = to.add("Gather", grid, to.constant(np.asarray(level)), axis=3)
        there = to.reshape(
            to.add("Transpose", there, perm=[0, 2, 1, 3, 4]), heads, queries, points, 2
        )
        picked = to.add(
            "GridSample", image, there, align_corners=0, mode="bilinear", padding_mode="zeros"
        )
        sampled.append(to.add("Unsqueeze", picked, to.integers(3)))
    stacked = to.reshape(to.add("Concat", *sampled, axis=3), heads, each, queries, levels * points)
    spread = to.reshape(
        to.add("Transpose", weights, perm=[0, 2, 1, 3]), heads, 1, queries, levels * points
    )
    mixed = to.add("ReduceSum", to.add("Mul", stacked, spread), to.integers(-1), keepdims=0)
    back = to.add("Transpose", to.reshape(mixed, 1, width, queries), perm=[0, 2, 1])
    return to.linear(back, width, width)


def _decoder(to: Builder, maps: Sequence[str], width: int, side: int) -> list[str]:
    """Six layers over 300 queries, chosen by their scores; boxes are refined layer by layer."""
    queries, classes = 300, 80
    sides = (side // 8, side // 16, side // 32)
    places = sum(s * s for s in sides)
    to.scope = "/decoder/input"
    rows = []
    for x, one in zip(maps, sides, strict=True):
        flat = to.reshape(to.convolution(x, width, width, 1), 1, width, one * one)
        rows.append(to.add("Transpose", flat, perm=[0, 2, 1]))
    flat = to.add("Concat", *rows, axis=1)
    memory = _Memory(flat, places, sides)
    known = to.layer_norm(to.linear(flat, width, width), width)
    scores = to.add("ReduceMax", to.linear(known, width, classes), to.integers(-1), keepdims=0)
    _, chosen = to.add_many("TopK", 2, scores, to.integers(queries), axis=1)
    indices = to.add("Unsqueeze", chosen, to.integers(-1))
    wide_indices = to.add("Expand", indices, to.integers(1, queries, width))
    x = to.add("GatherElements", known, wide_indices, axis=1)
    logits = _perceptron(to, x, width, 4)
    for layer in range(6):
        to.scope = f"/decoder/layers.{layer}"
        boxes = to.add("Sigmoid", logits)
        position = to.linear(to.add("Relu", to.linear(boxes, 4, 2 * width)), 2 * width, width)
        placed = to.add("Add", x, position)
        x = to.layer_norm(
            to.add("Add", x, to.attention(placed, x, width, 8, queries, queries)), width
        )
        seen = _deformable(to, to.add("Add", x, position), boxes, memory, width)
        x = to.layer_norm(to.add("Add", x, seen), width)
        hidden = to.add("Relu", to.linear(x, width, 1024))
        x = to.layer_norm(to.add("Add", x, to.linear(hidden, 1024, width)), width)
        logits = to.add("Add", logits, _perceptron(to, x, width, 4))
    to.scope = "/head"
    return [to.linear(x, width, classes), to.add("Sigmoid", logits)]


def _perceptron(to: Builder, x: str, width: int, outside: int) -> str:
    for _ in range(2):
        x = to.add("Relu", to.linear(x, width, width))
    return to.linear(x, width, outside)


def rtdetr_r101(side: int = 640) -> Made:
    """RT-DETR with ResNet-101 and width 256: 60 million weights; ``side`` is the image's."""
    random = np.random.default_rng(3)
    to = Builder(random)
    inputs = {"images": random.random((1, 3, side, side), np.float32)}
    to.scope = "/backbone/stem"
    x = to.add("Relu", to.convolution("images", 3, 32, 3, 2))
    x = to.add("Relu", to.convolution(x, 32, 32, 3))
    x = to.add("Relu", to.convolution(x, 32, 64, 3))
    x = to.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    maps = _bottlenecks(to, x, (3, 4, 23, 3))
    maps = _encoder(to, maps, 256, side)
    outputs = _decoder(to, maps, 256, side)
    return to.model(inputs, outputs), inputs
