"""Well-known architectures with seeded weights, exported by PyTorch's dynamo exporter:
``python -m benchmarks.exported FOLDER [NAMES]`` writes NAME.onnx and NAME.npz (needs torch,
torchvision, transformers and onnxscript, which bisect-trt itself does not).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SEED = 0
PHOTO = (1, 3, 224, 224)


def _torchvision(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from torchvision import models

        return getattr(models, name)(weights=None, **options)

    return make


def _vit_small() -> Any:
    from torch import nn
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=224, patch_size=16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    # It begins with a last layer of zeros, of which every engine makes nothing but zeros.
    nn.init.trunc_normal_(model.heads[-1].weight, std=0.02)
    return model


def _bert() -> Any:
    from torch import nn
    from transformers import BertConfig, BertModel

    class Hidden(nn.Module):  # type: ignore[misc]
        """The last hidden states alone."""

        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(num_hidden_layers=6, hidden_size=384, num_attention_heads=6)
            config.intermediate_size, config._attn_implementation = 1536, "eager"
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, ids: Any) -> Any:
            return self.bert(ids).last_hidden_state

    return Hidden()


def _unet() -> Any:
    import torch
    from torch import nn

    class UNet(nn.Module):  # type: ignore[misc]
        """Four levels, 32 to 256 channels, skips by concatenation."""

        def __init__(self) -> None:
            super().__init__()
            widths = [32, 64, 128, 256]
            self.down = nn.ModuleList(
                self._block(a, b) for a, b in zip([3, *widths], widths, strict=False)
            )
            self.up = nn.ModuleList(
                nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])
            )
            self.join = nn.ModuleList(self._block(2 * w, w) for w in reversed(widths[:-1]))
            self.last = nn.Conv2d(widths[0], 2, 1)

        @staticmethod
        def _block(inside: int, outside: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inside, outside, 3, padding=1),
                nn.BatchNorm2d(outside),
                nn.ReLU(),
                nn.Conv2d(outside, outside, 3, padding=1),
                nn.BatchNorm2d(outside),
                nn.ReLU(),
            )

        def forward(self, x: Any) -> Any:
            skipped = []
            for level, block in enumerate(self.down):
                x = block(nn.functional.max_pool2d(x, 2) if level else x)
                skipped.append(x)
            for up, join, skip in zip(self.up, self.join, reversed(skipped[:-1]), strict=True):
                x = join(torch.cat([up(x), skip], 1))
            return self.last(x)

    return UNet()


MODELS: dict[str, Callable[[], Any]] = {
    "ResNet-50": _torchvision("resnet50"),
    "MobileNetV3": _torchvision("mobilenet_v3_large"),
    "EfficientNet-B0": _torchvision("efficientnet_b0"),
    "ViT-S": _vit_small,
    "ConvNeXt-T": _torchvision("convnext_tiny"),
    "BERT": _bert,
    "U-Net": _unet,
}


def export(name: str, folder: Path) -> Path:
    """Write the model, one file with its weights, and its input.

    Args:
        name: one of :data:`MODELS`.
        folder: where to.

    Returns:
        The model's path.
    """
    import torch

    torch.manual_seed(SEED)
    model = MODELS[name]().eval()
    random = np.random.default_rng(SEED)
    if name == "BERT":
        key, array = "ids", random.integers(0, 30_000, (1, 128))
    else:
        key, array = "x", random.standard_normal(PHOTO).astype(np.float32)
    path = folder / f"{name}.onnx"
    torch.onnx.export(
        model,
        (torch.from_numpy(array),),
        str(path),
        dynamo=True,
        input_names=[key],
        external_data=False,
        verbose=False,
    )
    np.savez(folder / f"{name}.npz", **{key: array})
    return path


def main() -> None:
    """Export what is named, or all."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or MODELS:
        print(export(name, folder), flush=True)


if __name__ == "__main__":
    main()
