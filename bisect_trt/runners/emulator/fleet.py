"""The emulator on several workers, behind the one runner protocol.

The journal stays with the caller, so workers may die at any time. The model
travels once, when a worker starts, inputs with each call. A worker that is lost says nothing of
the plan it worked on: it is asked again, and then the run ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bisect_trt.core.errors import MachineError, RunnerFailedError, one_line
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.runners.emulator.runner import EmulatedRunner, versions_on
from bisect_trt.runners.ort.devices import CPU, Device
from bisect_trt.runners.workers.crew import Crew

_CHUNK = 12


class EmulatedFleet:
    """The ``emulated`` runner on a crew of :class:`EmulationServer`.

    Args:
        local: says what the answers are known by.
        crew: asks again by itself where a member is lost.
        timeout_s: the seconds that one inference may take; None for ever.
        device: what the members compute on.
    """

    def __init__(
        self,
        local: EmulatedRunner,
        crew: Crew,
        timeout_s: float | None = None,
        device: Device = CPU,
    ) -> None:
        self.name = local.name
        self.versions: Mapping[str, str] = versions_on(device)
        self._crew = crew
        self.timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self._crew)

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Arrays]:
        yield from self._call(len(samples), "outputs", plan.to_json(), list(samples))

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def effects(
        self, sample: Sample, precision: Precision, wanted: Sequence[str]
    ) -> Iterator[tuple[str, Arrays | None]]:
        """As :meth:`EmulatedRunner.effects`: in pieces, all workers at once."""
        # Each piece runs the exact history up to its layers, so pieces are runs of neighbours.
        pieces = [wanted[i : i + _CHUNK] for i in range(0, len(wanted), _CHUNK)]

        def ask(piece: Sequence[str]) -> list[tuple[str, Arrays | None]]:
            answer: list[tuple[str, Arrays | None]] = self._call(
                len(piece), "effects", sample, precision.value, piece
            )
            return answer

        with ThreadPoolExecutor(len(self._crew)) as pool:
            for answer in pool.map(ask, pieces):
                yield from answer

    def _call(self, inferences: int, method: str, *arguments: Any) -> Any:
        """The crew's answer.

        Raises:
            MachineError: whoever was asked died or hung, again and again.
        """
        limit = None if self.timeout_s is None else self.timeout_s * max(1, inferences)
        try:
            return self._crew.call(method, *arguments, timeout_s=limit)
        except RunnerFailedError as error:
            if not error.lost:
                raise
            raise MachineError(
                f"--workers {len(self._crew)}: an emulator's worker was lost again and again "
                f"({one_line(error, 120)}); nothing is concluded from it. Use fewer --workers or a "
                "machine with more memory, and run the same command again to go on from here"
            ) from error

    def close(self) -> None:
        """End the workers."""
        self._crew.close()
