"""Decisions of the reference that hang by little: the inputs that ask for most of the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.finding import Finding
from bisect_trt.core.names import counted
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.requirements.decisions import EQUAL, TIE, gaps, places_of
from bisect_trt.numerics.requirements.requirements import gaps_of
from bisect_trt.probe.journal import Row
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case

_NEAR = 1e-2
"""Of an output's RMS: what 40 dB leave to the error."""

_MOSTLY = 0.95
"""Share of an output's elements that stay: a mask or a map of classes, no single answer."""

_MOST, _NAMED = 64, 3
"""Inputs that are looked at, and named."""


def note_near_ties(case: Case, bench: Bench) -> None:
    """Name the given inputs whose decisions are nearly ties, and count those that FP32's own noise
    could turn, which are judged by nobody.

    Args:
        case: the given inputs, and which decisions are asked about.
        bench: has the references, and keeps what is said.
    """
    asked = [i for i in case.requirements.items if places_of(i.metric) or i.metric == EQUAL]
    if not asked:
        return
    samples = case.samples[:_MOST]
    key = bench.prober.key("near ties", *(sample.digest for sample in samples))
    known = bench.journal.recall(key)
    if known is None:
        found = [_least(case, bench.references.of(sample)) for sample in samples]
        bench.journal.record_later(Row(key, "near ties", found))
    else:
        found = known[0]
    ties, decisions = sum(t for _, t, _ in found), sum(n for _, _, n in found)
    if ties:
        message = (
            f"{counted(ties, 'decision')} of {decisions:,} on the given inputs "
            f"{'is a tie' if ties == 1 else 'are ties'} within FP32's own noise, not counted "
            "whatever a plan makes of it"
        )
        bench.note(Finding("ties", "", message))
    order = np.argsort([gap for gap, _, _ in found], kind="stable")
    near = [int(i) for i in order if TIE < found[i][0] < _NEAR]
    if near:
        named = ", ".join(f"{samples[i].name} ({100 * found[i][0]:.2g} %)" for i in near[:_NAMED])
        more = f" and {len(near) - _NAMED} more" if len(near) > _NAMED else ""
        message = (
            f"near ties: the two best candidates differ by less than 1 % of the output's RMS on "
            f"{named}{more}; such inputs ask for most of the layers, and a share of them may be "
            "let miss (@mean, --holds-on)"
        )
        bench.note(Finding("near-tie", samples[near[0]].name, message))


def note_few_differ(case: Case, bench: Bench) -> None:
    """Say of integers and truth values how many differ with everything lowered, where these are
    few: a class or a mask that is asked to be equal asks for FP32 as soon as one of them may turn.

    Args:
        case: what is asked of which outputs.
        bench: knows what everything lowered does, and keeps what is said.
    """
    found = [bench.prober.known(case.base, sample) for sample in case.samples]
    for place, item in enumerate(case.requirements.items):
        if item.metric != EQUAL or item.limit < 1.0:
            continue
        shares = [f.values[place] for f in found if f is not None and f.values]
        least = min(shares, default=1.0)
        if _MOSTLY <= least < 1.0:
            limit = np.floor(1e3 * (1.0 - 2.0 * (1.0 - least))) / 1e3
            asked = f"{item.output}:equal>={limit:g}" if item.output else f"equal>={limit:g}"
            message = (
                f"of output {item.output!r} {100.0 * (1.0 - least):.2g} % of the elements differ "
                f"with everything lowered: where that may be, ask for --requirement '{asked}'"
            )
            bench.note(Finding("few-differ", item.output or "", message))


def _least(case: Case, reference: Arrays) -> tuple[float, int, int]:
    """The smallest gap of a decision that is no tie, the ties, and how many decisions there are."""
    every = [np.ravel(g) for g in _asked(case, reference)]
    if not every:
        return float("inf"), 0, 0
    flat = np.concatenate(every)
    real = flat[flat > TIE]
    return float(real.min(initial=np.inf)), int(np.count_nonzero(flat <= TIE)), int(flat.size)


def _asked(case: Case, reference: Arrays) -> Iterator[NDArray[Any]]:
    """The gaps of each decision that is asked about."""
    known = gaps_of(reference)
    for item in case.requirements.items:
        names: Sequence[str] = [n for n in reference if item.output in (None, n)]
        for name in names:
            output = reference[name]
            if item.metric == EQUAL and name in known:
                yield known[name]
            elif places_of(item.metric) and output.dtype.kind == "f" and output.ndim:
                channels = item.metric == "argmax" and output.ndim >= 4
                yield gaps(output, 1 if channels else -1)
