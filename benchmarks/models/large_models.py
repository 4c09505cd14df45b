"""Models of real sizes by seeded code: long chains, wide graphs, operators in no order, a ViT-S and
an RT-DETR with ResNet-101.

The networks have the operators, shapes and counts of what PyTorch exports
(``benchmarks.models.exported`` does that where torch is installed), with seeded weights: they cost
what the trained ones cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.models.model_builder import Builder, Made
from benchmarks.models.rtdetr import rtdetr_r101


def chain(nodes: int) -> Made:
    """``nodes`` Add and Mul in turn, every constant its own, so that nothing cancels: the rounding
    errors accumulate.
    """
    random = np.random.default_rng(0)
    to = Builder(random)
    inputs = {"x": random.standard_normal((1, 64)).astype(np.float32)}
    last = "x"
    for number in range(nodes):
        to.scope = f"/block{number // 10}"
        if number % 2:
            factor = (1.0 + 0.02 * random.standard_normal(64)).astype(np.float32)
            last = to.add("Mul", last, to.constant(factor))
        else:
            last = to.add("Add", last, to.normal(64, deviation=0.02))
    return to.model(inputs, [last]), inputs


def wide(nodes: int) -> Made:
    """Branches of ten nodes from one input, a hundred joined by each Concat, and a mean of all."""
    random = np.random.default_rng(1)
    to = Builder(random)
    inputs = {"x": random.standard_normal((1, 64)).astype(np.float32)}
    joined, branches = [], []
    for number in range(nodes // 10):
        to.scope, last = f"/branch{number}", "x"
        for step in range(10):
            if step % 3 == 2:
                last = to.add("Tanh", last)
            else:
                op = "Mul" if step % 3 else "Add"
                last = to.add(op, last, to.normal(64, deviation=1.0))
        branches.append(last)
        if len(branches) == 100:
            joined.append(to.add("Concat", *branches, axis=0))
            branches = []
    whole = to.add("Concat", *joined, *branches, axis=0)
    mean = to.add("ReduceMean", whole, to.integers(0), keepdims=1)
    return to.model(inputs, [mean]), inputs


def unordered(nodes: int) -> Made:
    """``nodes`` operators one after the other in no order, so that no block of them repeats."""
    random = np.random.default_rng(3)
    to = Builder(random)
    inputs = {"x": random.standard_normal((1, 64)).astype(np.float32)}
    last = "x"
    for number in range(nodes):
        to.scope = f"/block{number // 10}"
        op = random.choice(["Add", "Mul", "Tanh", "Sin", "Relu", "Erf", "Sub"])
        if op == "Mul":
            factor = (1.2 + 0.02 * random.standard_normal(64)).astype(np.float32)
            last = to.add("Mul", last, to.constant(factor))
        elif op in ("Add", "Sub"):
            last = to.add(op, last, to.normal(64, deviation=0.3))
        else:
            last = to.add(op, last)
    return to.model(inputs, [last]), inputs


def tangled(nodes: int) -> Made:
    """About ``nodes`` operators in no order that also read any of the twelve results before."""
    random = np.random.default_rng(4)
    to = Builder(random)
    inputs = {"x": random.standard_normal((4, 64)).astype(np.float32)}
    rows = [to.integers(number) for number in (2, 6, 0)]
    steps: list[Callable[[str, str], str]] = [
        lambda last, _: to.add("Add", last, to.normal(64, deviation=0.3)),
        lambda last, _: to.add("Sub", last, to.normal(64, deviation=0.3)),
        lambda last, _: to.add("Mul", last, to.normal(64, deviation=1.1)),
        lambda last, _: to.add("MatMul", last, to.normal(64, 64, deviation=0.12)),
        lambda last, _: to.add("LeakyRelu", last, alpha=0.1),
        lambda last, other: to.add("Add", last, other),
        lambda last, other: to.add("Mul", last, to.add("Tanh", other)),
        lambda last, other: to.add("Add", last, to.add("Softmax", other, axis=-1)),
        lambda last, other: to.add("Slice", to.add("Concat", last, other, axis=0), *rows),
        lambda last, _: to.add("Transpose", to.add("Transpose", last, perm=[1, 0]), perm=[1, 0]),
        *(partial(_alone, to, op) for op in ("Tanh", "Sin", "Relu", "Erf", "Sigmoid")),
    ]
    recent, made = ["x"], 0
    while made < nodes:
        to.scope = f"/block{made // 10}"
        step = steps[int(random.integers(len(steps)))]
        recent.append(step(recent[-1], recent[int(random.integers(len(recent)))]))
        recent, made = recent[-12:], len(to.nodes)
    return to.model(inputs, [recent[-1]]), inputs


def _alone(to: Builder, op: str, last: str, _: str) -> str:
    return to.add(op, last)


def vit_small() -> Made:
    """ViT-S/16 at 224 by 224: 12 blocks of width 384, 22 million weights."""
    width, places = 384, 197
    random = np.random.default_rng(2)
    to = Builder(random)
    inputs = {"x": random.standard_normal((1, 3, 224, 224)).astype(np.float32)}
    patches = to.add(
        "Conv",
        "x",
        to.normal(width, 3, 16, 16, deviation=768**-0.5),
        to.normal(width, deviation=0.02),
        strides=[16, 16],
    )
    tokens = to.add("Transpose", to.reshape(patches, 1, width, places - 1), perm=[0, 2, 1])
    tokens = to.add("Concat", to.normal(1, 1, width, deviation=0.02), tokens, axis=1)
    x = to.add("Add", tokens, to.normal(1, places, width, deviation=0.02))
    for block in range(12):
        to.scope = f"/blocks.{block}"
        normed = to.layer_norm(x, width)
        x = to.add("Add", x, to.attention(normed, normed, width, 6, places, places))
        hidden = to.gelu(to.linear(to.layer_norm(x, width), width, 4 * width))
        x = to.add("Add", x, to.linear(hidden, 4 * width, width))
    to.scope = "/head"
    first = to.add("Gather", to.layer_norm(x, width), to.constant(np.asarray(0)), axis=1)
    logits = to.add(
        "Gemm",
        first,
        to.normal(1000, width, deviation=width**-0.5),
        to.normal(1000, deviation=0.02),
        transB=1,
    )
    return to.model(inputs, [logits]), inputs


MAKERS: dict[str, Callable[[], Made]] = {
    "chain of 5,000": lambda: chain(5_000),
    "chain of 10,000": lambda: chain(10_000),
    "chain of 20,000": lambda: chain(20_000),
    "chain of 60,000": lambda: chain(60_000),
    "wide, 5,000": lambda: wide(5_000),
    "wide, 10,000": lambda: wide(10_000),
    "wide, 20,000": lambda: wide(20_000),
    "no order, 5,000": lambda: unordered(5_000),
    "no order, 10,000": lambda: unordered(10_000),
    "no order, 20,000": lambda: unordered(20_000),
    "no order, 60,000": lambda: unordered(60_000),
    "tangled, 10,000": lambda: tangled(10_000),
    "tangled, 20,000": lambda: tangled(20_000),
    "tangled, 60,000": lambda: tangled(60_000),
    "ViT-S": vit_small,
    "RT-DETR R101": rtdetr_r101,
}
"""What is measured, by the name that the command line takes."""
