"""The record of a run: every file and the screen are written from it; run.json is read back."""

from __future__ import annotations

import json
import math
import platform
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from bisect_trt.base.atomic_files import RUN, TYPED_MODEL
from bisect_trt.base.display import printable
from bisect_trt.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_NOT_MET,
    EXIT_OK,
    BadInputError,
    one_line,
)
from bisect_trt.base.outcomes import (
    Candidate,
    Cause,
    CauseFound,
    ChoiceTimes,
    ErrorShare,
    Finding,
    InputKind,
    Reproducibility,
    Tally,
    Validation,
    ValidationVerdict,
    word_of,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.metrics.scales import Scale
from bisect_trt.report.choices import CHOICE_COLUMNS, Choice, choice_from_json, recommended
from bisect_trt.report.columns import ORIGINALS, TABLES, from_csv
from bisect_trt.report.repairs import RepairFacts, facts_from_json
from bisect_trt.report.weights import FITTED_BY, WeightFacts, weights_from_json

FORMAT = 2
"""Version of run.json, raised where readers of the last one would go wrong."""


@dataclass(frozen=True)
class MarkingEffect:
    """The final score with and without marked outputs."""

    unmarked_score: float
    marked_score: float


@dataclass(frozen=True)
class EngineFacts:
    """Facts on the engine beside its outputs; None where it did not decide."""

    fp32_is: str  # what its FP32 turned out to be
    fp32_likeness_to_tf32: float  # cosine between its FP32 errors and those of emulated TF32
    pins_emulated_as: str  # precision of pins in the emulator
    second_emulator: str
    layer_errors_from: str | None = None  # how the layer errors were measured
    marked_batches: int | None = None  # engines built for that
    marking_effect: MarkingEffect | None = None  # how marking moved the score
    builds_beyond_baselines: int | None = None  # builds after the baselines
    tolerance_share: float | None = None  # share of the tolerance that the emulator was held to
    pins_added_by_engine: Sequence[str] | None = None  # pins that only the engine needs
    out_of_builds: bool | None = None  # whether ``--max-builds`` ended the search
    reproducibility: Reproducibility | None = None  # results of repeated runs
    candidates: tuple[Candidate, ...] = ()  # plans that were built and timed for the answer
    times: tuple[ChoiceTimes, ...] = ()  # of the choices, beside each other


@dataclass(frozen=True)
class SearchFacts:
    """The kind of the set of pins, and the cost of the search."""

    regime: str  # sparse or diffuse
    spread_over: int  # number of pins
    blocks: Sequence[str]  # pins by block, in words
    suspicion_auc: float  # how well suspicion ranked the pins
    emulated_evaluations: int  # sets that were emulated
    information_bound: float  # least number of yes-or-no answers
    violations: int  # failing sets that contain a passing set
    superfluous_pins_dropped: int  # pins found unnecessary at the end


@dataclass(frozen=True, repr=False)
class Record:
    """The result of ``run``; in Jupyter it shows itself as the report's first screen.

    ``layers``, ``outputs``, ``search``, ``pins``, ``inputs`` and ``tradeoff`` are the CSV files of
    these names as DataFrames; ``cost`` is engines.csv, and ``by_requirement`` has a row per
    requirement. ``original_layers`` and ``original_tradeoff`` are of the model as given, where the
    answer is for another one. docs/columns.md has the columns; a table that does not apply is
    empty.
    ``choices`` is a DataFrame too, ``model_path`` the model to ship, ``open()`` shows the report.

    Attributes:
        model: path or name.
        precision: precision asked for.
        runner: the runner that judged.
        cause: the largest cause.
        sentence: the cause in a sentence.
        passed: whether ``plan`` meets the requirements.
        complete: whether every pin is proved to be needed.
        plan: the plan.
        score: of the plan.
        base_score: with everything reduced.
        layer_count: layers of the model.
        requirements: as texts.
        samples: names of the given inputs.
        findings: notes of all steps.
        evaluations: number of plans by runner.
        new_evaluations: number that the cache did not answer.
        sensitivity_runs: runs with one layer reduced.
        seconds: duration.
        folder: the run's folder.
        versions: versions of all libraries.
        engine: facts on the engine; None if emulated.
        search_facts: facts on the search; None without one.
        metrics: metrics of the user.
        validation: the plan on other inputs; None where no plan passes.
        ranked: whether pins were chosen by measured impact, each untested.
        given_share: share of the given inputs that must pass.
        budget_minutes: value of ``--budget``.
        out_of_time: whether the budget ended the search.
        interrupted: whether the user ended the search.
        command: shell command that repeats the run.
        model_digest: SHA-256 of the model.
        dynamic_inputs: inputs with a dynamic shape.
        threads: threads used.
        searched: digests of the inputs searched with, for plan.json.
        scales: scales of requirements, for plan.json.
        causes: all causes, the largest first.
        judged: tensors of ``--outputs``, for plan.json.
        choice_rows: the rows of ``choices`` as objects, with their plans.
        repair: the edits of the graph, their proof and what was refused.
        weights: the layers whose weights were rounded to fit.
        strict: whether only a validated answer has exit code 0.
        error_share: the few layers that make nearly all of the error; None where none do.
    """

    model: str
    precision: Precision
    runner: str
    cause: Cause
    sentence: str
    passed: bool
    complete: bool
    plan: PrecisionPlan
    score: float
    base_score: float
    layer_count: int
    layers: pd.DataFrame
    outputs: pd.DataFrame
    search: pd.DataFrame
    pins: pd.DataFrame
    requirements: Sequence[str]
    samples: Sequence[str]
    findings: Sequence[Finding]
    evaluations: Mapping[str, int]
    new_evaluations: int
    sensitivity_runs: int
    seconds: float
    folder: Path
    versions: Mapping[str, str] = field(default_factory=dict)
    cost: pd.DataFrame = field(default_factory=pd.DataFrame)
    engine: EngineFacts | None = None
    search_facts: SearchFacts | None = None
    metrics: Sequence[str] = ()
    validation: Validation | None = None
    ranked: bool = False
    given_share: float = 1.0
    inputs: pd.DataFrame = field(default_factory=pd.DataFrame)
    tradeoff: pd.DataFrame = field(default_factory=pd.DataFrame)
    original_layers: pd.DataFrame = field(default_factory=pd.DataFrame)
    original_tradeoff: pd.DataFrame = field(default_factory=pd.DataFrame)
    budget_minutes: float | None = None
    out_of_time: bool = False
    interrupted: bool = False
    by_requirement: pd.DataFrame = field(default_factory=pd.DataFrame)
    command: str = ""
    model_digest: str = ""
    dynamic_inputs: Sequence[str] = ()
    threads: int = 0
    searched: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    causes: Sequence[CauseFound] = ()
    judged: Sequence[str] = ()
    choice_rows: Sequence[Choice] = ()
    repair: RepairFacts = field(default_factory=RepairFacts)
    weights: WeightFacts = field(default_factory=WeightFacts)
    error_share: ErrorShare | None = None
    strict: bool = False

    @property
    def pinned(self) -> list[str]:
        """The pinned layers in network order."""
        return [str(name) for name in self.pins["layer"]] if len(self.pins) else []

    @property
    def choices(self) -> pd.DataFrame:
        """The rows that a user chooses among, one recommended; columns as in run.json."""
        rows = [choice.as_json() for choice in self.choice_rows]
        table = pd.DataFrame(rows, columns=[*CHOICE_COLUMNS])
        # Where no engine was timed, all are None.
        return table.astype(dict.fromkeys(("worst_score", "latency_ms", "saving_kept"), float))

    @property
    def model_path(self) -> Path:
        """The typed model to ship, in the run's folder; made to pass only if ``passed``."""
        return self.folder / TYPED_MODEL

    def open(self) -> bool:
        """Opens report.html in the browser; returns False if no browser starts.

        Raises:
            BadInputError: the report is no longer in the run's folder.
        """
        report = self.folder / "report.html"
        if not report.is_file():
            raise BadInputError(
                f"{report}: no such file; `bisect-trt report {self.folder}` writes it again"
            )
        return webbrowser.open(report.resolve().as_uri())

    @property
    def is_fitted(self) -> bool:
        """Whether the plan is for weights rounded to fit."""
        chosen = recommended(self.choice_rows)
        return chosen is not None and chosen.fitted

    @property
    def is_repaired(self) -> bool:
        """Whether the plan is for the repaired graph."""
        chosen = recommended(self.choice_rows)
        return chosen is not None and chosen.repaired

    @property
    def graph_rules(self) -> list[str]:
        """The rules that repaired the graph of the plan; empty where that is the original."""
        return self.repair.rules if self.is_repaired else []

    @property
    def exit_code(self) -> int:
        """0 if the plan meets the requirements; 1 if none does, or validation refutes it.

        With ``strict`` it is 1 for everything that is not validated.
        """
        is_enough = self.is_met and (not self.strict or self.is_validated)
        return EXIT_OK if is_enough else EXIT_NOT_MET

    @property
    def is_met(self) -> bool:
        """Whether the plan meets the requirements and validation does not refute it."""
        return self.passed and not self.is_refuted

    @property
    def is_validated(self) -> bool:
        """Whether the plan passes and its verdict is ``validated``."""
        return self.passed and word_of(self.validation) == ValidationVerdict.VALIDATED.value

    @property
    def is_refuted(self) -> bool:
        """Whether the budget ended the search with a plan that validation refutes."""
        validation = self.validation
        return (
            self.out_of_time
            and validation is not None
            and validation.word in (None, ValidationVerdict.OVERFITTED)
        )

    def plan_json(
        self,
        whole: PrecisionPlan | None = None,
        repaired_digest: str = "",
        fitted_digest: str = "",
        wholes: Sequence[PrecisionPlan] = (),
    ) -> str:
        """The content of plan.json: the plan, its requirements and the searched inputs.

        ``whole`` and ``wholes`` are the plans of the answer and of each choice for the whole model,
        ``repaired_digest`` and ``fitted_digest`` are the SHA-256 of model.repaired.onnx and of
        model.fitted.onnx.
        """
        document = json.loads((whole or self.plan).to_json())
        if fitted_digest:
            document |= {
                "weights": "fit" if self.is_fitted else "nearest",
                "weights_fitted_by": FITTED_BY,
                "weights_fitted_on": list(self.weights.samples),
                "model_sha256": self.model_digest,
                "fitted_sha256": fitted_digest,
            }
        if repaired_digest:
            document |= {
                "graph": "repaired" if self.is_repaired else "original",
                "model_sha256": self.model_digest,
                "repaired_sha256": repaired_digest,
            }
        if wholes:
            document["choices"] = [
                {
                    "name": choice.name,
                    "precision": plan.base.value,
                    "graph": "repaired" if choice.repaired else "original",
                    "weights": "fit" if choice.fitted else "nearest",
                    "pinned": sorted(plan.pinned),
                }
                for choice, plan in zip(self.choice_rows, wholes, strict=True)
                if not choice.is_mixed
            ]
        if self.judged:
            document["outputs"] = list(self.judged)
        document |= {"requirements": list(self.requirements), "metrics": list(self.metrics)}
        if self.given_share < 1.0:
            document["holds_on"] = self.given_share  # the option's name when the key was made
        if self.validation is not None:
            document["robust"] = self.validation.wanted
            if self.validation.fitted:
                document["fitted"] = True
        if self.scales:
            document["scales"] = {name: scale.as_json() for name, scale in self.scales.items()}
        if self.searched:
            document["searched"] = dict(self.searched)
        return json.dumps(document, indent=2)

    def as_json(self) -> dict[str, Any]:
        """The content of run.json, as schema/run.schema.json describes it."""
        budget = None
        if self.budget_minutes is not None:
            budget = {"minutes": self.budget_minutes, "ended_the_search": self.out_of_time}
        return {
            "format": FORMAT,
            "model": self.model,
            "precision": self.precision.value,
            "runner": self.runner,
            "cause": self.cause.value,
            "sentence": self.sentence,
            "causes": [
                {"name": c.name.value, "layers": list(c.layers), "sentence": c.sentence}
                for c in self.causes
            ],
            "error_share": asdict(self.error_share) if self.error_share is not None else None,
            "passed": self.passed,
            "exit_code": EXIT_INTERRUPTED if self.interrupted else self.exit_code,
            "complete": self.complete,
            "pinned": self.pinned,
            "layers": self.layer_count,
            "score": self.score,
            "base_score": self.base_score,
            "requirements": list(self.requirements),
            "by_requirement": self.by_requirement.to_dict(orient="records"),
            "metrics": list(self.metrics),
            "samples": list(self.samples),
            "allow_misses": round(1.0 - self.given_share, 12),  # 1 - 0.9 is not 0.1 in binary
            "validation": self._validation_json(),
            "verdict": word_of(self.validation),
            "choices": [choice.as_json() for choice in self.choice_rows],
            **self.repair.as_json(),
            "weights": self.weights.as_json(),
            "validation_settings": self._validation_settings(),
            "strict": self.strict,
            "ranked": self.ranked,
            "evaluations": dict(self.evaluations),
            "new_evaluations": self.new_evaluations,
            "sensitivity_runs": self.sensitivity_runs,
            "outputs": self.outputs.to_dict(orient="records"),
            "findings": [vars(f) for f in self.findings],
            "plan": {
                "base": self.plan.base.value,
                "pin_precision": self.plan.pin_precision.value,
                "held": [name for name in self.pinned if name in self.plan.held],
            },
            "engine": self._engine_json(),
            "search": asdict(self.search_facts) if self.search_facts is not None else {},
            "seconds": self.seconds,
            "budget": budget,
            "interrupted": self.interrupted,
            "command": self.command,
            "model_sha256": self.model_digest,
            "dynamic_inputs": list(self.dynamic_inputs),
            "versions": dict(self.versions),
            "machine": {
                "system": platform.platform(),
                "processor": platform.machine(),
                "threads": self.threads,
            },
        }

    def _validation_json(self) -> dict[str, Any]:
        validation = self.validation
        return {
            kind.value: asdict(validation.of(kind) if validation is not None else Tally())
            for kind in InputKind
        }

    def _validation_settings(self) -> dict[str, Any]:
        if self.validation is None:
            return {}
        elsewhere = (*InputKind, "copies")
        facts = vars(self.validation)
        return {name: value for name, value in facts.items() if name not in elsewhere}

    def _engine_json(self) -> dict[str, Any]:
        if self.engine is None:
            return {}
        facts = {name: value for name, value in asdict(self.engine).items() if value is not None}
        return {**facts, "cost": self.cost.to_dict(orient="records")}


Json = Mapping[str, Any]
_Kind = TypeVar("_Kind")
_SOMETIMES = ("engines", "inputs", "tradeoff", *ORIGINALS)
_SAME = (
    *("model", "runner", "sentence", "passed", "complete", "ranked", "interrupted", "command"),
    *("requirements", "samples", "metrics", "dynamic_inputs", "versions"),
    *("evaluations", "new_evaluations", "sensitivity_runs"),
)
"""Keys of run.json that the record has by the same names."""


def read_run(folder: Path) -> Record:
    """Reads the record of the run in ``folder``.

    Raises:
        BadInputError: no run's folder, another format, or damaged.
    """
    if not folder.is_dir():
        raise BadInputError(f"{folder}: no such folder; give the --out of a run")
    path = folder / RUN
    if not path.is_file():
        raise BadInputError(
            f"{folder}: not the folder of a finished run (it has no {RUN}); `bisect-trt run` "
            "writes one"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error, 80)})") from error
    _check_format(path, data)
    try:
        _check(data)
        return _record(data, folder)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else one_line(error, 120)
        raise BadInputError(
            f"{path}: damaged ({reason}); run the same command again: the answers are in the cache"
        ) from error


