"""The reference outputs of every sample, computed on first use."""

from __future__ import annotations

import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.runners.reference import Reference


class References:
    """Keeps the reference outputs, by the samples' content.

    ``memory_bytes``: the latest are in memory; older ones are on disk in ``folder``.
    ``copies_bytes``: how much of copied samples is on disk; the search uses the first ones again.
    """

    def __init__(
        self,
        reference: Reference,
        folder: Path,
        *,
        memory_bytes: int = 8 << 20,
        copies_bytes: int = 512 << 20,
    ) -> None:
        self._reference = reference
        self._folder = folder
        self._memory_bytes, self._copies_bytes = memory_bytes, copies_bytes
        self._for_copied: Callable[[Sample], Arrays] | None = None
        self._outputs: OrderedDict[str, Arrays] = OrderedDict()
        self._bytes = 0
        self._on_disk: set[str] = set()
        self._copied: set[str] = set()
        self._prepared: set[str] = set()
        self._lock = Lock()
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed run

    def use_for_copied(self, outputs: Callable[[Sample], Arrays]) -> None:
        """Let ``outputs`` give the FP32 outputs of copied samples."""
        self._for_copied = outputs

    def of(self, sample: Sample) -> Arrays:
        """The reference outputs of ``sample`` by name; thread-safe.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute them.
        """
        digest = sample.digest
        with self._lock:
            if digest in self._outputs:
                self._outputs.move_to_end(digest)
                return self._outputs[digest]
            outputs = self._read(digest) if digest in self._on_disk else None
        # Without the lock, as an inference takes long and others need what is kept.
        if outputs is None:
            for_copied = self._for_copied if sample.copied else None
            outputs = (for_copied or self._reference.outputs)(sample)
        with self._lock:
            if digest in self._outputs:  # another thread was faster
                return self._outputs[digest]
            self._outputs[digest] = outputs
            if sample.copied:
                self._copied.add(digest)
            self._bytes += _size(outputs)
            while self._bytes > self._memory_bytes and self._outputs:
                self._to_disk(*self._outputs.popitem(last=False))
            return outputs

    def at_once(self, sample: Sample) -> int:
        """How many threads may usefully call :meth:`of` for samples like ``sample``."""
        if sample.copied and self._for_copied is not None:
            return 1
        return self._reference.at_once(sample)

    def prepare(self, samples: Sequence[Sample], before_each: Callable[[], None]) -> None:
        """Compute the outputs of ``samples``, then close a large model's session."""
        missing = [s for s in samples if s.digest not in self._prepared]
        try:
            for sample in missing:
                before_each()
                self.of(sample)
                self._prepared.add(sample.digest)
        finally:
            if missing and self._reference.is_large:
                self._reference.release()

    def make_ready(self, samples: Sequence[Sample], before_each: Callable[[], None]) -> None:
        """Compute the outputs of ``samples`` if memory has room for one session at a time."""
        try:
            for sample in samples if self._reference.is_large else ():
                before_each()
                self.of(sample)
        finally:
            if self._reference.is_large:
                self._reference.release()

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _to_disk(self, digest: str, outputs: Arrays) -> None:
        size = _size(outputs)
        self._bytes -= size
        if digest in self._on_disk:
            return
        if digest in self._copied:
            if size > self._copies_bytes:
                return
            self._copies_bytes -= size
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / digest).open("wb") as file:
                pickle.dump(outputs, file, protocol=5)
        except OSError:
            return  # a full disk costs another inference
        self._on_disk.add(digest)

    def _read(self, digest: str) -> Arrays:
        with (self._folder / digest).open("rb") as file:
            outputs: Arrays = pickle.load(file)
            return outputs


def _size(outputs: Arrays) -> int:
    return sum(array.nbytes for array in outputs.values())
