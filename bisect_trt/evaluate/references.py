"""The reference outputs of every sample, computed when first needed."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.requirements import ReferenceOutputs, gaps_of
from bisect_trt.runners.reference import Reference

_MOST_BYTES = 8 << 20

_MOST_COPIES = 512 << 20
"""Of what was drawn so much lies on disk, and what comes first: that is what a search asks for
again and again. Each test copies anew, and of a model whose outputs are large makes gigabytes."""


class References:
    """Remembers the outputs that ``reference`` gives, by the samples' content.

    Those used last are kept, up to 8 MB, so that memory does not grow with the number of samples;
    others, and larger ones, lie in ``folder`` until :meth:`close`; of drawn samples no more than
    512 MB, the first.
    """

    def __init__(
        self,
        reference: Reference,
        folder: Path,
        for_copied: Callable[[Sample], Arrays] | None = None,
        *,
        lasting: bool = False,
    ) -> None:
        self._reference = reference
        self._lasting = lasting and not reference.is_large
        self._for_copied: Callable[[Sample], Arrays] | None = None
        if for_copied is not None:
            self.use_for_copied(for_copied)
        self._folder = folder
        self._known: OrderedDict[str, Arrays] = OrderedDict()
        self._on_disk: set[str] = set()
        self._copied: set[str] = set()
        self._copied_bytes = 0
        self._names: tuple[str, ...] = ()
        self._decides: tuple[str, ...] = ()
        self._bytes = 0
        self._prepared: set[str] = set()
        self._lock = Lock()
        shutil.rmtree(folder, ignore_errors=True)  # what a killed run left

    def use_for_copied(self, outputs: Callable[[Sample], Arrays]) -> None:
        """Let ``outputs`` give the FP32 outputs of samples that are drawn."""
        self._for_copied, self._lasting = outputs, False

    def of(self, sample: Sample) -> Arrays:
        """The reference outputs of ``sample``, by name; several threads may ask.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute them.
        """
        digest = sample.digest
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return self._known[digest]
            found = self._read(digest) if digest in self._on_disk else None
        if found is None:
            quick = self._for_copied if sample.copied else None
            found = (quick or self._reference.outputs)(sample)
        with self._lock:
            if digest in self._known:  # another thread was sooner
                return self._known[digest]
            self._known[digest] = found
            if sample.copied:
                self._copied.add(digest)
            self._bytes += _size(found)
            while self._bytes > _MOST_BYTES and self._known:
                self._let_go(*self._known.popitem(last=False))
            return found

    def at_once(self, sample: Sample) -> int:
        """How many threads gain from asking at a time for samples like ``sample``."""
        if sample.copied and self._for_copied is not None:
            return 1
        return self._reference.at_once(sample)

    def prepare(self, samples: Sequence[Sample], before_each: Callable[[], None]) -> None:
        """Compute all of ``samples`` once, then let the session and its memory go, unless it will
        be asked again as a rule and its weights are few.
        """
        missing = [s for s in samples if s.digest not in self._prepared]
        try:
            for sample in missing:
                before_each()
                self.of(sample)
                self._prepared.add(sample.digest)
        finally:
            if missing and not self._lasting:
                self._reference.release()

    def make_ready(self, samples: Sequence[Sample], before_each: Callable[[], None]) -> None:
        """Compute those of ``samples`` together, if the reference makes room for who is asked next:
        of large weights it is closed.
        """
        try:
            for sample in samples if self._reference.is_large else ():
                before_each()
                self.of(sample)
        finally:
            if self._reference.is_large:
                self._reference.release()

    def close(self) -> None:
        """Remove what lies on disk."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _let_go(self, digest: str, outputs: Arrays) -> None:
        self._bytes -= _size(outputs)
        if digest in self._on_disk:
            return
        if digest in self._copied:
            if self._copied_bytes + _size(outputs) > _MOST_COPIES:
                return
            self._copied_bytes += _size(outputs)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Names of outputs may hold what no file name may: the arrays go by number.
            for number, array in enumerate(outputs.values()):
                np.save(self._folder / f"{digest}-{number}.npy", array)
            for number, array in enumerate(gaps_of(outputs).values()):
                np.save(self._folder / f"{digest}-gaps-{number}.npy", array)
        except (OSError, ValueError):
            return  # a full disk costs another inference, no more
        self._names, self._decides = tuple(outputs), tuple(gaps_of(outputs))
        self._on_disk.add(digest)

    def _read(self, digest: str) -> Arrays | None:
        try:
            files = (self._folder / f"{digest}-{i}.npy" for i in range(len(self._names)))
            outputs = {n: _loaded(f) for n, f in zip(self._names, files, strict=True)}
            files = (self._folder / f"{digest}-gaps-{i}.npy" for i in range(len(self._decides)))
            gaps = {n: _loaded(f) for n, f in zip(self._decides, files, strict=True)}
            return ReferenceOutputs(outputs, gaps) if gaps else outputs
        except (OSError, ValueError):
            return None


def _loaded(path: Path) -> NDArray[Any]:
    """An array; a large one is mapped, so that only who looks at it has it in memory."""
    large = path.stat().st_size > _MOST_BYTES
    found: NDArray[Any] = np.load(path, "r" if large else None, allow_pickle=False)
    return found


def _size(outputs: Arrays) -> int:
    return sum(array.nbytes for array in outputs.values())
