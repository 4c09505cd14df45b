"""Mean evaluations of the search on synthetic culprits, beside the information bound and the
design's reference counts.
"""

from __future__ import annotations

import math
import time

import numpy as np

from bisect_trt.search import Verdict, find_pins

REFERENCE = {
    (200, 1): (11, 5),
    (200, 4): (31, 14),
    (200, 16): (87, 49),
    (1000, 1): (13, 7),
    (1000, 4): (40, 20),
    (1000, 16): (125, 62),
    (10000, 1): (16, 10),
    (10000, 4): (53, 28),
    (10000, 16): (178, 92),
}
_SEPARATION_FOR_AUC_98 = math.sqrt(2.0) * 2.0537489


def mean_probes(n: int, k: int, kind: str, seeds: int) -> tuple[float, float]:
    """(mean evaluations without the two baselines, mean seconds) over ``seeds`` runs."""
    layers = [f"l{i}" for i in range(n)]
    counts, began = [], time.perf_counter()
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        chosen = random.choice(n, k, replace=False)
        culprits = frozenset(layers[i] for i in chosen)
        noise = random.normal(size=n)
        shift = {"auc 0.98": _SEPARATION_FOR_AUC_98, "hostile": -_SEPARATION_FOR_AUC_98}.get(
            kind, 0.0
        )
        noise[chosen] += shift
        prior = None if kind == "none" else dict(zip(layers, noise.tolist(), strict=True))
        found = find_pins(
            layers,
            lambda pins, c=culprits: Verdict.PASS if c <= pins else Verdict.FAIL,
            suspicion=prior,
        )
        assert found.pinned == culprits
        counts.append(len(found.evaluations) - 2)
    return float(np.mean(counts)), (time.perf_counter() - began) / seeds


def round_rows(seeds: int) -> list[str]:
    """Rounds of parallel evaluations, n = 1,000, k = 16 (limit 22 for 8 workers)."""
    lines = [
        "",
        "## Rounds with several workers, n = 1,000, k = 16 (8 workers: limit 22)",
        "",
        "| workers | rounds | evaluations |",
        "| --- | --- | --- |",
    ]
    for workers in (1, 2, 4, 8):
        runs = []
        for seed in range(max(20, seeds // 5)):
            layers = [f"l{i}" for i in range(1000)]
            culprits = frozenset(
                np.random.default_rng(seed).choice(layers, 16, replace=False).tolist()
            )
            runs.append(find_pins(layers, lambda p, c=culprits: _verdict(c <= p), workers=workers))
        lines.append(
            f"| {workers} | {np.mean([r.rounds for r in runs]) - 1:.1f} | "
            f"{np.mean([len(r.evaluations) for r in runs]) - 2:.1f} |"
        )
    return lines


def _verdict(passed: bool) -> Verdict:
    return Verdict.PASS if passed else Verdict.FAIL


def report(seeds: int = 200) -> list[str]:
    """The table; reference counts in brackets."""
    lines = ["## Evaluations of the search, synthetic culprits (reference counts in brackets)", ""]
    lines += [
        "| n | k | bound | no prior | AUC 0.98 | useless | hostile | s a search |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (n, k), (none, good) in REFERENCE.items():
        bound = math.log2(math.comb(n, k))
        runs = seeds if n < 10000 else max(20, seeds // 10)
        rows = [
            mean_probes(n, k, kind, runs) for kind in ("none", "auc 0.98", "useless", "hostile")
        ]
        counts = [r[0] for r in rows]
        lines.append(
            f"| {n:,} | {k} | {bound:.0f} | {counts[0]:.1f} ({none}) | {counts[1]:.1f} ({good}) | "
            f"{counts[2]:.1f} | {counts[3]:.1f} "
            f"| {rows[0][1]:.3f} |"
        )
    return [*lines, *round_rows(seeds)]
