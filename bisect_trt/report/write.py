"""All files of the run's folder, from one result."""

from __future__ import annotations

import json
from typing import Any

import onnx

from bisect_trt.graph.load import save_model
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.probe.journal import RunFolder
from bisect_trt.report.documents import as_html, as_junit, as_markdown
from bisect_trt.report.result import Result

TYPED_MODEL = "model.typed.onnx"
REWRITTEN_MODEL = "model.rewritten.onnx"


def write_report(
    result: Result, model: onnx.ModelProto, folder: RunFolder, *, rewritten: bool = False
) -> None:
    """Write every file, each in one step; ``run.json`` last, so that its presence means the folder
    is complete.

    ``model`` is the FP32 model that the plan is for; it is written too where it is not the user's
    own (``rewritten``).
    """
    for name in ("layers", "outputs", "search", "pins"):
        folder.write(f"{name}.csv", getattr(result, name).to_csv(index=False, lineterminator="\n"))
    if len(result.cost):
        folder.write("engines.csv", result.cost.to_csv(index=False, lineterminator="\n"))
    folder.write("plan.json", result.plan_json() + "\n")
    if rewritten:
        save_model(model, folder.path / REWRITTEN_MODEL)
    save_model(to_typed(model, result.plan), folder.path / TYPED_MODEL)
    folder.write("report.md", as_markdown(result))
    folder.write("report.html", as_html(result))
    folder.write("junit.xml", as_junit(result))
    folder.write("run.json", to_json(result.as_json()) + "\n")


def to_json(value: Any) -> str:
    """Strict JSON: NaN becomes null, infinities the strings "inf" and "-inf", which JSON has no
    numbers for.
    """
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        if value != value:
            return None
        return value if abs(value) != float("inf") else ("inf" if value > 0 else "-inf")
    return value
