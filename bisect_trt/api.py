"""The command's job for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.pipeline import run
from bisect_trt.report.result import Result
from bisect_trt.stations.settings import PROBE_TIMEOUT_S, Settings
from bisect_trt.stations.verify import SavedPlan, Verification, read_plan
from bisect_trt.stations.verify import verify as check_plan_holds

Source = str | Path | Mapping[str, NDArray[Any]]


def bisect(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    *,
    precision: str | Precision = "fp16",
    runner: str = "auto",
    require: str | Sequence[str] = (),
    golden: Source | None = None,
    metrics: Sequence[str] = (),
    out: str | Path | None = None,
    workers: int = 1,
    ray: str | None = None,
    trt_module: str | None = None,
    typing: str = "strong",
    profiles: Sequence[str] = (),
    probe_timeout_s: float = PROBE_TIMEOUT_S,
    max_builds: int | None = None,
    certify: str = "emulated",
    rewrite: str | None = None,
    observer: Observer | None = None,
) -> Result:
    """Find the layers of ``model`` that must stay in FP32; writes the run's folder and returns what
    it holds.

    ``inputs`` is one sample or several: a mapping of input name to array, or an .npz file, folder
    or glob. The other arguments are those of ``bisect-trt run``. Raises :class:`BadInputError` for
    what the caller can mend.
    """
    try:
        wanted = Precision(precision)
    except ValueError as error:
        raise BadInputError(f"precision {precision!r}: choose fp16, bf16 or tf32") from error
    settings = Settings(
        model=model,
        inputs=_several(inputs),
        precision=wanted,
        runner=runner,
        require=(require,) if isinstance(require, str) else tuple(require),
        golden=golden,
        metrics=metrics,
        out=Path(out) if out is not None else None,
        workers=workers,
        ray=ray,
        trt_module=trt_module,
        typing=typing,
        profiles=tuple(profiles),
        probe_timeout_s=probe_timeout_s,
        max_builds=max_builds,
        certify=certify,
        rewrite=rewrite,
    )
    return run(settings, observer)


def verify(
    model: str | Path | onnx.ModelProto,
    inputs: Source | Sequence[Source],
    plan: PrecisionPlan | str | Path,
    *,
    runner: str = "auto",
    require: str | Sequence[str] = (),
    metrics: Sequence[str] = (),
    out: str | Path | None = None,
    observer: Observer | None = None,
) -> Verification:
    """Whether ``plan`` (or the plan.json at that path) still holds for ``model`` and ``inputs``; as
    ``bisect-trt verify``.

    Raises :class:`BadInputError` if it is no plan of this model.
    """
    saved = (
        SavedPlan(plan, Path("plan")) if isinstance(plan, PrecisionPlan) else read_plan(Path(plan))
    )
    settings = Settings(
        model=model,
        inputs=_several(inputs),
        precision=saved.searched,
        runner=runner,
        require=(require,) if isinstance(require, str) else tuple(require),
        metrics=metrics,
        out=Path(out) if out is not None else None,
    )
    return check_plan_holds(settings, saved, observer)


def _several(inputs: Source | Sequence[Source]) -> list[Source]:
    """The samples one by one. Raises :class:`BadInputError` for an array, which says not which
    input it is.
    """
    if isinstance(inputs, np.ndarray):
        raise BadInputError("inputs: an array without a name; pass {'input name': array}")
    return (
        list(inputs)
        if isinstance(inputs, Sequence) and not isinstance(inputs, (str, Path))
        else [inputs]
    )
