"""The emulator as an object that serves plans from another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from google.protobuf.message import EncodeError
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.runners.base import Sample
from bisect_trt.runners.emulator.runner import EmulatedRunner

Arrays = dict[str, NDArray[Any]]
SERVER = "bisect_trt.runners.emulator.server:EmulationServer"


def server_arguments(
    model: onnx.ModelProto, samples: Sequence[Sample], base: Precision, threads: int
) -> dict[str, Any]:
    """What an :class:`EmulationServer` is made of. Raises :class:`BadInputError` for a model that
    does not fit into one message.
    """
    try:
        content = model.SerializeToString()
    except (ValueError, EncodeError) as error:
        raise BadInputError(
            "--workers: a model above 2 GB cannot be sent to worker processes; use --workers 1"
        ) from error
    return {
        "model": content,
        "samples": [(s.name, dict(s.arrays)) for s in samples],
        "base": base.value,
        "threads": threads,
    }


class EmulationServer:
    """Holds the model and the samples; ``threads`` is what one worker may use."""

    def __init__(
        self,
        model: bytes,
        samples: Sequence[tuple[str, Mapping[str, NDArray[Any]]]],
        base: str,
        threads: int,
    ) -> None:
        self._samples = [Sample(name, arrays) for name, arrays in samples]
        self._runner = EmulatedRunner(
            onnx.load_from_string(model), self._samples, Precision(base), threads=threads
        )

    def outputs(self, plan: str) -> list[Arrays]:
        """The outputs of each sample under ``plan`` (its JSON)."""
        return [dict(outputs) for outputs in self._runner.outputs(PrecisionPlan.from_json(plan))]

    def effects(
        self, number: int, precision: str, layers: Sequence[str]
    ) -> list[tuple[str, Arrays | None]]:
        """The outputs of sample ``number`` when only one of ``layers`` is lowered, for each in
        network order.
        """
        found = self._runner.effects(self._samples[number], Precision(precision), layers)
        return [(name, None if outputs is None else dict(outputs)) for name, outputs in found]
