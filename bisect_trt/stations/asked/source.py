"""What may be given as samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

Feed = Mapping[str, NDArray[Any]]
"""One sample: arrays by the model's input names."""

Source = str | Path | Feed | Callable[[], Iterable[Feed]] | Iterator[Feed]
"""A file, folder, glob or ``module:function``; one sample itself; in a notebook a function that
gives some, or a generator.
"""
