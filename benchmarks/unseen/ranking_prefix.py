"""The line to beat: the shortest prefix of the ranking that holds on the given inputs and on copies
with perturbed inputs, neither shrunk nor tested.

``python -m benchmarks.unseen.ranking_prefix MODEL INPUTS OUT REQUIREMENT [METRIC] [--pins N]``
writes ``run.json`` into the folder OUT, with the keys of the command's that
``benchmarks.unseen.plans`` reads. With ``--pins`` the prefix is the first N layers, whatever it
holds on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import InputKind
from bisect_trt.search.prefix import shortest_prefix
from bisect_trt.settings import Settings
from bisect_trt.steps.baselines import measure_baselines
from bisect_trt.steps.context import Context, open_context
from bisect_trt.steps.diagnosis import Triage, find_cause
from bisect_trt.steps.failing_inputs import UnseenInputs
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.search_set import SearchSamples, SearchSet, search_samples


def rank(problem: Problem, context: Context, samples: SearchSamples) -> Triage:
    """The ranking over some of ``samples``, as a validated search makes it.

    Args:
        problem: of which everything reduced need not fail.
        context: what emulates.
        samples: what to rank on.

    Raises:
        SystemExit: pinning cannot help.
    """
    baselines = measure_baselines(problem, context)
    unseen = UnseenInputs(samples, baselines.reduced, None, None)
    triage = find_cause(problem, context, baselines, None, unseen)
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
        metric=asked.metrics,
        runner="emulated",
        out=out,
    )
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as context:
        samples = {**search_samples(problem, context), InputKind.AUGMENTED: ()}
        triage = rank(problem, context, samples)
        search_set = SearchSet(problem, context, problem.base, samples)

        def passes(count: int) -> bool:
            return search_set.ask(frozenset(triage.ranking[:count]), 1.0).verdict.passed

        length = asked.pins
        if length is None:
            length = shortest_prefix(len(triage.ranking), passes)
        if length is None:
            raise SystemExit("not even all pins pass")
        found = {
            "pinned": list(triage.ranking[:length]),
            "evaluations": dict(context.run_statistics().evaluations),
            "sensitivity_runs": triage.sensitivity.runs,
        }
    (out / "run.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
