"""The public OCR models with the inputs of their kind, where `make demo` has fetched them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
DEMO = Path(os.environ.get("BISECT_TRT_DEMO", ROOT / ".cache" / "demo"))
DETECTOR, RECOGNISER, CLASSIFIER = (
    DEMO / f"{name}.onnx"
    for name in ("ch_PP-OCRv4_det_infer", "ch_PP-OCRv4_rec_infer", "ch_ppocr_mobile_v2.0_cls_infer")
)


def page() -> NDArray[np.float32]:
    """The demo's photo of a page, normalised as the detector expects, (1, 3, H, W)."""
    with np.load(DEMO / "page.npz") as arrays:
        image: NDArray[np.float32] = arrays["x"]
    return image


def line(width: int, top: int = 60, left: int = 0) -> NDArray[np.float32]:
    """A line of text cut from the page, (1, 3, 48, ``width``), scaled to [-1, 1] as recogniser and
    classifier expect.
    """
    image = page()[:, :, top : top + 48, left : left + width]
    low, high = float(image.min()), float(image.max())
    return ((image - low) / (high - low) * 2.0 - 1.0).astype(np.float32)
