"""Well-known architectures with seeded weights, exported by PyTorch's dynamo exporter:
``python -m benchmarks.models.exported FOLDER [NAMES]`` writes NAME.onnx and NAME.npz (needs torch,
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
DETECTED = (1, 3, 640, 640)


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


def _vit_large() -> Any:
    from torch import nn
    from torchvision import models

    model = models.vit_l_16(weights=None)
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


def _rt_detr() -> Any:
    """RT-DETR with a ResNet-101 backbone, nothing fetched."""
    import torch
    from torch import nn
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    class Detector(nn.Module):  # type: ignore[misc]
        """Logits and boxes alone."""

        def __init__(self) -> None:
            super().__init__()
            backbone = RTDetrResNetConfig(
                depths=[3, 4, 23, 3],
                layer_type="bottleneck",
                out_features=["stage2", "stage3", "stage4"],
            )
            # The sizes of rtdetr_r101vd: a wider encoder, and anchors of one image size.
            config = RTDetrConfig(
                backbone_config=backbone,
                num_labels=80,
                encoder_in_channels=[512, 1024, 2048],
                encoder_hidden_dim=384,
                encoder_ffn_dim=2048,
                decoder_in_channels=[384, 384, 384],
                anchor_image_size=list(DETECTED[2:]),
            )
            self.detector = RTDetrForObjectDetection(config)
            # Normalisation by seeded statistics of the data, not by 0 and 1: 33 blocks that each
            # add to what they get would leave FP16's range.
            with torch.no_grad():
                for module in self.detector.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.momentum = None
                self.detector.train()
                self.detector.model.backbone(torch.randn(2, *DETECTED[1:]), torch.ones(2, 640, 640))

        def forward(self, x: Any) -> Any:
            found = self.detector(x)
            return found.logits, found.pred_boxes

    return Detector()


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
    "ViT-L": _vit_large,
    "RT-DETR-R101": _rt_detr,
    "ConvNeXt-T": _torchvision("convnext_tiny"),
    "BERT": _bert,
    "U-Net": _unet,
}


def export(name: str, folder: Path, shape: tuple[int, ...] | None = None) -> Path:
    """Write the model, one file with its weights, and its input.

    Args:
        name: one of :data:`MODELS`.
        folder: where to.
        shape: the input's, None for a batch of one.

    Returns:
        The model's path.
    """
    import torch

    torch.manual_seed(SEED)
    model = MODELS[name]().eval()
    random = np.random.default_rng(SEED)
    if name == "BERT":
        key, array = "ids", random.integers(0, 30_000, shape or (1, 128))
    else:
        shape = shape or (DETECTED if name.startswith("RT-DETR") else PHOTO)
        key, array = "x", random.standard_normal(shape).astype(np.float32)
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
