"""The reference outputs of every sample, computed when first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from bisect_trt.core.sample import Sample
from bisect_trt.runners.ort_reference import Reference

Arrays = Mapping[str, NDArray[Any]]


class References:
    """Remembers the outputs that ``reference`` gives, by the samples' content."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._known: dict[str, Arrays] = {}

    def of(self, sample: Sample) -> Arrays:
        """The reference outputs of ``sample``, by name."""
        if sample.digest not in self._known:
            self._known[sample.digest] = self._reference.outputs(sample)
        return self._known[sample.digest]

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Compute all of ``samples``, then let the session and its memory go."""
        missing = [s for s in samples if s.digest not in self._known]
        for sample in missing:
            self.of(sample)
        if missing:
            self._reference.release()
