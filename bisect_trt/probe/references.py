"""The reference outputs of every sample, computed when first needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from numpy.typing import NDArray

from bisect_trt.core.sample import Sample
from bisect_trt.runners.ort_reference import Reference

Arrays = Mapping[str, NDArray[Any]]
_MOST_BYTES = 256 << 20


class References:
    """Remembers the outputs that ``reference`` gives, by the samples' content.

    Those used last are kept, up to 256 MB, so that memory does not grow with the number of samples;
    others are computed again.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._known: OrderedDict[str, Arrays] = OrderedDict()
        self._bytes = 0
        self._prepared: set[str] = set()
        self._lock = Lock()

    def of(self, sample: Sample) -> Arrays:
        """The reference outputs of ``sample``, by name; several threads may ask.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute them.
        """
        with self._lock:
            found = self._known.get(sample.digest)
            if found is None:
                found = self._reference.outputs(sample)
                self._known[sample.digest] = found
                self._bytes += _size(found)
                while self._bytes > _MOST_BYTES and len(self._known) > 1:
                    self._bytes -= _size(self._known.popitem(last=False)[1])
            else:
                self._known.move_to_end(sample.digest)
            return found

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Compute all of ``samples`` once, then let the session and its memory go."""
        missing = [s for s in samples if s.digest not in self._prepared]
        for sample in missing:
            self.of(sample)
        self._prepared.update(s.digest for s in missing)
        if missing:
            self._reference.release()


def _size(outputs: Arrays) -> int:
    return sum(array.nbytes for array in outputs.values())
