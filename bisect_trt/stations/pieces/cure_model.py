"""What the command ``cure`` asks for: a model, its inputs, an engine, maybe a reduced piece."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.machine.time_budget import TimeBudget
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import Precision
from bisect_trt.graph.model.graph import Graph
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.pieces.cures import Cures, try_cures
from bisect_trt.stations.pieces.reduce_model import fresh_engines, model_and_samples
from bisect_trt.stations.pieces.seen import Budget


def cure_model(
    settings: Settings, precision: Precision, piece: Path | None, observer: Observer
) -> Cures:
    """Every cure of the settings' model, tried on all its inputs.

    Args:
        settings: the model, the inputs and the engine.
        precision: what the engine runs in.
        piece: the folder of a reproducer, whose nodes are marked first.
        observer: hears of the progress.

    Raises:
        BadInputError: names the file, tensor or option that cannot be used.
        RunnerUnavailableError: no engine can run on this machine.
    """
    if settings.runner not in ("auto", "tensorrt"):
        raise BadInputError(f"--runner {settings.runner}: cures are those of TensorRT's engines")
    graph, samples = model_and_samples(settings, observer)
    suspects = _nodes_of(piece, graph) if piece is not None else ()
    # Asked before anything is tried: without a GPU each cure would be told to have failed.
    fresh_engines(settings)(graph, samples).close()
    observer.station("cures")

    budget = Budget(settings.max_builds, TimeBudget(settings.budget))
    opens, workers = partial(fresh_engines, settings), settings.workers
    return try_cures(graph, samples, precision, suspects, opens, budget, observer, workers)


def _nodes_of(piece: Path, graph: Graph) -> tuple[str, ...]:
    record = piece / "reduce.json"
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        nodes = tuple(str(node["name"]) for node in found["nodes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"--piece {piece}: no reproducer of `bisect-trt reduce` ({record.name} cannot be read)"
        ) from error
    unknown = sorted(set(nodes).difference(graph.names))
    if unknown:
        raise BadInputError(
            f"--piece {piece}: its node {unknown[0]!r} is not in the model; reduce this model"
        )
    return nodes
