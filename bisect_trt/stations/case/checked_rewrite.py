"""A rewrite the user asked for, held against the original on the user's own inputs every time."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.sample import Sample
from bisect_trt.graph.passes.fuse_layernorm import Fused, fuse_layernorm
from bisect_trt.numerics.blocks import largest_finite
from bisect_trt.numerics.errors.tensor_error import tensor_error
from bisect_trt.runners.ort.sessions import reference_session, run_all

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
            error = tensor_error(expected, new[output])
            size = largest_finite(expected) if expected.dtype.kind == "f" else 0.0
            if error.finite and error.max_abs <= TOLERANCE * size:
                continue
            moved = "becomes NaN or infinite"
            if error.finite:
                share = error.max_abs / max(size, 1e-30)
                moved = f"moves by {error.max_abs:.2g} ({share:.1g} of its largest value)"
            raise BadInputError(
                f"--rewrite {name}: output {output!r} {moved} in FP32 on {sample.name}; that is "
                f"more than {TOLERANCE:g}, so the rewrite is refused"
            )
    return fused
