"""Mean probes of the search on synthetic culprits, beside the information bound and the design's reference counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from bisect_trt.search import Verdict, find_pins

REFERENCE = {
    (200, 1): (11, 5), (200, 4): (31, 14), (200, 16): (87, 49),
    (1000, 1): (13, 7), (1000, 4): (40, 20), (1000, 16): (125, 62),
    (10000, 1): (16, 10), (10000, 4): (53, 28), (10000, 16): (178, 92),
}  # fmt: skip
_SEPARATION_FOR_AUC_98 = math.sqrt(2.0) * 2.0537489


def mean_probes(n: int, k: int, kind: str, seeds: int) -> tuple[float, float]:
    """(mean probes without the two baselines, mean seconds) over ``seeds`` runs."""
    layers = [f"l{i}" for i in range(n)]
    counts, began = [], time.perf_counter()
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        chosen = random.choice(n, k, replace=False)
        culprits = frozenset(layers[i] for i in chosen)
        noise = random.normal(size=n)
        shift = {"auc 0.98": _SEPARATION_FOR_AUC_98, "hostile": -_SEPARATION_FOR_AUC_98}.get(kind, 0.0)
        noise[chosen] += shift
        prior = None if kind == "none" else dict(zip(layers, noise.tolist(), strict=True))
        found = find_pins(layers, lambda pins, c=culprits: Verdict.PASS if c <= pins else Verdict.FAIL, suspicion=prior)
        assert found.pinned == culprits
        counts.append(len(found.probes) - 2)
    return float(np.mean(counts)), (time.perf_counter() - began) / seeds


def additive(seed: int, n: int, k: int) -> tuple[list[str], Callable[[frozenset[str]], Verdict], dict[str, float]]:
    """(layers, oracle, suspicion): lognormal errors add up, and pinning the ``k`` largest is the only way to meet the limit with k."""
    random = np.random.default_rng(seed)
    errors = np.exp(random.normal(size=n))
    layers = [f"l{i}" for i in range(n)]
    suspicion = dict(zip(layers, (np.log(errors) + 0.5 * random.normal(size=n)).tolist(), strict=True))
    error, total = dict(zip(layers, errors.tolist(), strict=True)), math.fsum(errors)
    limit = math.fsum(np.sort(errors)[: n - k]) * (1.0 + 1e-9)

    def probe(pinned: frozenset[str]) -> Verdict:
        return Verdict.PASS if total - math.fsum(error[name] for name in pinned) <= limit else Verdict.FAIL

    return layers, probe, suspicion


def additive_rows(seeds: int) -> list[str]:
    """Set sizes over the optimum where errors add up (limit 1.1), without and with exchanges."""
    lines = ["", "## Set size over the optimum, additive lognormal errors (limit 1.1)", ""]
    lines += ["| n | optimum | 1-minimal | with exchanges | probes | probes with exchanges |", "| --- | --- | --- | --- | --- | --- |"]
    for n, k in ((200, 4), (200, 16), (1000, 4), (1000, 16)):
        runs = []
        for seed in range(seeds if k == 4 else max(20, seeds // 5)):
            layers, probe, suspicion = additive(seed, n, k)
            runs.append([find_pins(layers, probe, suspicion=suspicion, exchanges=e) for e in (0, None)])
        sizes = [np.mean([len(r[i].pinned) / k for r in runs]) for i in (0, 1)]
        probes = [np.mean([len(r[i].probes) for r in runs]) for i in (0, 1)]
        lines.append(f"| {n:,} | {k} | {sizes[0]:.2f} | {sizes[1]:.3f} | {probes[0]:.0f} | {probes[1]:.0f} |")
    return lines


def noise_rows(seeds: int) -> list[str]:
    """How often the set is exact under flipped verdicts, and the calls over those of a clean oracle (limit 4)."""
    lines = [
        "",
        "## Flipped verdicts, n = 1,000, k = 4",
        "",
        "| flipped | exact | limit | calls / clean probes (limit 4) |",
        "| --- | --- | --- | --- |",
    ]
    for noise, limit in ((0.01, 0.99), (0.03, 0.97), (0.05, 0.90)):
        exact = calls = clean = 0
        for seed in range(seeds):
            random = np.random.default_rng(seed)
            layers = [f"l{i}" for i in range(1000)]
            culprits = frozenset(random.choice(layers, 4, replace=False).tolist())
            found = find_pins(layers, lambda p, c=culprits, r=random, q=noise: _verdict((c <= p) != (r.random() < q)), noise=noise)
            exact += found.pinned == culprits
            calls += found.calls
            clean += len(find_pins(layers, lambda p, c=culprits: _verdict(c <= p)).probes)
        lines.append(f"| {noise:.0%} | {exact / seeds:.1%} | {limit:.0%} | {calls / clean:.2f} |")
    return lines


def round_rows(seeds: int) -> list[str]:
    """Rounds of parallel probes, n = 1,000, k = 16 (limit 22 for 8 workers)."""
    lines = [
        "",
        "## Rounds with several workers, n = 1,000, k = 16 (8 workers: limit 22)",
        "",
        "| workers | rounds | probes |",
        "| --- | --- | --- |",
    ]
    for workers in (1, 2, 4, 8):
        runs = []
        for seed in range(max(20, seeds // 5)):
            layers = [f"l{i}" for i in range(1000)]
            culprits = frozenset(np.random.default_rng(seed).choice(layers, 16, replace=False).tolist())
            runs.append(find_pins(layers, lambda p, c=culprits: _verdict(c <= p), workers=workers))
        lines.append(f"| {workers} | {np.mean([r.rounds for r in runs]) - 1:.1f} | {np.mean([len(r.probes) for r in runs]) - 2:.1f} |")
    return lines


def group_rows(seeds: int) -> list[str]:
    """Coarse to fine: 1,000 layers in 100 groups of ten, such as one operator of each of ten blocks."""
    layers = [f"l{i}" for i in range(1000)]
    groups = [layers[i::100] for i in range(100)]
    lines = ["", "## Groups that share their fate, n = 1,000 in 100 groups", ""]
    lines += ["| culprits | bound | flat | by groups | flat, AUC 0.98 | by groups, AUC 0.98 |", "| --- | --- | --- | --- | --- | --- |"]
    for label, guilty, each in (
        ("1 group", 1, 10),
        ("2 groups", 2, 10),
        ("4 groups", 4, 10),
        ("half of 4 groups", 4, 5),
        ("4, anywhere", 0, 4),
    ):
        counts: list[list[int]] = []
        for seed in range(max(20, seeds // 5)):
            random = np.random.default_rng(seed)
            chosen = [groups[g] for g in random.choice(100, guilty, replace=False)] or [layers]
            culprits = frozenset(str(name) for group in chosen for name in random.choice(group, each, replace=False))
            noise = random.normal(size=1000)
            prior = {n: float(z + _SEPARATION_FOR_AUC_98 * (n in culprits)) for n, z in zip(layers, noise, strict=True)}
            counts.append(
                [
                    len(find_pins(layers, lambda p, c=culprits: _verdict(c <= p), suspicion=s, groups=g).probes) - 2
                    for s in (None, prior)
                    for g in ((), groups)
                ]
            )
        bound = math.log2(math.comb(1000, len(culprits)))
        lines.append(f"| {label} | {bound:.0f} | " + " | ".join(f"{mean:.1f}" for mean in np.mean(counts, axis=0)) + " |")
    return lines


def _verdict(passed: bool) -> Verdict:
    return Verdict.PASS if passed else Verdict.FAIL


def report(seeds: int = 200) -> list[str]:
    """The table; reference counts in brackets."""
    lines = ["## Probes of the search, synthetic culprits (reference counts in brackets)", ""]
    lines += [
        "| n | k | bound | no prior | AUC 0.98 | useless | hostile | s a search |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (n, k), (none, good) in REFERENCE.items():
        bound = math.log2(math.comb(n, k))
        runs = seeds if n < 10000 else max(20, seeds // 10)
        rows = [mean_probes(n, k, kind, runs) for kind in ("none", "auc 0.98", "useless", "hostile")]
        counts = [r[0] for r in rows]
        lines.append(
            f"| {n:,} | {k} | {bound:.0f} | {counts[0]:.1f} ({none}) | {counts[1]:.1f} ({good}) | {counts[2]:.1f} | {counts[3]:.1f} "
            f"| {rows[0][1]:.3f} |"
        )
    return [*lines, *group_rows(seeds), *additive_rows(seeds), *noise_rows(seeds), *round_rows(seeds)]
