"""The protocol every runner meets: a plan in, each sample's outputs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample

UNSUPPORTED = "unsupported"
"""The key of a runner's facts for layers that it does not take at the plan's precision."""


class Repeated(dict[str, NDArray[Any]]):
    """One sample's outputs by a runner that ran it several times: the answer that came most often.

    ``runs`` counts all of them; ``others`` holds each answer that was not the same bit for bit, and
    how often it came.
    """

    def __init__(
        self,
        outputs: Mapping[str, NDArray[Any]],
        runs: int,
        others: Sequence[tuple[Mapping[str, NDArray[Any]], int]] = (),
    ) -> None:
        super().__init__(outputs)
        self.runs = runs
        self.others = tuple(others)


class Runner(Protocol):
    """Executes one model, given at construction, under many plans.

    ``name`` is the word of ``--runner`` and of the cache; ``versions`` goes into run.json and,
    with the name, into the cache's keys, because another version may answer differently.
    """

    name: str
    versions: Mapping[str, str]

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        """The outputs of each of ``samples`` in order, one sample in memory at a time.

        Raises:
            RunnerFailedError: the plan cannot be executed.
        """
        ...

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        """What else the last execution of ``plan`` showed, as plain data for the cache:
        ``seconds`` by step, ``latency_ms``, ``engine_bytes``, ``findings``. Empty for a runner that
        has nothing to add.
        """
        ...


@runtime_checkable
class Patient(Protocol):
    """A runner that waits ``timeout_s`` seconds for an answer; None for as long as it takes."""

    @property
    def timeout_s(self) -> float | None:
        """What is timed out may be answered by one that waits longer."""
        ...


@runtime_checkable
class Restartable(Runner, Protocol):
    """A runner whose work is done in a process that can be replaced by a new one."""

    def start_afresh(self) -> None:
        """End the process; the next plan is executed in another."""
        ...
