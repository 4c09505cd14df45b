"""What a list says: its entries, and the subjects that their tests are about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision


class Form(StrEnum):
    """The forms that a list can have."""

    TRTEXEC = "trtexec"
    SCRIPT = "script"
    REPLAY = "replay"
    REPLAY_REVERSE = "replay-reverse"
    AUTOCAST = "autocast"
    BLOCK_LIST = "block-list"
    MIXED = "mixed"


class What(StrEnum):
    """What an entry says of a layer."""

    PRECISION = "layer precision"
    OUTPUT = "output type"
    EXCLUDED = "excluded from FP16"


class By(StrEnum):
    """How an entry names layers: in TensorRT's network or in the ONNX graph."""

    NAME = "layer name"
    WILDCARD = "layer pattern"
    LAYERS = "layers of the network"
    NODE = "node name"
    NODE_REGEX = "node expression"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a list.

    ``text`` is what is shown, and what :attr:`by` looks up. ``layers`` are places in the network,
    for ``By.LAYERS``. ``precision`` is None and ``refused`` says why if it cannot be read.
    ``said`` is what is to be known of a readable one. ``line`` is its place in the file, from 1.
    """

    by: By
    text: str
    precision: Precision | None
    what: What = What.PRECISION
    line: int = 0
    layers: tuple[int, ...] = ()
    refused: str = ""
    said: str = ""


@dataclass(frozen=True)
class Listing:
    """A list that was read.

    ``entries`` are in the order in which they count: of two for one layer the later one does.
    ``base`` is what the other layers run in. ``notes`` are sentences for users. In a
    ``sequential`` one, such as a script, it is usual that later entries replace earlier ones.
    """

    form: Form
    entries: Sequence[Entry]
    base: Precision = Precision.FP16
    notes: tuple[str, ...] = ()
    sequential: bool = False


PRECISIONS = {
    "fp32": Precision.FP32,
    "float32": Precision.FP32,
    "float": Precision.FP32,
    "fp16": Precision.FP16,
    "float16": Precision.FP16,
    "half": Precision.FP16,
    "bf16": Precision.BF16,
    "bfloat16": Precision.BF16,
}
"""The names of precisions that a plan can have, in lower case."""

OTHER_TYPES = frozenset(
    ("int4", "int8", "int32", "int64", "uint8", "bool", "fp8", "fp4", "float8", "float4", "e8m0")
)
"""Types of TensorRT that no plan has."""


def precision_of(name: str) -> tuple[Precision | None, str]:
    """The precision called ``name``, or None and the reason why a plan has no such one."""
    found = PRECISIONS.get(name.strip().casefold())
    if found is not None:
        return found, ""
    if name.strip().casefold() in OTHER_TYPES:
        return None, f"{name.strip()} is no precision of a plan"
    return None, f"{name.strip()[:40]!r} is no type of TensorRT"


_NESTED = re.compile(r"\([^()]*[*+}][^()]*\)[*+{]")
"""A repeated group that repeats something itself: on some names it takes for ever."""


def expression(text: str) -> re.Pattern[str]:
    """The regular expression ``text``.

    Raises:
        ValueError: it is none, or may take for ever.
    """
    if _NESTED.search(text):
        raise ValueError("a repeated group repeats something itself, which may take for ever")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regular expression ({error})") from error


def nothing_in(where: str, form: Form, wanted: str) -> BadInputError:
    """The error for a list of ``form`` that names no layer."""
    return BadInputError(f"{where}: no {wanted} in it; --form {form.value} reads nothing else")
