"""What was really built: the types and times of an engine's layers, and what a plan asked for."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_trt.base.errors import (
    BadInputError,
    RunnerFailedError,
    RunnerUnavailableError,
    one_line,
)
from bisect_trt.base.interrupt import Observer
from bisect_trt.model.graph import Graph
from bisect_trt.model.lifted import load_source
from bisect_trt.model.trt_names import NetworkLayer, TrtNames
from bisect_trt.runners.process import IsolatedWorker
from bisect_trt.runners.tensorrt.inspecting import INSPECTING_WORKER, Inspected
from bisect_trt.runners.tensorrt.readback import FLOATS, TYPE_NAME, engine_layers
from bisect_trt.runners.tensorrt.records import RTX, EngineLayer
from bisect_trt.steps.saved_plan import SavedPlan, read_plan

BOTH = "several"
"""The precision of a layer whose tensors have several float types."""
_FLOAT_NAME = {"HALF": "FP16", "FLOAT": "FP32", "BF16": "BF16"}
_OTHER_NAME = {"OTHER": "other", "UNKNOWN": "unknown"}
PRECISIONS = (*_FLOAT_NAME.values(), BOTH, *_OTHER_NAME.values())
"""What a tensor or a layer may be in; ``other`` are integers, truth values, INT8 and FP8."""

_REGION = "{ForeignNode["
_RTX_MAGIC = b"vtrt"
"""What an engine of TensorRT for RTX begins with."""
_DETAILED = "build with trtexec --profilingVerbosity=detailed"


@dataclass(frozen=True)
class BuiltLayer:
    """A layer of an engine: ``precision`` is one of :data:`PRECISIONS`, ``nodes`` are ids of ONNX
    nodes, ``time_ms`` is NaN where it is not known.
    """

    name: str
    precision: str
    nodes: tuple[str, ...] = ()
    time_ms: float = math.nan


@dataclass(frozen=True)
class Dishonoured:
    """A layer that the plan wants in the precision ``wanted`` and the engine has in ``found``."""

    layer: str
    wanted: str
    found: str
    engine_layer: str


@dataclass(frozen=True)
class Honoured:
    """An engine beside a plan.

    ``reduced`` is the plan's precision. ``expected`` and ``found`` are the shares of the ``seen``
    layers in it. ``hidden`` layers are fused with others or have tensors of several types, so that
    theirs does not show.
    ``absent`` layers are in no engine layer.
    """

    reduced: str
    expected: float
    found: float
    seen: int
    hidden: tuple[str, ...]
    absent: tuple[str, ...]
    dishonoured: tuple[Dishonoured, ...]


@dataclass(frozen=True)
class BuiltEngine:
    """What an engine is.

    ``tensors`` counts its tensors by precision. ``unmapped`` are the engine layers that stand for
    no node of the model. ``strange`` are timed layers that the engine does not list.
    """

    source: Path
    layers: tuple[BuiltLayer, ...]
    tensors: Mapping[str, int]
    model: Path | None = None
    unmapped: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    plan: Path | None = None
    honoured: Honoured | None = None

    @property
    def is_timed(self) -> bool:
        """Whether the time of any layer is known."""
        return any(not math.isnan(layer.time_ms) for layer in self.layers)

    def layers_by_precision(self) -> Mapping[str, int]:
        """How many layers each precision has."""
        return Counter(layer.precision for layer in self.layers)

    def time_by_precision(self) -> Mapping[str, float]:
        """The layers' time in ms by precision."""
        times: dict[str, float] = {}
        for layer in self.layers:
            if not math.isnan(layer.time_ms):
                times[layer.precision] = times.get(layer.precision, 0.0) + layer.time_ms
        return times


def read_built(
    engine: Path,
    model: Path | None,
    plan: Path | None,
    profile: Path | None,
    *,
    load: bool,
    run: bool,
    observer: Observer,
) -> BuiltEngine:
    """Reads ``engine``, the JSON of its layers or the engine itself.

    Raises:
        BadInputError: a file is not what it should be, or options do not go together.
        RunnerUnavailableError: this machine loads no engines.
    """
    if plan is not None and model is None:
        raise BadInputError("--plan needs --model MODEL, the model that the plan is for")
    if run and profile is not None:
        raise BadInputError("--run and --profile both give times; leave one out")
    observer.step("read")
    saved = read_plan(plan) if plan is not None else None
    times = read_profile(profile) if profile is not None else {}
    graph = _graph(model, saved)
    information, measured = _information(engine, load=load, run=run)
    layers = _detailed(engine, information)
    observer.step("compare")
    known = TrtNames(graph) if graph is not None else None
    contents = [_contents(layer, known) for layer in layers]
    if graph is not None and not any(its.nodes for its in contents):
        raise BadInputError(
            f"{engine}: none of its layers is a node of {model}; give the model that it was built "
            "from"
        )
    given = times or measured
    uses = Counter(layer.name for layer in layers)
    strange = tuple(name for name in given if name not in uses)
    if len(strange) == len(given) > 0:
        raise BadInputError(f"{profile or engine}: times no layer of {engine}, but another engine")
    built = [
        BuiltLayer(
            layer.name,
            _precision(_kinds(layer)),
            its.nodes,
            # A profile has one entry for all layers of a name.
            given.get(layer.name, math.nan) / uses[layer.name],
        )
        for layer, its in zip(layers, contents, strict=True)
    ]
    bare = [BuiltLayer(name, "unknown") for name in information["Layers"] if isinstance(name, str)]
    return BuiltEngine(
        engine,
        (*built, *bare),
        Counter(_named(kind) for _, kind in {t for layer in layers for t in layer.tensors}),
        model=model,
        unmapped=tuple(x.name for x in built if not x.nodes) if graph is not None else (),
        strange=strange,
        plan=plan,
        honoured=None
        if graph is None or saved is None
        else _honoured(graph, saved, layers, contents),
    )