def _check_format(path: Path, data: Any) -> None:
    """Refuses another format, with the version that wrote it."""
    record = data if isinstance(data, dict) else {}
    if record.get("format") == FORMAT:
        return
    versions = record.get("versions")
    version = versions.get("bisect-trt") if isinstance(versions, dict) else None
    by = f"bisect-trt {one_line(str(version), 40)}" if version else "another version"
    raise BadInputError(
        f"{path}: written by {by} in format {one_line(str(record.get('format')), 20)}, and this "
        f"version reads format {FORMAT}; run the same command again"
    )


def _check(data: Json) -> None:
    """Refuses what the schema does not allow, except for keys of later versions."""
    import jsonschema  # slow to import, and few commands read runs

    schema_file = files("bisect_trt.report") / "schema" / "run.schema.json"
    text = schema_file.read_text(encoding="utf-8")
    schema = json.loads(text, object_hook=_with_later_keys)
    fault = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(data)
    )
    if fault is not None:
        raise ValueError(f"{fault.json_path.removeprefix('$.')}: {fault.message}")


def _with_later_keys(part: dict[str, Any]) -> dict[str, Any]:
    """Opens a part of the schema for keys that it does not name."""
    closed = part.get("additionalProperties") is False
    return {k: v for k, v in part.items() if not (closed and k == "additionalProperties")}


