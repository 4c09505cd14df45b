"""A piece as it is tried: its model, the recorded inputs, and what FP32 makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.piece import Bypass, Piece
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.extracted import Extractor, declare_shapes
from bisect_trt.runners.ort.recorded import Recorded, outputs_of


@dataclass(frozen=True)
class Specimen:
    """``model`` is FP32; ``expected`` holds its outputs for ``sample`` on ONNX Runtime, by name.

    ``reseeded`` says that its weights are not the model's own.
    """

    piece: Piece
    model: onnx.ModelProto
    sample: Sample
    expected: Mapping[str, NDArray[Any]]
    reseeded: bool = False

    @property
    def key(self) -> tuple[Piece, bool]:
        """What tells it from others of its model."""
        return self.piece, self.reseeded


class Specimens:
    """The pieces of one model on one sample.

    Args:
        graph: the model.
        sample: its inputs.
        folder: for the recorded tensors; whoever made it removes it.
    """

    def __init__(self, graph: Graph, sample: Sample, folder: Path) -> None:
        self._extractor = Extractor(graph)
        self._sample = sample
        self._recorded = Recorded(self._extractor, sample, folder)
        self.nodes = self._extractor.nodes
        self.whole = Piece(frozenset(self.nodes))

    def of(self, piece: Piece) -> Specimen:
        """``piece`` with its inputs and what it gives.

        Raises:
            RunnerFailedError: ONNX Runtime cannot run it, or a tensor of its border is no array.
        """
        border = self._extractor.border(piece)
        inputs = self._recorded.of(border.inputs)
        values = inputs | self._recorded.of(border.constants)
        try:
            model = self._extractor.extract(piece, values)
        except KeyError as error:  # a type of ONNX's that NumPy's files do not know
            raise RunnerFailedError(f"the piece cannot be written ({error})") from error
        expected = outputs_of(model, inputs, self._sample.name)
        if piece != self.whole:
            declare_shapes(model, expected)
        return Specimen(piece, model, Sample(self._sample.name, inputs), expected)

    def with_weights(self, specimen: Specimen, model: onnx.ModelProto) -> Specimen:
        """``specimen`` with the weights of ``model``, and what it then gives. Raises as
        :meth:`of`.
        """
        expected = outputs_of(model, specimen.sample.arrays, self._sample.name)
        return replace(specimen, model=model, expected=expected, reseeded=True)

    def described(self, piece: Piece) -> tuple[tuple[str, str], ...]:
        """The kept nodes in the file's order, each with its operator."""
        return tuple((n, self._extractor.operator(n)) for n in self.nodes if n in piece.kept)

    def bypasses(self, piece: Piece) -> list[Bypass]:
        """Those that can be made in ``piece``: a node that gives one tensor gives way to an input
        of the same type and shape.
        """
        found = []
        for node in (n for n in self.nodes if n in piece.kept):
            sources, outputs = self._extractor.tensors(node)
            if len(outputs) != 1:
                continue
            try:
                values = self._recorded.of([*sources, *outputs])
            except RunnerFailedError:
                continue
            made = values[outputs[0]]
            found += [
                Bypass(node, s)
                for s in sources
                if (values[s].dtype, values[s].shape) == (made.dtype, made.shape)
            ]
        return found
