"""Seeded pages and lines of text, made from nothing but Pillow: inputs for the two OCR models.

``python examples/text_inputs.py lines 8 FOLDER`` writes line_000.npz and so on, (1, 3, 48, 320)
float32 in [-1, 1] for the recogniser; ``pages`` writes (1, 3, 192, 320) with ImageNet's mean and
deviation for the detector. The same number is always the same image, so a set can grow.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

WORDS = [
    "the",
    "engine",
    "gives",
    "wrong",
    "numbers",
    "when",
    "layers",
    "lose",
    "precision",
    "and",
    "nobody",
    "knows",
    "which",
    "of",
    "them",
    "a",
    "release",
    "needs",
    "proof",
    "that",
    "each",
    "pin",
    "counts",
    "invoice",
    "total",
    "amount",
    "due",
    "2026",
    "page",
    "14",
    "of",
    "58",
    "order",
    "no",
    "7731",
    "section",
    "results",
    "table",
    "figure",
    "summary",
    "hello",
    "world",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "temperature",
    "pressure",
    "voltage",
    "3.14",
    "42",
    "99.5",
    "%",
    "(see",
    "above)",
    "[1]",
    "contact",
    "office",
    "street",
    "city",
]
MEAN, DEVIATION = (
    np.asarray(v, np.float32) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)


def text(random: np.random.Generator, words: int) -> str:
    """So many words."""
    return " ".join(random.choice(WORDS, words))


def _spoilt(image: Image.Image, random: np.random.Generator) -> NDArray[np.float32]:
    """As a camera or scanner would have it: a little turned, blurred, noisy; (H, W, 3) in [0,
    1].
    """
    paper = image.getpixel((0, 0))
    turned = image.rotate(random.uniform(-1.5, 1.5), Image.Resampling.BICUBIC, fillcolor=paper)
    blurred = turned.filter(ImageFilter.GaussianBlur(random.uniform(0.0, 0.9)))
    pixels = np.asarray(blurred, np.float32) / 255.0
    light = 1.0 + random.uniform(-0.15, 0.15) * np.linspace(-1.0, 1.0, pixels.shape[1])[:, None]
    noise = random.normal(0.0, random.uniform(0.002, 0.03), pixels.shape)
    spoilt: NDArray[np.float32] = np.clip(pixels * light + noise, 0.0, 1.0).astype(np.float32)
    return spoilt


def _colours(random: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    paper = tuple(int(v) for v in random.integers(200, 256, 3))
    ink = tuple(int(v) for v in random.integers(0, 90, 3))
    return (ink, paper) if random.random() < 0.15 else (paper, ink)


def line(number: int) -> NDArray[np.float32]:
    """One line of text, (1, 3, 48, 320) in [-1, 1]."""
    random = np.random.default_rng([number, 48])
    paper, ink = _colours(random)
    image = Image.new("RGB", (320, 48), paper)
    font = ImageFont.load_default(size=int(random.integers(20, 34)))
    place = (int(random.integers(2, 14)), int(random.integers(2, 12)))
    ImageDraw.Draw(image).text(place, text(random, 5), fill=ink, font=font)
    pixels = _spoilt(image, random)
    return np.ascontiguousarray((pixels * 2.0 - 1.0).transpose(2, 0, 1)[None], np.float32)


def page(number: int) -> NDArray[np.float32]:
    """A page of several lines, (1, 3, 192, 320), normalised."""
    random = np.random.default_rng([number, 192])
    paper, ink = _colours(random)
    image = Image.new("RGB", (320, 192), paper)
    draw, top = ImageDraw.Draw(image), int(random.integers(4, 20))
    while top < 180:
        size = int(random.integers(10, 26))
        font = ImageFont.load_default(size=size)
        words = text(random, int(random.integers(1, 7)))
        draw.text((int(random.integers(4, 60)), top), words, fill=ink, font=font)
        top += int(size * random.uniform(1.2, 2.4))
    pixels = (_spoilt(image, random) - MEAN) / DEVIATION
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)


def write(kind: str, numbers: range, folder: Path) -> list[Path]:
    """One .npz an image, with the input's name of both models, ``x``."""
    make = {"lines": line, "pages": page}[kind]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{kind[:-1]}_{number:03d}.npz" for number in numbers]
    for number, path in zip(numbers, paths, strict=True):
        np.savez(path, x=make(number))
    return paths


if __name__ == "__main__":
    for written in write(sys.argv[1], range(int(sys.argv[2])), Path(sys.argv[3])):
        print(written)
