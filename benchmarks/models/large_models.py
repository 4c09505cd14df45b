"""A ViT-S by seeded code.

It has the operators, shapes and counts of what PyTorch exports (``benchmarks.models.exported`` does
that where torch is installed), with seeded weights: it costs what the trained one costs.
"""

from __future__ import annotations

import numpy as np

from benchmarks.models.model_builder import Builder, Made


def vit_small(side: int = 224, residual: float = 1.0) -> Made:
    """ViT-S/16 at ``side`` by ``side``: 12 blocks of width 384, 22 million weights.

    All that is added to the residual stream is ``residual`` times as large; the norms take it back.
    """
    width, places = 384, (side // 16) ** 2 + 1
    random = np.random.default_rng(2)
    to = Builder(random)
    inputs = {"x": random.standard_normal((1, 3, side, side)).astype(np.float32)}
    patches = to.add(
        "Conv",
        "x",
        to.normal(width, 3, 16, 16, deviation=residual * 768**-0.5),
        to.normal(width, deviation=0.02 * residual),
        strides=[16, 16],
    )
    tokens = to.add("Transpose", to.reshape(patches, 1, width, places - 1), perm=[0, 2, 1])
    first = to.normal(1, 1, width, deviation=0.02 * residual)
    tokens = to.add("Concat", first, tokens, axis=1)
    x = to.add("Add", tokens, to.normal(1, places, width, deviation=0.02 * residual))
    for block in range(12):
        to.scope = f"/blocks.{block}"
        normed = to.layer_norm(x, width)
        x = to.add("Add", x, to.attention(normed, normed, width, 6, places, places, residual))
        hidden = to.gelu(to.linear(to.layer_norm(x, width), width, 4 * width))
        x = to.add("Add", x, to.linear(hidden, 4 * width, width, residual))
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
