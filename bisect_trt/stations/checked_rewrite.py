"""A rewrite the user asked for, held against the original on the user's own inputs every time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.sample import Sample
from bisect_trt.graph.passes.fuse_layernorm import Fused, fuse_layernorm
from bisect_trt.runners.ort_sessions import reference_session, run_all

TOLERANCE = 1e-6


def rewritten(model: onnx.ModelProto, samples: Sequence[Sample], name: str) -> Fused:
    """``model`` after a rewrite, checked on the inputs.

    Args:
        model: the FP32 model, read only.
        samples: real inputs.
        name: of the rewrite.

    Raises:
        BadInputError: nothing matches, or an output moves by more than 1e-6 of its largest value on
            one of ``samples``, in FP32.
    """
    fused = {"layernorm": fuse_layernorm}[name](model)
    sessions = [reference_session(source) for source in (model, fused.model)]
    for sample in samples:
        old, new = (run_all(session, sample.arrays, sample.name) for session in sessions)
        for output, expected in old.items():
            size = float(np.abs(expected).max(initial=0.0)) if expected.dtype.kind == "f" else 0.0
            moved = float(
                np.abs(new[output].astype(np.float64) - expected.astype(np.float64)).max(
                    initial=0.0
                )
            )
            if not moved <= TOLERANCE * size:
                raise BadInputError(
                    f"--rewrite {name}: output {output!r} moves by {moved:.2g} "
                    f"({moved / max(size, 1e-30):.1g} of its largest value) "
                    f"in FP32 on {sample.name}; that is more than {TOLERANCE:g}, so the rewrite is "
                    "refused"
                )
    return fused
