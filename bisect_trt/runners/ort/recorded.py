"""The reference's inner tensors for one sample, computed when they are first asked for and kept on
disk: a whole network's would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.sample import Sample
from bisect_trt.graph.passes.extracted import Extractor
from bisect_trt.runners.ort.sessions import run_all, session_as_written

_TOGETHER = 32
"""So many tensors at most are in memory beside what the reference itself needs."""


class Recorded:
    """Tensors of the FP32 reference by name, on one sample.

    ONNX Runtime runs the model as written, so that a tensor's value does not depend on what else is
    recorded, and a piece that is fed with them gives the rest bit for bit.

    Args:
        extractor: over the model.
        sample: its inputs.
        folder: where the tensors are kept; whoever made it removes it.
    """

    def __init__(self, extractor: Extractor, sample: Sample, folder: Path) -> None:
        self._extractor = extractor
        self._sample = sample
        self._folder = folder
        self._files: dict[str, Path] = {}

    def of(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """The values of ``names``, inputs of the model among them.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute one, or it is no array.
        """
        wanted = list(names)
        given = self._sample.arrays
        missing = [n for n in wanted if n not in given and n not in self._files]
        for start in range(0, len(missing), _TOGETHER):
            self._record(missing[start : start + _TOGETHER])
        return {n: given[n] if n in given else np.load(self._files[n]) for n in wanted}

    def _record(self, names: Sequence[str]) -> None:
        model = self._extractor.recorder(names)
        for name, array in outputs_of(model, self._sample.arrays, self._sample.name).items():
            path = self._folder / f"{len(self._files)}.npy"
            np.save(path, array)
            self._files[name] = path


def outputs_of(
    model: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]], where: str
) -> dict[str, NDArray[Any]]:
    """The outputs of ``model`` as written, arrays by name.

    Args:
        model: any that ONNX Runtime can run.
        arrays: its inputs, and maybe more.
        where: what an error names.

    Raises:
        RunnerFailedError: it cannot be run, or an output is a sequence or text.
    """
    # Old models name their initialisers among the inputs.
    taken = {v.name: arrays[v.name] for v in model.graph.input if v.name in arrays}
    outputs = run_all(session_as_written(model, where), taken, where)
    for name, array in outputs.items():
        if array.dtype.hasobject:
            raise RunnerFailedError(f"{where}: tensor {name!r} is no array of numbers")
    return outputs
