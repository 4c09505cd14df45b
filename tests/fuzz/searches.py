"""What must hold of a search: relations between runs, and what was planted is named."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import bisect_trt
from bisect_trt.base.errors import BisectError
from bisect_trt.base.outcomes import Cause
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.graph import Graph, to_typed
from bisect_trt.model.load import load_model
from tests.command import call
from tests.copies import EIGHT
from tests.execute import run
from tests.fuzz.graphs import Network
from tests.fuzz.interpreter import Interpreter
from tests.fuzz.lists import readings
from tests.fuzz.net import Arrays
from tests.fuzz.relations import LISTS, Failure, raised_in

TOLERANCE = 1e-2
"""The share of an output's range that an element may be off by."""

LONGEST_S = 60.0
"""No run takes longer, however busy the machine."""

MARGIN = 1.2
"""Other orders of sums move a score that is near the limit by less."""

LOOSER = 100.0
"""How many times looser the second requirement is."""

SCALES = (2.0, 1.0, 1e-2, 1e-4)
"""Factors on the inputs at which a repaired model must equal the original."""

STRONG = 2.5
"""An accumulated error counts where it is this many times the largest of a single layer."""

FP32_NOISE = 8 * 2.0**-23
"""What another kernel of FP32 may give instead, as a share of the largest value."""

VOLATILE = frozenset({"seconds", "command", "machine", "new_evaluations"})
"""Keys of run.json that say when and where a run was, not what it found."""


@dataclass(frozen=True)
class Search:
    """What a network's search showed; ``named`` is one of campaign.WORDS.

    ``is_run`` is False where the network was set aside: no search began.
    """

    failures: list[Failure]
    named: str = ""
    seconds: float = 0.0
    cause: str = ""
    is_run: bool = False


def score(network: Network, model: onnx.ModelProto, tolerance: float) -> float:
    """The largest error of float outputs over their ranges, in tolerances, as interpreted."""
    return error_of(model, network.feeds, references(network)) / tolerance


def error_of(model: onnx.ModelProto, feeds: Iterable[Arrays], exact: Iterable[Arrays]) -> float:
    """The largest error of float outputs over their ranges; ``exact`` are the outputs in FP32."""
    interpreter = Interpreter(model)
    pairs = zip(feeds, exact, strict=True)
    return max(distance(expected, interpreter.run(feed)) for feed, expected in pairs)


def references(network: Network) -> list[Arrays]:
    """The outputs in FP32 for each feed."""
    model = load_model(network.model).proto
    return [run(model, feed) for feed in network.feeds]


def distance(expected: Arrays, found: Arrays) -> float:
    """The largest error of a float output over its range; infinite for another NaN.

    Errors within FP32's own are none: an output near 1 may have a range of a few of its units.
    """
    worst = 0.0
    for name, array in expected.items():
        if array.dtype.kind != "f":
            continue
        exact, got = array.astype(np.float64), found[name].astype(np.float64)
        usable = np.isfinite(exact)
        if not np.isfinite(got[usable]).all():
            return np.inf
        if usable.any():
            values = exact[usable]
            spread = float(np.ptp(values)) or float(np.abs(values).max()) or 1.0
            error = float(np.abs(values - got[usable]).max())
            worst = max(worst, max(0.0, error - FP32_NOISE * float(np.abs(values).max())) / spread)
    return worst


def decides_otherwise(expected: Arrays, found: Arrays) -> bool:
    """Whether an output that is no float differs."""
    kept = {name: array for name, array in expected.items() if array.dtype.kind != "f"}
    return any(not np.array_equal(array, found[name]) for name, array in kept.items())


def is_resolved(network: Network, tolerance: float) -> bool:
    """Whether FP32 itself is ten times finer than ``tolerance``, on every output and feed.

    A saturated output may be 1 but for a few units in the last place: no plan can be judged by it.
    """
    for exact in references(network):
        for array in exact.values():
            values = array[np.isfinite(array)].astype(np.float64) if array.dtype.kind == "f" else []
            if len(values) and np.ptp(values):
                finest = 10.0 * FP32_NOISE * float(np.abs(values).max())
                if tolerance * float(np.ptp(values)) < finest:
                    return False
    return True


def everything_reduced(network: Network) -> onnx.ModelProto:
    """The network with every layer in FP16."""
    return to_typed(Graph(load_model(network.model).proto), PrecisionPlan(Precision.FP16))


def does_nothing(network: Network) -> bool:
    """Whether every layer in FP16 meets the requirement and changes no integers."""
    interpreter = Interpreter(everything_reduced(network))
    found = [interpreter.run(feed) for feed in network.feeds]
    return not any(
        distance(*pair) > MARGIN * TOLERANCE or decides_otherwise(*pair)
        for pair in zip(references(network), found, strict=True)
    )


