"""The files that the user's metrics read are part of what their answers depend on: the journal
knows which they were, and answers under another key once one has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.user.file_reads import content_digest
from bisect_trt.numerics.requirements.user_metric import UserMetric
from bisect_trt.probe.journal import Journal, Row, content_key


class MetricReads:
    """``key`` is ``run_key``, or one that follows from it and the files as they are now; what the
    ``metrics`` read from now on is recorded beside the first answer that depends on it.
    """

    def __init__(self, metrics: Sequence[UserMetric], run_key: str, journal: Journal) -> None:
        self._metrics = metrics
        self.key, self._known = _current(run_key, journal)
        journal.beside = self._new_rows

    def _new_rows(self) -> list[Row]:
        reads = dict(self._known)
        for metric in self._metrics:
            read = dict(metric.reads)  # which another thread's call may add to
            for path, digest in read.items():
                if reads.get(path, digest) != digest:
                    raise BadInputError(
                        f"--metric {metric.name}: {path} changed while it was in use; run the "
                        "command again"
                    )
            reads |= read
        if reads == self._known:
            return []
        self._known = reads
        return [Row(_place(self.key), "reads", reads)]


def _current(key: str, journal: Journal) -> tuple[str, dict[str, str]]:
    """The key that the journal answers under for the files as they are now, and those files."""
    while True:
        found = journal.recall(_place(key))
        if found is None:
            return key, {}
        before = dict(found[0])
        now = {path: content_digest(path) for path in before}
        if now == before:
            return key, before
        key = content_key(key, now)


def _place(key: str) -> str:
    return content_key(key, "reads")
