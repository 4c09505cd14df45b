"""A metric of the user's, checked to give a number, and the same one for the same outputs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.user_code import load_function, source_digest, users_code


class UserMetric:
    """A function of the reference and the candidate, mappings of output to array.

    A metric of all inputs takes two sequences of such mappings. ``digest`` is for the cache's keys,
    ``lock`` keeps it from running on two threads at a time.
    """

    def __init__(self, metric: str | Callable[[Any, Any], float], lock: Lock) -> None:
        function = load_function(metric, "--metric") if isinstance(metric, str) else metric
        self._function = function
        self.name = metric.rpartition(":")[2] if isinstance(metric, str) else _name_of(function)
        with users_code(f"--metric {self.name}"):
            self.digest = source_digest(function, metric if isinstance(metric, str) else "")
        self._lock = lock
        self._checks_left = 2

    def __call__(self, reference: Any, candidate: Any) -> float:
        """The metric's value.

        Raises:
            BadInputError: it raises, writes to its arguments, is not deterministic, or gives no
                number.
        """
        if self._checks_left <= 0:
            return self._called(reference, candidate)
        self._checks_left -= 1
        # Read-only views do not stop torch.from_numpy(...).sub_(), which writes to the same memory.
        before = _fingerprint((reference, candidate))
        value = self._called(reference, candidate)
        again = self._called(reference, candidate)
        if _fingerprint((reference, candidate)) != before:
            raise BadInputError(
                f"--metric {self.name}: it writes into the arrays that it is given; let it copy "
                "them first"
            )
        if value != again:
            raise BadInputError(
                f"--metric {self.name}: not deterministic: {value:g} and then {again:g} for the "
                "same outputs; seed it"
            )
        return value

    def _called(self, reference: Any, candidate: Any) -> float:
        with self._lock, users_code(f"--metric {self.name}"):
            try:
                given = self._function(_read_only(reference), _read_only(candidate))
                if given is None or isinstance(given, str | bytes):
                    raise BadInputError(
                        f"--metric {self.name}: it gave {type(given).__name__}; let it give a "
                        "number"
                    )
                value = float(given)
            except ValueError as error:
                if "read-only" in str(error):
                    raise BadInputError(
                        f"--metric {self.name}: it writes into the arrays that it is given; let it "
                        "copy them first"
                    ) from error
                raise
        if math.isnan(value):
            raise BadInputError(
                f"--metric {self.name}: it gave NaN where all outputs are finite; let it give a "
                "number for every pair of outputs"
            )
        return value


def _name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__))


def _read_only(arrays: Any) -> Any:
    """Read-only views, in new mappings."""
    if isinstance(arrays, Mapping):
        return {name: _read_only(value) for name, value in arrays.items()}
    if isinstance(arrays, Sequence):
        return [_read_only(value) for value in arrays]
    view = np.asarray(arrays).view()
    view.flags.writeable = False
    return view


def _fingerprint(arrays: Any) -> bytes:
    if isinstance(arrays, Mapping):
        parts = [_fingerprint(value) for value in arrays.values()]
    elif isinstance(arrays, Sequence):
        parts = [_fingerprint(value) for value in arrays]
    else:
        parts = [np.ascontiguousarray(arrays).tobytes()]
    return hashlib.sha256(b"".join(parts)).digest()
