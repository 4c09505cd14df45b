"""How an engine's FP16 layers compute, bit for bit, each alone: held against FP32 sums and against
``bisect_trt.runners.rtx``.

``python -m benchmarks.engines.arithmetic`` on a machine with a GPU. It keeps what the engine gave
in results/layers-fp16.npz, which the tests hold the kernels to, and the table in
results/layers-fp16.md.
"""

from __future__ import annotations

from datetime import date

import numpy as np

from benchmarks.common import RESULTS, table
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from fixtures.layers import layers_side_by_side

RECORDED = RESULTS / "layers-fp16.npz"


def main() -> None:
    """One engine of all layers, every layer's output marked."""
    model, inputs = layers_side_by_side()
    sample, plan = Sample("layers", inputs), PrecisionPlan(Precision.FP16)
    emulator, engine = EmulatedRunner(model), TensorRTRunner(model, [sample])
    plain, exact = (
        {v.layer: v.accumulated for v in emulator.trace(sample, plan, rtx_sums=k)}
        for k in (False, True)
    )
    outputs = [n.output[0] for n in model.graph.node[::2]]
    measured = {
        t.removesuffix(": z"): a for t, a in engine.marked(plan, [sample], outputs)[0].items()
    }
    measured = {name: measured[name] for name in plain if name in measured}
    engine.close()
    rows = [
        [name, float(np.mean(plain[name] == a)), float(np.mean(exact[name] == a))]
        for name, a in measured.items()
    ]
    known = ", ".join(
        f"{k} {v}" for k, v in engine.versions.items() if k not in ("profile", "typing")
    )
    head = [
        "layer, alone",
        "equal to FP32 sums",
        "equal to bisect_trt.runners.rtx",
    ]
    lines = [
        "# FP16 layers, bit for bit",
        "",
        f"`python -m benchmarks.engines.arithmetic`, {date.today()}, {known}",
        "",
        "The share of the elements that the engine gives exactly as the emulator does, by its "
        "usual rule and by the measured one.",
        "",
        *table(head, rows),
    ]
    print("\n".join(lines))
    (RESULTS / "layers-fp16.md").write_text("\n".join(lines) + "\n")
    np.savez_compressed(
        RECORDED, allow_pickle=False, **{name: a.astype(np.float16) for name, a in measured.items()}
    )


if __name__ == "__main__":
    main()
