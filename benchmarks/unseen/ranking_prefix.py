"""The line to beat: the shortest prefix of the ranking that holds on the given inputs and on copies
with redrawn roundings, neither shrunk nor tested.

``python -m benchmarks.unseen.ranking_prefix MODEL INPUTS OUT REQUIREMENT [METRIC] [--pins N]``
writes ``run.json`` into the folder OUT, with the keys of the command's that
``benchmarks.unseen.plans`` reads. With ``--pins`` the prefix is the first N layers, whatever it
holds on.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from bisect_trt.base.interrupt import Observer
from bisect_trt.search.prefix import shortest_prefix
from bisect_trt.settings import Settings
from bisect_trt.steps.baselines import measure_baselines
from bisect_trt.steps.context import Bench, open_bench
from bisect_trt.steps.diagnosis import Triage, find_cause
from bisect_trt.steps.failing_inputs import Unseen
from bisect_trt.steps.problem import Case, load
from bisect_trt.steps.search_set import Panel, PanelSamples, panel_samples


def rank(case: Case, bench: Bench, samples: PanelSamples) -> Triage:
    """The ranking over some of ``samples``, as a robust search makes it.

    Args:
        case: of which everything lowered need not fail.
        bench: what emulates.
        samples: what to rank on.

    Raises:
        SystemExit: pinning cannot help.
    """
    baselines = measure_baselines(case, bench)
    unseen = Unseen(samples, baselines.lowered, None, None)
    triage = find_cause(case, bench, baselines, None, unseen)
    if not isinstance(triage, Triage):
        raise SystemExit(triage.sentence)
    return triage


def main() -> None:
    """Rank, cut, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "inputs", "out", "require"):
        parser.add_argument(name)
    parser.add_argument("metrics", nargs="*")
    parser.add_argument("--pins", type=int)
    asked = parser.parse_args()
    out = Path(asked.out)
    settings = Settings(
        asked.model,
        [asked.inputs],
        require=asked.require,
        metrics=asked.metrics,
        runner="emulated",
        out=out,
    )
    case = load(settings, Observer())
    with open_bench(case, Observer()) as bench:
        samples = replace(panel_samples(case, bench), variants=())
        triage = rank(case, bench, samples)
        panel = Panel(case, bench, case.base, samples)

        def passes(count: int) -> bool:
            return panel.ask(frozenset(triage.ranking[:count]), 1.0).verdict.passed

        length = asked.pins
        if length is None:
            length = shortest_prefix(len(triage.ranking), passes)
        if length is None:
            raise SystemExit("not even all pins pass")
        found = {
            "pinned": list(triage.ranking[:length]),
            "probes": dict(bench.ledger().probes),
            "effect_runs": triage.sensitivity.runs,
        }
    (out / "run.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
