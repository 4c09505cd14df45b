"""The layers whose weights were rounded to fit, as rows, JSON and lines of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.steps.fit_weights import FittedLayer, FittedWeights

FITTED_BY = (
    "GPTQ, each weight one of its two neighbours; rows are drawn with the seed (layer, input)"
)
"""How weights were chosen, as plan.json says it."""


@dataclass(frozen=True)
class WeightFacts:
    """What was done to each layer, and the digests of the inputs that weights were chosen on."""

    rows: tuple[FittedLayer, ...] = ()
    samples: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """How many layers have chosen weights, and what it gained; empty where none has."""
        kept = [row for row in self.rows if row.kept]
        if not kept:
            return ""
        gains = [row.snr_after - row.snr_before for row in kept if math.isfinite(row.snr_after)]
        gain = f", by {sum(gains) / len(gains):.1f} dB on average" if gains else ""
        moved = sum(row.moved for row in kept) / len(kept)
        return (
            f"The weights of {counted(len(kept), 'layer')} were rounded to fit, {moved:.0%} of "
            "them to the farther of two neighbours: none moves by a whole unit in the last place. "
            f"On rows kept apart each errs less{gain}."
        )

    def as_json(self) -> dict[str, Any]:
        """As run.json has it."""
        return {"layers": [asdict(row) for row in self.rows], "samples": list(self.samples)}


def weights_of(found: FittedWeights | None) -> WeightFacts:
    """The facts on fitted weights."""
    return WeightFacts() if found is None else WeightFacts(found.layers, found.samples)


def weights_from_json(data: Mapping[str, Any]) -> WeightFacts:
    """Reads what :meth:`WeightFacts.as_json` wrote.

    Raises:
        KeyError, ValueError, TypeError: it is none.
    """
    rows = (
        FittedLayer(**{**row, **{key: float(row[key]) for key in ("snr_before", "snr_after")}})
        for row in data["layers"]
    )
    return WeightFacts(tuple(rows), tuple(data["samples"]))


def weights_table(facts: WeightFacts) -> pd.DataFrame:
    """A row per layer whose weights were chosen, the largest gain first."""
    kept = [row for row in facts.rows if row.kept]
    kept.sort(key=lambda row: row.snr_before - row.snr_after)
    return pd.DataFrame(
        [
            {
                "layer": row.layer,
                "moved": f"{row.moved:.0%}",
                "SNR before, dB": round(row.snr_before, 1),
                "SNR after, dB": round(row.snr_after, 1),
            }
            for row in kept
        ]
    )
