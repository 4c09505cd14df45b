"""Small networks of public libraries, exported by PyTorch: ``python -m benchmarks.models.zoo
[NAMES]`` writes each as ``.cache/zoo/NAME.onnx`` and its inputs into ``.cache/zoo/NAME``.

They have the layers of the published networks, fewer and narrower, and seeded weights: nothing is
fetched. It needs torch, torchvision, timm, transformers and onnxscript, which bisect-trt itself
does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "zoo"
_INPUTS = 3
_WORDS = (1, 12)
_IMAGE = (1, 3, 64, 64)
_VOCABULARY = 200
_STACK_TRACE = "pkg.torch.onnx.stack_trace"
"""Metadata with paths of the machine that exported."""


@dataclass(frozen=True)
class Network:
    """``make`` builds the module; ``shape`` is its input's, ids of words if ``of_words``."""

    make: Callable[[], Any]
    shape: tuple[int, ...] = _IMAGE
    of_words: bool = False
    dynamo: bool = True


def _timm(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import timm

        return timm.create_model(name, num_classes=10, **options)

    return make


def _torchvision(name: str) -> Callable[[], Any]:
    def make() -> Any:
        from torchvision import models

        return getattr(models, name)(weights=None, num_classes=10)

    return make


def _transformers(model: str, config: str, **options: Any) -> Callable[[], Any]:
    """A network of two layers and width 64; its first output, written out (no fused attention)."""

    def make() -> Any:
        import transformers
        from torch import nn

        made = getattr(transformers, config)(**options)
        made._attn_implementation = "eager"

        class First(nn.Module):  # type: ignore[misc]
            """The first output alone."""

            def __init__(self) -> None:
                super().__init__()
                self.network = getattr(transformers, model)(made)

            def forward(self, x: Any) -> Any:
                return self.network(x, return_dict=False)[0]

        return First()

    return make


_TEXT = {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "intermediate_size": 128}
_BERT = _transformers("BertModel", "BertConfig", **_TEXT, **_HEADS)


def _recurrent() -> Any:
    from torch import nn

    class Recurrent(nn.Module):  # type: ignore[misc]
        """Convolutions, an LSTM in both directions and a GRU, as speech recognisers have."""

        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Sequential(nn.Conv1d(16, 32, 5, padding=2), nn.BatchNorm1d(32))
            self.lstm = nn.LSTM(32, 24, bidirectional=True, batch_first=True)
            self.gru = nn.GRU(48, 24, batch_first=True)
            self.head = nn.Linear(24, 10)

        def forward(self, x: Any) -> Any:
            seen = nn.functional.relu(self.front(x)).transpose(1, 2)
            return self.head(self.gru(self.lstm(seen)[0])[0]).log_softmax(-1)

    return Recurrent()


NETWORKS: dict[str, Network] = {
    "mobilenetv3": Network(_timm("mobilenetv3_small_050")),
    "shufflenet": Network(_torchvision("shufflenet_v2_x0_5")),
    "convnext": Network(_timm("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 64, 128))),
    "vit": Network(
        _timm("vit_tiny_patch16_224", img_size=64, depth=3, embed_dim=64, num_heads=4)
    ),
    "swin": Network(
        _timm(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(1, 2),
            num_heads=(2, 4),
        )
    ),
    "bert": Network(_BERT, _WORDS, of_words=True),
    "bert-torchscript": Network(_BERT, _WORDS, of_words=True, dynamo=False),
    "gpt2": Network(
        _transformers(
            "GPT2Model", "GPT2Config", vocab_size=_VOCABULARY, n_embd=64, n_layer=2, n_head=4,
            use_cache=False,
        ),
        _WORDS,
        of_words=True,
    ),
    "llama": Network(
        _transformers(
            "LlamaModel", "LlamaConfig", **_TEXT, **_HEADS, num_key_value_heads=2, use_cache=False
        ),
        _WORDS,
        of_words=True,
    ),
    "t5-encoder": Network(
        _transformers(
            "T5EncoderModel", "T5Config", vocab_size=_VOCABULARY, d_model=64, d_kv=16, d_ff=128,
            num_layers=2, num_heads=4, use_cache=False,
        ),
        _WORDS,
        of_words=True,
    ),
    "clip-text": Network(
        _transformers("CLIPTextModel", "CLIPTextConfig", **_TEXT, **_HEADS, projection_dim=64),
        _WORDS,
        of_words=True,
    ),
    "recurrent-torchscript": Network(_recurrent, (1, 16, 20), dynamo=False),
}  # fmt: skip
"""By name; most are written by the dynamo exporter."""


def _inputs(network: Network) -> list[np.ndarray]:
    """Ids of words, or smooth waves with a little noise: neighbours correlate."""
    made = []
    for number in range(_INPUTS):
        random = np.random.default_rng(number)
        if network.of_words:
            made.append(random.integers(0, _VOCABULARY, network.shape))
            continue
        steps = np.linspace(0.0, 6.0, network.shape[-1])
        phase = random.uniform(0.0, 6.3, network.shape[:-1])[..., None]
        waves = np.sin(steps * random.uniform(0.5, 2.0) + phase)
        noise = random.standard_normal(network.shape)
        made.append((waves + 0.1 * noise).astype(np.float32))
    return made


def export(name: str, folder: Path = FOLDER) -> Path:
    """Writes a network of :data:`NETWORKS` and its inputs; returns the model's path."""
    import torch

    torch.manual_seed(0)
    network = NETWORKS[name]
    module, inputs = network.make().eval(), _inputs(network)
    (folder / name).mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.onnx"
    torch.onnx.export(
        module,
        (torch.from_numpy(inputs[0]),),
        str(path),
        dynamo=network.dynamo,
        input_names=["x"],
        verbose=False,
        **({"external_data": False} if network.dynamo else {}),
    )
    onnx.save(_without_paths(onnx.load(path)), path)
    for number, array in enumerate(inputs):
        np.savez(folder / name / f"{number}.npz", x=array)
    return path


def _without_paths(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` without the exporter's paths: the same bytes on every machine."""
    for node in (n for g in (model.graph, *model.functions) for n in g.node):
        kept = [(p.key, p.value) for p in node.metadata_props if p.key != _STACK_TRACE]
        del node.metadata_props[:]
        node.doc_string = ""
        for key, value in kept:
            node.metadata_props.add(key=key, value=value)
    return model


def main() -> None:
    """Exports what is named, or all."""
    for name in sys.argv[1:] or NETWORKS:
        print(export(name), flush=True)


if __name__ == "__main__":
    main()