def accumulated(network: Network) -> float | None:
    """A tolerance that everything reduced misses and no layer alone; None where there is none.

    Nor is there one where a layer alone changes an output of integers, such as an ArgMax.
    """
    graph = Graph(load_model(network.model).proto)
    names = frozenset(layer.name for layer in graph.layers_at(Precision.FP16))
    exact = references(network)

    def error(pinned: frozenset[str]) -> float:
        interpreter = Interpreter(to_typed(graph, PrecisionPlan(Precision.FP16, pinned)))
        found = [interpreter.run(feed) for feed in network.feeds]
        pairs = list(zip(exact, found, strict=True))
        if pinned and any(decides_otherwise(*pair) for pair in pairs):
            return np.inf
        return max(distance(*pair) for pair in pairs)

    whole = error(frozenset())
    alone = max(error(names - {name}) for name in names)
    return float(np.sqrt(whole * alone)) if np.isfinite(whole) and whole > STRONG * alone else None


def searched(network: Network, folder: Path) -> Search:
    """Runs a search on ``network`` and holds what it gives against the relations."""
    begun = time.monotonic()
    tolerance = accumulated(network) if network.recipe.fault == "chain" else TOLERANCE
    if tolerance is None:
        word = "harmless" if does_nothing(network) else "unjudged"
        return Search([], word, time.monotonic() - begun)
    if not is_resolved(network, tolerance):
        return Search([], "unjudged", time.monotonic() - begun)
    options: dict[str, Any] = {"require": f"rel_range<={tolerance!r}"}
    options["repair"] = "auto" if network.recipe.seed % 2 else "none"
    found: list[Failure] = []
    named, cause = "missed", ""
    try:
        # In one folder: what the looser run has cached must not answer the stricter one.
        loosened = {**options, "require": f"rel_range<={LOOSER * tolerance!r}"}
        loose = _run(network, folder / "run", **loosened) if network.recipe.seed % 4 == 1 else None
        result = _run(network, folder / "run", **options)
        cause = result.cause.value
        for relation, check in (
            ("a run ends in time and in order", _ends),
            ("a passing plan passes in the interpreter", _passes),
            ("verify agrees with run", _verified),
            ("a proved pin fails without it", _proved),
            ("a repaired model is the original", _repaired),
            (LISTS, _listed),
        ):
            found += [Failure(relation, told) for told in check(network, result, folder, tolerance)]
        named = naming(network, result, tolerance)
        if named == "wrong":
            found.append(Failure("what harms nothing is not blamed", result.sentence))
        elif named in ("missed", "partly"):
            told = f"{named}, {cause}: {result.sentence}"
            found.append(Failure("the planted cause is named", told))
        if loose is not None:
            dearer = _dearer(result, loose)
            found += [Failure("a looser requirement costs no more", told) for told in dearer]
        if network.recipe.seed % 4 == 0:
            again = _run(network, folder / "again", **options)
            found += [Failure("twice is the same", told) for told in _differs(result, again)]
        if network.recipe.seed % 4 == 2:
            told_by = _commanded(network, result, folder, options)
            found += [Failure("the command ends like the call", told) for told in told_by]
    except Exception as error:
        kind = "a refused input" if isinstance(error, BisectError) else "a traceback"
        found.append(raised_in(kind, error))
    return Search(found, named, time.monotonic() - begun, cause, True)


def _run(network: Network, out: Path, **options: Any) -> bisect_trt.Result:
    return bisect_trt.bisect(
        network.model,
        list(network.feeds),
        **{
            "runner": "emulated",
            "robust": 0,
            "weights": "nearest",
            "out": out,
            "limits": EIGHT,
            "threads": 1,
            **options,
        },
    )


def _ends(
    network: Network, result: bisect_trt.Result, folder: Path, tolerance: float
) -> Iterator[str]:
    document = json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))
    seconds = float(document["seconds"])
    if seconds > LONGEST_S:
        yield f"it took {seconds:.0f} s"
    if document["exit_code"] != (0 if result.passed else 1):
        yield f"exit code {document['exit_code']} where passed is {result.passed}"


def _passes(
    network: Network, result: bisect_trt.Result, folder: Path, tolerance: float
) -> Iterator[str]:
    if not result.passed:
        return
    found = score(network, onnx.load(result.model_path), tolerance)
    if not found <= MARGIN:
        yield f"{found:.3g} tolerances, where the run says {result.score:.3g}"


def _verified(
    network: Network, result: bisect_trt.Result, folder: Path, tolerance: float
) -> Iterator[str]:
    checked = bisect_trt.verify(
        network.model,
        list(network.feeds),
        folder / "run" / "plan.json",
        runner="emulated",
        robust=0,
        out=folder / "verify",
        limits=EIGHT,
        threads=1,
    )
    if checked.passed != result.passed:
        wrong = [f"{c.what}: {c.detail}" for c in checked.checks if c.validation is False]
        yield f"verify says {checked.passed}, run {result.passed}: {'; '.join(wrong)[:300]}"