def _made(kind: type[_Kind], values: Json) -> _Kind:
    """Makes a ``kind`` of the ``values`` that it has fields for; later versions may have more."""
    named = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in named})


def _record(data: Json, folder: Path) -> Record:
    tables = {name: _table(folder, name) for name in TABLES}
    pinned = [str(name) for name in data["pinned"]]
    # The CSV files spell out control characters; run.json has the pins' exact names.
    exact = {printable(name): name for name in pinned}
    layers = tables["layers"]["layer"].map(lambda name: exact.get(name, name))
    engine = {k: v for k, v in data["engine"].items() if k != "cost"}
    return Record(
        **{name: data[name] for name in _SAME},
        precision=Precision(data["precision"]),
        cause=Cause(data["cause"]),
        causes=[
            CauseFound(Cause(c["name"]), tuple(c["layers"]), c["sentence"])
            for c in data.get("causes", ())
        ],
        plan=_plan(data),
        score=_number(data["score"]),
        base_score=_number(data["base_score"]),
        layer_count=int(data["layers"]),
        layers=tables["layers"].assign(layer=layers),
        outputs=tables["outputs"],
        search=tables["search"],
        pins=tables["pins"].assign(layer=pinned),
        findings=[_made(Finding, found) for found in data["findings"]],
        seconds=_number(data["seconds"]),
        folder=folder,
        cost=tables["engines"],
        engine=_engine(engine) if engine else None,
        search_facts=_search(data["search"]) if data["search"] else None,
        validation=_validation(data) if data["validation_settings"] else None,
        given_share=round(1.0 - _number(data["allow_misses"]), 12),
        inputs=tables["inputs"],
        tradeoff=tables["tradeoff"],
        original_layers=tables["original_layers"],
        original_tradeoff=tables["original_tradeoff"],
        by_requirement=_by_requirement(data),
        budget_minutes=data["budget"] and float(data["budget"]["minutes"]),
        out_of_time=bool(data["budget"] and data["budget"]["ended_the_search"]),
        model_digest=data["model_sha256"],
        threads=int(data["machine"]["threads"]),
        choice_rows=[choice_from_json(row) for row in data["choices"]],
        repair=facts_from_json(data),
        weights=weights_from_json(data["weights"]),
        strict=bool(data.get("strict", False)),
        error_share=_error_share(data["error_share"]) if data.get("error_share") else None,
    )


