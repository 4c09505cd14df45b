"""The log's entries of plans that were run on a panel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.probe.result import PanelResult, ProbeResult

PANEL = "panel"


class PanelLog:
    """Adds one runner's panels to a run's log. May be called from several threads, one at a time.

    Args:
        log: of the run.
        runner: whose answers they are.
        on_probe: hears of each new entry.
    """

    def __init__(
        self, log: list[ProbeResult], runner: str, on_probe: Callable[[ProbeResult], None]
    ) -> None:
        self._log, self._runner, self._on_probe = log, runner, on_probe
        self._entries: dict[
            tuple[PrecisionPlan, tuple[str, ...], tuple[float, ...]], ProbeResult
        ] = {}

    def entry(self, answer: PanelResult) -> ProbeResult | None:
        """That of ``answer``; None where nothing was run. What was asked before, and answered from
        what was known, is no other probe.
        """
        if not answer.results:
            return None
        key = (answer.plan, answer.names, tuple(r.score for r in answer.results))
        if key not in self._entries:
            found = ProbeResult.over(answer.plan, self._runner, answer.results, {}, PANEL)
            missed, of = answer.missed(), len(answer.results)
            note = found.note or f"{missed} of {of} samples miss; worst {answer.worst[0]}"
            result = self._entries[key] = replace(found, note=note)
            self._log.append(result)
            self._on_probe(result)
        return self._entries[key]
