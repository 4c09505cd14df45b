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
SMALL_DETECTED = (1, 3, 256, 256)
RESTORED = (1, 3, 64, 64)
MATCHED = (1, 3, 128, 128)


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


def _rt_detr(
    side: int = DETECTED[-1], *, every_anchor: bool = False, same_anchors: bool = False
) -> Any:
    """RT-DETR with a ResNet-101 backbone, nothing fetched.

    With ``every_anchor`` all anchors are queries, and the outputs are in the anchors' order: near
    ties in the selection, which random weights make everywhere, then move no rows. With
    ``same_anchors`` the queries are 300 seeded anchors in a seeded order, for any image.
    """
    import torch
    from torch import nn
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    class Preferring(nn.Module):  # type: ignore[misc]
        """Scores that rank 300 seeded anchors first, farther apart than FP16's errors."""

        def __init__(self, scores: Any, valid: Any) -> None:
            super().__init__()
            self.scores = scores
            places = torch.nonzero(valid[0, :, 0])[:, 0]
            chosen = places[torch.randperm(len(places))[:300]]
            ahead = torch.zeros(1, valid.shape[1], 1)
            ahead[0, chosen, 0] = 16.0 * torch.arange(1, 301, dtype=torch.float32)
            self.register_buffer("ahead", ahead)

        def forward(self, memory: Any) -> Any:
            return self.scores(memory) + self.ahead

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
                anchor_image_size=[side, side],
                num_queries=sum((side // s) ** 2 for s in (8, 16, 32)) if every_anchor else 300,
                freeze_backbone_batch_norms=not (every_anchor or same_anchors),
            )
            self.detector = RTDetrForObjectDetection(config)
            if same_anchors:
                model = self.detector.model
                model.enc_score_head = Preferring(model.enc_score_head, model.valid_mask)
            # Normalisation by seeded statistics of the data, not by 0 and 1: 33 blocks that each
            # add to what they get would leave FP16's range.
            with torch.no_grad():
                for module in self.detector.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.momentum = None
                self.detector.train()
                images, mask = torch.randn(2, 3, side, side), torch.ones(2, side, side)
                if every_anchor or same_anchors:  # the neck's normalisations too
                    self.detector(images)
                else:
                    self.detector.model.backbone(images, mask)

        def forward(self, x: Any) -> Any:
            found = self.detector(x)
            if not every_anchor:
                return found.logits, found.pred_boxes
            best = found.enc_outputs_class.max(-1).values
            order = torch.topk(best, best.shape[1], dim=1).indices.argsort(1)[..., None]
            logits = found.logits.gather(1, order.expand(-1, -1, found.logits.shape[-1]))
            return logits, found.pred_boxes.gather(1, order.expand(-1, -1, 4))

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


def _nafnet_block() -> Any:
    """The class of NAFNet's blocks; beta and gamma are seeded, not zero."""
    import torch
    from torch import nn

    class LayerNorm2d(nn.Module):  # type: ignore[misc]
        """Over the channels."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(channels, 1, 1))
            self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

        def forward(self, x: Any) -> Any:
            centred = x - x.mean(1, keepdim=True)
            variance = centred.pow(2).mean(1, keepdim=True)
            return self.weight * (centred / (variance + 1e-6).sqrt()) + self.bias

    class Gate(nn.Module):  # type: ignore[misc]
        """One half of the channels times the other."""

        def forward(self, x: Any) -> Any:
            first, second = x.chunk(2, dim=1)
            return first * second

    class Attended(nn.Module):  # type: ignore[misc]
        """Each channel times what the means of all say."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            self.mix = nn.Conv2d(channels, channels, 1)

        def forward(self, x: Any) -> Any:
            return x * self.mix(x.mean((2, 3), keepdim=True))

    class Block(nn.Module):  # type: ignore[misc]
        """Two residual halves."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            double = 2 * channels
            self.first = nn.Sequential(
                LayerNorm2d(channels),
                nn.Conv2d(channels, double, 1),
                nn.Conv2d(double, double, 3, padding=1, groups=double),
                Gate(),
                Attended(channels),
                nn.Conv2d(channels, channels, 1),
            )
            self.second = nn.Sequential(
                LayerNorm2d(channels),
                nn.Conv2d(channels, double, 1),
                Gate(),
                nn.Conv2d(channels, channels, 1),
            )
            self.beta = nn.Parameter(0.2 * torch.randn(channels, 1, 1))
            self.gamma = nn.Parameter(0.2 * torch.randn(channels, 1, 1))

        def forward(self, x: Any) -> Any:
            x = x + self.beta * self.first(x)
            return x + self.gamma * self.second(x)

    return Block


def _nafnet(width: int = 32) -> Any:
    """NAFNet (arXiv 2204.04676), as for SIDD."""
    from torch import nn

    block = _nafnet_block()

    def blocks(channels: int, count: int) -> Any:
        return nn.Sequential(*(block(channels) for _ in range(count)))

    class NAFNet(nn.Module):  # type: ignore[misc]
        """Four levels; the image is added at the end."""

        def __init__(self) -> None:
            super().__init__()
            widths = [width << level for level in range(4)]
            self.intro = nn.Conv2d(3, width, 3, padding=1)
            self.encoders = nn.ModuleList(map(blocks, widths, (2, 2, 4, 8)))
            self.downs = nn.ModuleList(nn.Conv2d(w, 2 * w, 2, stride=2) for w in widths)
            self.middle = blocks(2 * widths[-1], 12)
            self.ups = nn.ModuleList(
                nn.Sequential(nn.Conv2d(2 * w, 4 * w, 1, bias=False), nn.PixelShuffle(2))
                for w in reversed(widths)
            )
            self.decoders = nn.ModuleList(blocks(w, 2) for w in reversed(widths))
            self.ending = nn.Conv2d(width, 3, 3, padding=1)

        def forward(self, image: Any) -> Any:
            x, skipped = self.intro(image), []
            for encoder, down in zip(self.encoders, self.downs, strict=True):
                skipped.append(encoder(x))
                x = down(skipped[-1])
            x = self.middle(x)
            for up, decoder, skip in zip(self.ups, self.decoders, reversed(skipped), strict=True):
                x = decoder(up(x) + skip)
            return self.ending(x) + image

    return NAFNet()


def _raft_small() -> Any:
    from torch import nn
    from torchvision.models.optical_flow import raft_small

    class Flow(nn.Module):  # type: ignore[misc]
        """The last of four estimates."""

        def __init__(self) -> None:
            super().__init__()
            self.raft = raft_small(weights=None)

        def forward(self, first: Any, second: Any) -> Any:
            return self.raft(first, second, num_flow_updates=4)[-1]

    return Flow()


MODELS: dict[str, Callable[[], Any]] = {
    "ResNet-50": _torchvision("resnet50"),
    "MobileNetV3": _torchvision("mobilenet_v3_large"),
    "EfficientNet-B0": _torchvision("efficientnet_b0"),
    "ViT-S": _vit_small,
    "ViT-S-batches": _vit_small,
    "ViT-L": _vit_large,
    "RT-DETR-R101": _rt_detr,
    "RT-DETR-R101-anchors": lambda: _rt_detr(same_anchors=True),
    "RT-DETR-R101-small": lambda: _rt_detr(SMALL_DETECTED[-1], every_anchor=True),
    "ConvNeXt-T": _torchvision("convnext_tiny"),
    "BERT": _bert,
    "U-Net": _unet,
    "NAFNet": _nafnet,
    "RAFT-S": _raft_small,
}
"""``ViT-S-batches`` takes any number of images, the others one."""

SHAPES = {
    "RT-DETR-R101": DETECTED,
    "RT-DETR-R101-anchors": DETECTED,
    "RT-DETR-R101-small": SMALL_DETECTED,
    "NAFNet": RESTORED,
    "RAFT-S": MATCHED,
}
"""Shapes of the images that are not :data:`PHOTO`."""


def _inputs(name: str, shape: tuple[int, ...] | None) -> dict[str, np.ndarray]:
    """Seeded noise, or ids of words."""
    random = np.random.default_rng(SEED)
    if name == "BERT":
        return {"ids": random.integers(0, 30_000, shape or (1, 128))}
    keys = ("first", "second") if name == "RAFT-S" else ("x",)
    shape = shape or SHAPES.get(name, PHOTO)
    return {key: random.standard_normal(shape).astype(np.float32) for key in keys}


def export(name: str, folder: Path, shape: tuple[int, ...] | None = None) -> Path:
    """Write the model, one file with its weights, and its input.

    Args:
        name: one of :data:`MODELS`.
        folder: where to.
        shape: that of the input, if not the model's own.

    Returns:
        The model's path.
    """
    import torch

    torch.manual_seed(SEED)
    model = MODELS[name]().eval()
    inputs = _inputs(name, shape)
    path = folder / f"{name}.onnx"
    torch.onnx.export(
        model,
        tuple(map(torch.from_numpy, inputs.values())),
        str(path),
        dynamo=True,
        input_names=list(inputs),
        dynamic_shapes=({0: "images"},) if name == "ViT-S-batches" else None,
        external_data=False,
        verbose=False,
    )
    np.savez(folder / f"{name}.npz", **inputs)
    return path


def main() -> None:
    """Export what is named, or all."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or MODELS:
        print(export(name, folder), flush=True)


if __name__ == "__main__":
    main()
