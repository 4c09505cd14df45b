"""What ONNX Runtime's own profile says of a session: which nodes the CPU provider ran.

A profile holds what ran, in every version; only newer ones can be asked what they assigned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from bisect_trt.runners.ort.devices import CPU_PROVIDER

_SUFFIX = "_kernel_time"


def cpu_nodes(session: ort.InferenceSession) -> list[str]:
    """The names of the nodes that the CPU provider ran until now, in order; the profiling of
    ``session`` ends with it, and its file is removed.
    """
    path = Path(session.end_profiling())
    try:
        return names_on_cpu(json.loads(path.read_text(encoding="utf-8")))
    finally:
        path.unlink(missing_ok=True)


def names_on_cpu(profile: Sequence[Mapping[str, Any]]) -> list[str]:
    """The nodes of :func:`cpu_nodes` in the events of a profile."""
    found = {
        str(event["name"]).removesuffix(_SUFFIX): None
        for event in profile
        if str(event.get("name", "")).endswith(_SUFFIX)
        and event.get("args", {}).get("provider") == CPU_PROVIDER
    }
    return list(found)