def _proved(
    network: Network, result: bisect_trt.Result, folder: Path, tolerance: float
) -> Iterator[str]:
    if not len(result.pins) or result.is_repaired or not result.passed:
        return
    graph = Graph(load_model(network.model).proto)
    for _, row in result.pins.iterrows():
        if not row["proved"] or row["held"] or row["inherited"]:
            continue
        plan = replace(result.plan, pinned=result.plan.pinned - {row["layer"]})
        typed = to_typed(graph, plan)
        found = score(network, typed, tolerance)
        decided = max(row["tolerance_share"], 1e-9) / MARGIN
        integers = any(o.type.tensor_type.elem_type != 1 for o in network.model.graph.output)
        if found < decided and not integers:
            yield f"without {row['layer']}: {found:.3g} tolerances"


def _repaired(
    network: Network, result: bisect_trt.Result, folder: Path, tolerance: float
) -> Iterator[str]:
    path = folder / "run" / "model.repaired.onnx"
    if not path.exists():
        return
    original, repaired = load_model(network.model).proto, onnx.load(path)
    random = np.random.default_rng(0)
    for factor, mask in [*((f, None) for f in SCALES), (1.0, 0.0), (1.0, 1.0)]:
        feed = {n: _scaled(n, a, factor, mask) for n, a in network.feeds[0].items()}
        expected = run(original, feed)
        moved = {
            n: a * (1 + random.choice([-1, 1], a.shape).astype(np.float32) * np.float32(2.0**-23))
            if a.dtype == np.float32
            else a
            for n, a in feed.items()
        }
        noise = distance(expected, run(original, moved))
        found = distance(expected, run(repaired, feed))
        if not found <= max(2e-5, 8.0 * noise):
            yield f"at {factor:g}, masks {mask}: {found:.3g} of the range, noise {noise:.3g}"


def _listed(
    network: Network, result: bisect_trt.Result, folder: Path, tolerance: float
) -> Iterator[str]:
    if not result.is_repaired:
        told = readings(Graph(load_model(network.model).proto), result.plan)
        yield from (f"{r.form}: {r.detail}" for r in told if r.outcome == "differs")


def _scaled(name: str, array: np.ndarray, factor: float, mask: float | None) -> np.ndarray:
    """Masks are set, other floats scaled."""
    if array.dtype != np.float32:
        return array
    if name.startswith("mask"):
        return array if mask is None else np.full_like(array, mask)
    return (array * np.float32(factor)).astype(np.float32)


def _commanded(
    network: Network, result: bisect_trt.Result, folder: Path, options: dict[str, Any]
) -> Iterator[str]:
    """The command line on the same files: its exit code, and no traceback."""
    onnx.save(network.model, folder / "m.onnx")
    words: list[object] = ["run", folder / "m.onnx", "--runner", "emulated", "--robust", "0"]
    for number, feed in enumerate(network.feeds):
        np.savez(folder / f"x{number}.npz", **feed)
        words += ["--input", folder / f"x{number}.npz"]
    words += ["--requirement", options["require"], "--repair", options["repair"]]
    ended = call(*words, "--weights", "nearest", "--out", folder / "command", limits=EIGHT)
    if ended.exit_code != result.exit_code:
        yield f"exit code {ended.exit_code} instead of {result.exit_code}: {ended.output[-200:]}"
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        yield f"it raises {ended.exception!r}"


def _differs(one: bisect_trt.Result, other: bisect_trt.Result) -> Iterator[str]:
    first, second = one.as_json(), other.as_json()
    for key in first.keys() - VOLATILE:
        if json.dumps(first[key], default=str) != json.dumps(second[key], default=str):
            yield f"{key} of run.json differs"


def _dearer(strict: bisect_trt.Result, loose: bisect_trt.Result) -> Iterator[str]:
    if not strict.passed:
        return
    if not loose.passed:
        yield "it is not met, the stricter one is"
        return
    costs = [
        float(r.choices.loc[r.choices["recommended"], "estimated_latency"].iloc[0])
        for r in (strict, loose)
    ]
    if costs[1] > costs[0] * (1 + 1e-9):
        yield f"{costs[1]:.6g} after {costs[0]:.6g}"


def naming(network: Network, result: bisect_trt.Result, tolerance: float) -> str:
    """Whether the run names what was planted: named, partly, missed, harmless or wrong."""
    harmful = [p for p in network.planted if p.cause]
    blamed = {c.name.value: set(c.layers) for c in result.causes}
    if result.cause is Cause.NONE:
        is_right = score(network, everything_reduced(network), tolerance) <= MARGIN
        return "harmless" if is_right else "missed"
    if not harmful:
        dead = set().union(*(p.layers for p in network.planted)) if network.planted else set()
        return "wrong" if dead & blamed.get("overflow", set()) else ""
    found = [
        p.cause in blamed and (not p.layers or bool(p.layers & blamed[p.cause])) for p in harmful
    ]
    if not all(found) and len(harmful) > 1:
        graph = Graph(load_model(network.model).proto)
        names = {layer.name for layer in graph.layers}
        alone = [to_typed(graph, PrecisionPlan("fp16", names - p.layers)) for p in harmful]
        counts = [score(network, model, tolerance) > 1.0 for model in alone]
        # Before or behind one fault the other may do no harm.
        if any(counts):
            found = [one for one, does_harm in zip(found, counts, strict=True) if does_harm]
    return "named" if all(found) else "partly" if any(found) else "missed"