def _graph(model: Path | None, saved: SavedPlan | None) -> Graph | None:
    """The model that the engine was built from, in the form that the plan is for."""
    if model is None:
        return None
    graph = (load_source(model) if saved is None else saved.source_of(model)).graph
    if saved is not None:
        saved.check_model(graph)
    return graph


def _information(
    engine: Path, *, load: bool, run: bool
) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """The inspector's JSON of ``engine``, and the times of its layers where it was executed."""
    content = _bytes(engine)
    if content[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        if load or run:
            option = "--run" if run else "--load"
            raise BadInputError(f"{option}: {engine} is JSON, not an engine; leave {option} out")
        return _parsed(engine, content), {}
    tool = "tensorrt_rtx" if content.startswith(_RTX_MAGIC) else "trtexec"
    advice = (
        f"give the layers' JSON: {tool} --loadEngine={shlex.quote(str(engine))} "
        "--exportLayerInfo=layers.json"
    )
    if engine.suffix == ".onnx":
        raise BadInputError(f"{engine}: a model, not an engine; build it, and give what was built")
    if not load:
        raise BadInputError(
            f"{engine}: loading an engine can run code that is in it; if you trust it, add --load, "
            f"or {advice}"
        )
    found = _loaded(engine, RTX if tool == "tensorrt_rtx" else "tensorrt", run, advice)
    return _parsed(engine, found.information.encode()), found.times_ms


def _loaded(engine: Path, module: str, run: bool, advice: str) -> Inspected:
    """What the engine says of itself, in a process of its own."""
    try:
        with IsolatedWorker(INSPECTING_WORKER, {"module": module}) as worker:
            found: Inspected = worker.call("inspect", str(engine), run)
            return found
    except RunnerUnavailableError as error:
        # The rest of the message is advice for runs.
        reason = str(error).partition(": ")[0]
        raise RunnerUnavailableError(f"{engine}: {reason}; {advice}") from error
    except RunnerFailedError as error:
        log = one_line(error.log[-1], 200) if error.log else "no reason given"
        raise BadInputError(f"{engine}: {error.blamed_on_model()} ({log})") from error


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise BadInputError(f"{path}: a folder; give an engine, or the JSON of its layers")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error


def _json(path: Path, content: bytes) -> Any:
    """The JSON in ``content``; TensorRT may cut names inside a character."""
    try:
        return json.loads(content.decode("utf-8-sig", errors="replace"), strict=False)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: broken JSON ({one_line(error, 80)})") from error


def _parsed(path: Path, content: bytes) -> Mapping[str, Any]:
    """The inspector's JSON in ``content``; anything else is refused."""
    data = _json(path, content)
    if isinstance(data, dict) and isinstance(data.get("Layers"), list):
        return data
    if isinstance(data, dict) and "pinned" in data:
        hint = "a plan of bisect-trt; give it as --plan, and the engine as ENGINE"
    elif isinstance(data, list):
        hint = "a list, as a profile is; give it as --profile, and the engine as ENGINE"
    else:
        hint = "no 'Layers' in it; write it with trtexec --exportLayerInfo"
    raise BadInputError(f"{path}: {hint}")


def read_profile(path: Path) -> Mapping[str, float]:
    """The average time of each engine layer in ms, from ``trtexec --exportProfile``.

    Raises:
        BadInputError: it cannot be read, or is no profile.
    """
    times: dict[str, float] = {}
    try:
        for entry in _json(path, _bytes(path)):
            if "name" in entry:  # the first entry is the number of runs
                name = str(entry["name"])
                times[name] = times.get(name, 0.0) + float(entry["averageMs"])
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise BadInputError(
            f"{path}: not a profile; write it with trtexec --exportProfile"
        ) from error
    if not times or not all(0.0 <= time < math.inf for time in times.values()):
        raise BadInputError(f"{path}: a profile without times; write it with trtexec anew")
    return times


def _detailed(engine: Path, information: Mapping[str, Any]) -> Sequence[EngineLayer]:
    """The layers with their types; refuses an engine that has names only."""
    try:
        layers = engine_layers(information)
    except (TypeError, AttributeError) as error:
        raise BadInputError(f"{engine}: its layers are not as TensorRT writes them") from error
    if not information["Layers"]:
        raise BadInputError(f"{engine}: it has no layers; {_DETAILED}")
    if not any(layer.tensors for layer in layers):
        raise BadInputError(f"{engine}: it has the names of its layers only; {_DETAILED}")
    return layers


@dataclass(frozen=True)
class _Contents:
    """The nodes in an engine layer; ``only`` these are in it, no Cast and no whole region."""

    nodes: tuple[str, ...]
    only: bool


def _contents(layer: EngineLayer, names: TrtNames | None) -> _Contents:
    """What ``layer`` computes: by its metadata, else by its name."""
    if names is None:
        return _Contents(layer.nodes, only=True)
    is_region = layer.name.startswith(_REGION)
    entries = [_of_metadata(entry, names) for entry in layer.nodes]
    found = tuple(dict.fromkeys(name for entry in entries for name in entry))
    if found:
        return _Contents(found, only=all(entries) and not is_region)
    return _Contents(names.resolve(layer.name).nodes, only=not is_region)


def _of_metadata(entry: str, names: TrtNames) -> tuple[str, ...]:
    return names.nodes_of_layer(NetworkLayer("", "", f"[ONNX Layer: {entry}]"))


def _kinds(layer: EngineLayer) -> frozenset[str]:
    return frozenset((*layer.inputs, *layer.outputs))


def _named(kind: str) -> str:
    return {**_FLOAT_NAME, **_OTHER_NAME}[kind]


def _precision(kinds: frozenset[str]) -> str:
    """The precision of tensors of ``kinds``: their float type, where they have one."""
    floats = kinds & FLOATS
    if len(floats) > 1:
        return BOTH
    return _named(next(iter(floats or kinds & {"UNKNOWN"} or {"OTHER" if kinds else "UNKNOWN"})))


@dataclass
class _Seen:
    """The float types that a layer shows, and an engine layer that has them."""

    kinds: set[str] = field(default_factory=set)
    where: str = ""


def _honoured(
    graph: Graph,
    saved: SavedPlan,
    layers: Sequence[EngineLayer],
    contents: Sequence[_Contents],
) -> Honoured:
    """Compares the engine's types with the plan's."""
    plan = saved.plan
    base = plan.base
    judged = graph.layers_at(base) if base.is_storage else graph.layers
    wanted = {layer.name: TYPE_NAME[plan.precision_of(layer.name)] for layer in judged}
    seen: dict[str, _Seen] = {}
    present: set[str] = set()
    for layer, content in zip(layers, contents, strict=True):
        its = [name for name in content.nodes if name in wanted]
        present.update(its)
        floats = _kinds(layer) & FLOATS
        wishes = {wanted[name] for name in its}
        # A fused layer shows the types at its border. They speak for what is inside only where all
        # of it should have one type, and no Cast is part of it.
        if len(wishes) != 1 or not floats or not content.only:
            continue
        # One that reads one type and gives another may compute in either.
        if len(floats) > 1 and wishes <= floats:
            continue
        for name in its:
            found = seen.setdefault(name, _Seen())
            found.kinds |= floats
            found.where = found.where or layer.name
    seen = {
        name: its
        for name, its in seen.items()
        if len(its.kinds) == 1 or wanted[name] not in its.kinds
    }
    if not seen:
        raise BadInputError(
            f"{saved.path}: nothing of it can be judged: every layer is fused with layers of "
            "another type, has tensors of several types, or its types are unknown"
        )
    reduced = {TYPE_NAME[base]} if base.is_storage else FLOATS - {"FLOAT"}
    return Honoured(
        base.value.upper() if base.is_storage else "FP16 or BF16",
        _share(seen, lambda name: wanted[name] in reduced),
        _share(seen, lambda name: seen[name].kinds <= reduced),
        len(seen),
        tuple(name for name in wanted if name in present and name not in seen),
        tuple(name for name in wanted if name not in present),
        tuple(
            Dishonoured(
                name,
                _named(kind),
                _precision(frozenset(seen[name].kinds)),
                seen[name].where,
            )
            for name, kind in wanted.items()
            if name in seen and kind not in seen[name].kinds
        ),
    )


def _share(names: Iterable[str], counts: Callable[[str], bool]) -> float:
    listed = list(names)
    return sum(map(counts, listed)) / len(listed)
