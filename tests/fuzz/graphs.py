"""Random networks from a seed: small, of the operators and at the scales of real ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from tests.fuzz.blocks import IMAGES, SEQUENCES, to_sequence
from tests.fuzz.faults import FAULTS, Planted
from tests.fuzz.net import Arrays, Net, Tensor

OPSETS = range(13, 24)
MAX_BLOCKS = 7


@dataclass(frozen=True)
class Recipe:
    """What a network is made from; the same recipe gives the same network.

    ``blocks`` is the number of blocks, None for a random one. ``skipped`` blocks are drawn and left
    out, by which a failure shrinks. ``fault`` names what is planted, empty for nothing.
    """

    seed: int
    fault: str = ""
    blocks: int | None = None
    skipped: frozenset[int] = frozenset()

    def text(self) -> str:
        """The recipe as one word, which :func:`recipe_of` reads."""
        skipped = ",".join(map(str, sorted(self.skipped)))
        return f"{self.seed}:{self.fault}:{'' if self.blocks is None else self.blocks}:{skipped}"


def recipe_of(text: str) -> Recipe:
    """The recipe that :meth:`Recipe.text` wrote."""
    seed, fault, blocks, skipped = text.split(":")
    left_out = frozenset(int(n) for n in skipped.split(",") if n)
    return Recipe(int(seed), fault, int(blocks) if blocks else None, left_out)


@dataclass(frozen=True)
class Network:
    """A random network with its ``feeds`` and the faults ``planted`` in it."""

    recipe: Recipe
    model: onnx.ModelProto = field(repr=False)
    feeds: tuple[Arrays, ...] = field(repr=False)
    planted: tuple[Planted, ...] = ()
    drawn: int = 0

    @property
    def opset(self) -> int:
        """The version of the standard operators."""
        return int(self.model.opset_import[0].version)


def generate(recipe: Recipe) -> Network:
    """The network of ``recipe``."""
    first = np.random.default_rng([recipe.seed, 1])
    opset = int(first.choice(OPSETS))
    count = int(first.integers(1, MAX_BLOCKS + 1))
    # A block's own stream: what is left out changes none of the others.
    count = count if recipe.blocks is None else recipe.blocks
    dynamic = bool(first.random() < 0.4)
    batches = (1, 2, 3) if dynamic else (int(first.choice([1, 2])),) * 3
    net = Net(recipe.seed, opset, batches)
    kinds = FAULTS[recipe.fault].parts if recipe.fault else ()
    places = sorted(int(p) for p in first.integers(0, count + 1, len(kinds)))
    net.random = _stream(recipe, "input")
    x = _entry(net)
    planted: list[Planted] = []
    for number in range(count + 1):
        for kind, place in zip(kinds, places, strict=True):
            if place == number:
                net.random = _stream(recipe, f"fault {kind} {len(planted)}")
                net.scope = f"/fault{len(planted)}"
                x, found = FAULTS[kind].plant(net, x)
                planted.append(found)
        if number == count:
            break
        net.random = _stream(recipe, f"block {number}")
        net.scope = f"/block{number}"
        image = len(x.shape) == 4
        if image and net.chance(0.25):
            x, image = to_sequence(net, x), False
        blocks: Sequence = IMAGES if image else SEQUENCES
        block = net.pick(blocks)
        if number not in recipe.skipped:
            x = block(net, x)
    net.random = _stream(recipe, "end")
    net.scope = "/head"
    y = _head(net, x)
    nameless = 0.3 if net.chance(0.25) and not recipe.fault else 0.0
    model = net.finished([y.name], nameless)
    return Network(recipe, model, tuple(net.feeds), tuple(planted), count)


def _stream(recipe: Recipe, what: str) -> np.random.Generator:
    """Random numbers for one part of a network, whatever its other parts took."""
    number = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "little")
    return np.random.default_rng([recipe.seed, number])


def _entry(net: Net) -> Tensor:
    """The first input: an image, a photo of 0 to 255 that is scaled, or a sequence."""
    net.scope = "/entry"
    kind = net.pick(["image", "photo", "sequence", "sequence"])
    if kind == "sequence":
        return net.entry("x", (net.pick([4, 6]), net.pick([8, 12])), net.pick([0.3, 1.0, 3.0]))
    size = net.pick([4, 6, 8])
    if kind == "image":
        return net.entry("x", (net.pick([3, 4]), size, size), 1.0)
    raw = net.entry("photo", (3, size, size), 70.0, 128.0)
    shifted = net.op("Sub", raw.name, net.constant(128.0))
    return Tensor(net.op("Mul", shifted, net.constant(1.0 / 64.0)), raw.shape)


def _head(net: Net, x: Tensor) -> Tensor:
    """What ends the network: a product, a bounded activation, or nothing but a name."""
    if len(x.shape) == 4 and net.chance(0.5):
        pooled = net.op("Flatten", net.op("GlobalAveragePool", x.name), axis=1)
        weights = net.matrix(x.shape[1], 5), net.normal(5, scale=0.1)
        return Tensor(net.op("Gemm", pooled, *weights), (x.shape[0], 5))
    kind = net.pick(["Tanh", "Sigmoid", "Identity", "scaled"])
    if kind == "scaled":
        return net.unary("Mul", x, net.constant(0.7))
    return net.unary(kind, x)
