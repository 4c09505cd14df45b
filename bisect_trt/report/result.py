"""What ``bisect_trt.bisect`` returns: the run's record, which shows itself in a notebook."""

from __future__ import annotations

from dataclasses import dataclass

from bisect_trt.report.page.notebook import as_fragment, as_markdown, as_text
from bisect_trt.report.record.record import Record


@dataclass(frozen=True, repr=False)
class Result(Record):
    __doc__ = Record.__doc__  # its fields are what it is; as a cell's last line it shows itself

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_fragment(self)

    def _repr_markdown_(self) -> str:
        return as_markdown(self)
