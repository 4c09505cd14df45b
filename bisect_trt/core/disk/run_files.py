"""The names of the files that a run's folder holds when it is complete, and of what ``verify`` may
leave there.
"""

from __future__ import annotations

RUN = "run.json"
TYPED_MODEL = "model.typed.onnx"
REWRITTEN_MODEL = "model.rewritten.onnx"
ANNOTATED_MODEL = "model.annotated.onnx"
PLAN = "plan.json"

RESULT_FILES = (
    RUN,  # the first to go and the last to come: its presence means that the folder is complete
    PLAN,
    TYPED_MODEL,
    f"{TYPED_MODEL}.data",
    REWRITTEN_MODEL,
    f"{REWRITTEN_MODEL}.data",
    ANNOTATED_MODEL,
    "report.html",
    "report.md",
    "junit.xml",
    "layers.csv",
    "outputs.csv",
    "search.csv",
    "pins.csv",
    "engines.csv",
    "inputs.csv",
    "frontier.csv",
)

VERIFY_PAGE, VERIFY_RECORD, VERIFY_JUNIT = "verify.html", "verify.json", "verify.junit.xml"
VERIFY_FILES = (VERIFY_RECORD, VERIFY_PAGE, VERIFY_JUNIT)
"""Names of their own: the folder may be that of the run whose plan it is."""
