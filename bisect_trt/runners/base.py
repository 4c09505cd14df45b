"""The interface of a runner: it executes one model under many plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample

UNSUPPORTED = "unsupported"
"""A runner's fact: the layers that it has no kernel for at the plan's precision."""


class Repeated(dict[str, NDArray[Any]]):
    """One sample's outputs from a runner that ran it several times.

    The mapping is the most frequent answer, ``runs`` counts all runs. ``others`` pairs each answer
    that differs in any bit with its count.
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

    ``name`` is the word of ``--runner``. ``versions`` goes into run.json and, with the name, into
    the cache's keys: another version may answer differently.
    """

    name: str
    versions: Mapping[str, str]

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Yields the outputs of each of ``samples`` in order, one sample in memory at a time.

        Raises:
            RunnerFailedError: the plan cannot be executed.
        """
        ...

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        """Returns what else the last execution of ``plan`` showed, as plain data for the cache.

        It may hold ``seconds`` by step, ``latency_ms``, ``engine_bytes``, ``findings``.
        """
        ...


@runtime_checkable
class Patient(Protocol):
    """A runner that waits ``timeout_s`` seconds for an answer; None waits for ever."""

    @property
    def timeout_s(self) -> float | None:
        """The limit; an evaluation that timed out is repeated only under a longer one."""
        ...


@runtime_checkable
class Restartable(Runner, Protocol):
    """A runner that works in a process that can be replaced."""

    def start_afresh(self) -> None:
        """Ends the process; the next plan is executed in a new one."""
        ...
