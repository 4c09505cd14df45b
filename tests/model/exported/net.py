"""The model that dynamo.onnx and torchscript.onnx beside it were exported from, with PyTorch 2.13.0
and onnxscript: ``python net.py`` in this folder writes both anew.
"""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weight = torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1)
        return weight @ v


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm(x)).pow(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.head = nn.Conv1d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


if __name__ == "__main__":
    import net  # its classes shall not be __main__'s

    torch.manual_seed(0)
    model, example = net.Net().eval(), (torch.randn(1, 4, 8),)
    torch.onnx.export(model, example, dynamo=True, external_data=False).save("dynamo.onnx")
    torch.onnx.export(model, example, "torchscript.onnx", dynamo=False, verbose=True)