def _plan(data: Json) -> PrecisionPlan:
    plan = data["plan"]
    held, pinned = frozenset(plan["held"]), frozenset(data["pinned"])
    return PrecisionPlan(Precision(plan["base"]), pinned, Precision(plan["pin_precision"]), held)


def _table(folder: Path, name: str) -> pd.DataFrame:
    path = folder / f"{name}.csv"
    if not path.is_file() and name in _SOMETIMES:
        return pd.DataFrame()
    try:
        # newline="": a line break inside quotes is data.
        with path.open(encoding="utf-8", newline="") as stream:
            table = from_csv(stream.read(), TABLES[name])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path.name}: {one_line(error, 80)}") from error
    return table if len(table) or name == "pins" else pd.DataFrame()


def _validation(data: Json) -> Validation:
    values: dict[str, Any] = dict(data["validation_settings"])
    if "prediction_limit" in values:
        values["prediction_limit"] = _number(values["prediction_limit"])
    for kind in InputKind:
        worst = _number(data["validation"][kind.value]["worst_score"])
        values[kind.value] = _made(Tally, {**data["validation"][kind.value], "worst_score": worst})
    return _made(Validation, values)


def _engine(data: Json) -> EngineFacts:
    facts = {**data, "fp32_likeness_to_tf32": _number(data["fp32_likeness_to_tf32"])}
    for name, kind in (("marking_effect", MarkingEffect), ("reproducibility", Reproducibility)):
        if facts.get(name) is not None:
            facts[name] = _made(kind, {k: _maybe_number(v) for k, v in facts[name].items()})
    facts["candidates"] = tuple(
        _made(Candidate, {**one, "score": _number(one["score"]), "layers": tuple(one["layers"])})
        for one in facts.get("candidates", ())
    )
    facts["times"] = tuple(_made(ChoiceTimes, one) for one in facts.get("times", ()))
    return _made(EngineFacts, facts)


def _error_share(data: Json) -> ErrorShare:
    return ErrorShare(tuple(data["layers"]), _number(data["share"]), _number(data["left"]))


def _search(data: Json) -> SearchFacts:
    return _made(SearchFacts, {**data, "suspicion_auc": _number(data["suspicion_auc"])})


def _by_requirement(data: Json) -> pd.DataFrame:
    rows = [
        {
            "requirement": row["requirement"],
            **{name: _number(row[name]) for name in ("reduced_score", "plan_score")},
            "baselines": {label: _number(score) for label, score in row["baselines"].items()},
        }
        for row in data["by_requirement"]
    ]
    return pd.DataFrame(rows)


def _number(value: Any) -> float:
    """Reads a float: JSON has null for NaN, and strings for infinities."""
    return math.nan if value is None else float(value)


def _maybe_number(value: Any) -> Any:
    return _number(value) if value in (None, "inf", "-inf") else value
