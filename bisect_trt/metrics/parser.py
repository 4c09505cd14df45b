"""Parses requirements as users write them, and loads their metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from threading import Lock

from bisect_trt.base.display import did_you_mean
from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.decisions import (
    BOX_LAYOUTS,
    BOX_MATCH,
    EQUAL,
    BoxMatch,
    Slices,
    is_decision,
)
from bisect_trt.metrics.errors import LARGER_IS_BETTER
from bisect_trt.metrics.requirements import (
    METRICS,
    WORST,
    CollectiveMetric,
    Requirement,
    Requirements,
    TaskMetric,
    is_aggregate,
)
from bisect_trt.metrics.time_limits import FORMS
from bisect_trt.metrics.user_metric import UserMetric

DEFAULT_REQUIREMENTS = ("snr_db>=40",)
"""The RMS error of each float output, or of each of its scales, is at most 1 % of its RMS."""

SAME = f"{EQUAL}>=1"
"""The requirement on integers and Booleans without one of their own."""

ALL = "@all"

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_AGGREGATE = r"(?:@(?P<aggregate>[\w.]+))?"
_CONDITION = re.compile(
    rf"^(?:(?P<output>.+):)?(?P<metric>[A-Za-z_]\w*){_AGGREGATE}"
    rf"\s*(?P<op><=|>=)\s*(?P<value>{_NUMBER})$"
)
_BOXES = re.compile(
    rf"^(?P<metric>{BOX_MATCH}\(.+\)){_AGGREGATE}\s*(?P<op>>=)\s*(?P<value>{_NUMBER})$"
)
_TOLERANCE = re.compile(
    rf"^(?:(?P<output>.+):)?(?P<parts>[ar]tol\s*=\s*{_NUMBER}"
    rf"(?:\s*,\s*[ar]tol\s*=\s*{_NUMBER})?){_AGGREGATE}$"
)
_NEARLY = re.compile(rf"^(?P<metric>[^<>=≤≥]+?)\s*(?:=<|=>|==?|<|>|≤|≥)\s*(?P<value>{_NUMBER})$")
"""A condition with a wrong sign, such as ``max_abs<1e-2``."""

_SLICED = re.compile(r"^(?P<output>.+)\[(?P<part>[-\d:, ]+)\]$")


def parse_requirements(
    texts: Sequence[str],
    outputs: Sequence[str],
    metrics: Mapping[str, TaskMetric] | None = None,
    collective: Mapping[str, CollectiveMetric] | None = None,
    whole: Collection[str] = (),
) -> Requirements:
    """Parse conditions such as ``boxes[:,4:]:cosine@mean>=0.999`` or ``atol=1e-3,rtol=1e-2``.

    ``whole`` are the outputs that are not floats.

    Raises:
        BadInputError: an unknown form, metric, aggregate or output, or a bound that every plan
            meets or none.
    """
    singles, of_all = dict(metrics or {}), dict(collective or {})
    own = (*singles, *of_all)
    if any(not isinstance(text, str) for text in texts):
        raise BadInputError(
            "--requirement: a function is no condition; pass it as a metric, and a condition on it"
        )
    items = _with_defaults(texts, outputs, whole, own)
    for item in items:
        if item.metric.startswith(BOX_MATCH):
            match = _read_box_match(item)
            _check_outputs(item.text, match.outputs, outputs)
            singles[item.metric] = match
        if item.metric in of_all and item.aggregate != WORST:
            raise BadInputError(
                f"--requirement {item.text!r}: {item.metric} sees all inputs at once; leave out "
                f"@{item.aggregate}"
            )
    unused = sorted(set(own) - {item.metric for item in items})
    if unused:
        raise BadInputError(
            f"--metric {unused[0]}: no --requirement uses it; add one such as {unused[0]}<=0.1"
        )
    return Requirements(items, singles, of_all)


def _with_defaults(
    texts: Sequence[str], outputs: Sequence[str], whole: Collection[str], own: Sequence[str]
) -> tuple[Requirement, ...]:
    """The conditions that the user wrote, and the usual ones on outputs without a condition."""
    floats = [name for name in outputs if name not in whole]
    defaults = DEFAULT_REQUIREMENTS if floats or not outputs else ()
    items = tuple(_parse(text.strip(), outputs, own) for text in (texts or defaults))
    unscaled = next((item for item in items if item.by_scale and outputs and not floats), None)
    if unscaled is not None:
        raise BadInputError(
            f"--requirement {unscaled.text!r}: is of float outputs, and the model has none; ask "
            f"for {outputs[0]}:{SAME}"
        )
    has_default = not texts or any(i.by_scale for i in items)
    if has_default and all(i.by_scale for i in items if i.output is None):
        named = {item.output for item in items}
        items += tuple(_read(f"{n}:{SAME}", own) for n in outputs if n in whole and n not in named)
    return items


def check_requirements(texts: Sequence[str], metrics: Sequence[str]) -> None:
    """Refuse conditions that are wrong for every model."""
    own = [metric.removesuffix(ALL).rpartition(":")[2] for metric in metrics]
    for text in texts:
        _read(text.strip(), own)


def parse_known(text: str) -> Requirement | None:
    """Parses a condition without its model; None for one on a user's metric."""
    try:
        return _read(text, [])
    except BadInputError:
        return None


def _parse(text: str, outputs: Sequence[str], own: Sequence[str]) -> Requirement:
    item = _read(text, own)
    if item.output is None:
        return item
    sliced = _SLICED.match(item.output)
    if item.output not in outputs and sliced is not None:
        # An index keeps its axis, of size 1.
        entries = [
            slice(entry, entry + 1 or None) if isinstance(entry, int) else entry
            for entry in _read_slices(text, sliced["part"])
        ]
        part = tuple((entry.start, entry.stop, entry.step) for entry in entries)
        item = replace(item, output=sliced["output"], part=part)
    _check_outputs(text, [item.output or ""], outputs)
    return item


def _check_outputs(text: str, named: Sequence[str], outputs: Sequence[str]) -> None:
    absent = next((name for name in named if name not in outputs), None)
    if absent is not None:
        raise BadInputError(
            f"--requirement {text!r}: the model has no output {absent!r}; it has "
            f"{', '.join(outputs)}"
        )


def _read_slices(text: str, part: str) -> Slices:
    """The slices and indices between the brackets of ``output[:,4:]``."""
    slices: list[slice | int] = []
    for entry in part.split(","):
        numbers = entry.strip().split(":")
        try:
            bounds = [int(number) if number else None for number in numbers]
        except ValueError:
            bounds = []
        if not 1 <= len(bounds) <= 3 or bounds == [None] or bounds[2:] == [0]:
            raise BadInputError(
                f"--requirement {text!r}: {entry.strip()!r} is no index or slice; write one an "
                "axis, such as [:,4:] or [0,:,2]"
            )
        first = bounds[0]
        slices.append(slice(*bounds) if len(bounds) > 1 or first is None else first)
    return tuple(slices)


def _read_box_match(item: Requirement) -> BoxMatch:
    """The metric that ``box_match(boxes,scores[,classes],iou=0.5)`` describes."""
    parts: list[tuple[str, Slices]] = []
    options = {"iou": "0.5", "layout": "xyxy"}
    for entry in re.split(r",(?![^\[]*\])", item.metric[len(BOX_MATCH) + 1 : -1]):
        name, equals, value = entry.strip().partition("=")
        sliced = _SLICED.match(entry.strip())
        if equals and name in options:
            options[name] = value.strip()
        elif sliced is not None:
            parts.append((sliced["output"], _read_slices(item.text, sliced["part"])))
        else:
            parts.append((entry.strip(), ()))
    where, layout = f"--requirement {item.text!r}", options["layout"]
    try:
        iou = float(options["iou"])
    except ValueError:
        iou = 0.0
    if not 0.0 < iou <= 1.0:
        raise BadInputError(f"{where}: iou is a number above 0 and at most 1")
    if layout not in BOX_LAYOUTS:
        raise BadInputError(
            f"{where}: unknown layout {layout!r}; known are {', '.join(BOX_LAYOUTS)}"
        )
    if len(parts) not in (2, 3):
        raise BadInputError(
            f"{where}: give the outputs of boxes and scores, and of classes if there are any: "
            f"{BOX_MATCH}(boxes,scores,classes,iou=0.5,layout=xyxy)>=0.99"
        )
    return BoxMatch(parts[0], parts[1], parts[2] if len(parts) > 2 else None, iou, layout)


def _read(text: str, own: Sequence[str]) -> Requirement:
    """One condition; refuses what is wrong for every model."""
    where = f"--requirement {text!r}"
    tolerance = _TOLERANCE.match(text)
    condition = _BOXES.match(text) or _CONDITION.match(text)
    if tolerance is not None:
        item = _tolerance(text, tolerance)
    elif condition is not None:
        named = condition.groupdict()
        item = Requirement(
            text,
            named["metric"],
            float(named["value"]),
            at_least=named["op"] == ">=",
            output=named.get("output"),
            aggregate=named["aggregate"] or WORST,
            own=named["metric"] in own,
        )
        _check_metric(item, own)
    else:
        raise BadInputError(f"{where}: {_fault(text, own)}")
    if not (math.isfinite(item.limit) and math.isfinite(item.relative)):
        raise BadInputError(f"{where}: its number is too large for any; mend it")
    if not is_aggregate(item.aggregate):
        hint = "; a metric of all inputs is marked where it is named, --metric MODULE:FUNCTION@all"
        raise BadInputError(
            f"{where}: unknown aggregate @{item.aggregate}; write @worst, @mean, @median or a "
            f"percentile such as @p95{hint if item.aggregate == 'all' else ''}"
        )
    return item


def _fault(text: str, own: Sequence[str]) -> str:
    """What is wrong with a condition that has no known form, and what to write."""
    nearly = _NEARLY.match(text)
    named = nearly["metric"] if nearly is not None else text
    metric = named.rpartition(":")[2].partition("@")[0]
    boxes = nearly is not None and metric.startswith(BOX_MATCH)
    known = metric in (*METRICS, *own) or (is_decision(metric) and not boxes)
    if known and not set(metric) & set("<>="):
        larger = is_decision(metric) or metric in LARGER_IS_BETTER
        sign = ">=" if larger else "<="
        if nearly is not None:
            return (
                f"bounds are written with <= or >=: --requirement '{named}{sign}{nearly['value']}'"
            )
        value = "40" if metric.endswith("_db") else "0.99" if larger else "1e-2"
        return (
            "has no bound; quote it, or the shell takes < and > for itself, and writes to a file "
            f"such as '={value}': --requirement '{named}{sign}{value}'"
        )
    return (
        "not understood; write METRIC<=VALUE, OUTPUT:METRIC>=VALUE, METRIC@mean<=VALUE, "
        f"atol=A,rtol=R (atol=A,rtol=R@p95) or {BOX_MATCH}(BOXES,SCORES)>=VALUE"
    )


def _tolerance(text: str, found: re.Match[str]) -> Requirement:
    parts: dict[str, float] = {}
    for part in found["parts"].split(","):
        name, _, value = part.partition("=")
        if name.strip() in parts:
            raise BadInputError(f"--requirement {text!r}: {name.strip()} is there twice")
        parts[name.strip()] = float(value)
    absolute, relative = parts.get("atol", 0.0), parts.get("rtol", 0.0)
    if absolute < 0 or relative < 0 or absolute + relative == 0:
        raise BadInputError(f"--requirement {text!r}: tolerances must be positive")
    return Requirement(
        text,
        "atol",
        absolute,
        relative=relative,
        output=found["output"],
        aggregate=found["aggregate"] or WORST,
    )


def _check_metric(item: Requirement, own: Sequence[str]) -> None:
    """Refuse an unknown metric, or a bound that every plan meets or none."""
    if item.own:
        return
    where, decides = f"--requirement {item.text!r}", is_decision(item.metric)
    if item.metric in FORMS:
        raise BadInputError(
            f"{where}: a time limit, not a metric; write it as hold in bisect.toml, or as --hold "
            "of gate and verify"
        )
    if item.metric in ("atol", "rtol"):
        raise BadInputError(f"{where}: write atol=A,rtol=R, such as {item.metric}={item.limit:g}")
    if item.metric not in METRICS and not decides:
        known = (*METRICS, "top1", "top5", "argmax", EQUAL, "mask_iou", BOX_MATCH, *own)
        raise BadInputError(
            f"{where}: unknown metric {item.metric!r}; known are {', '.join(known)}, and those "
            f"that --metric MODULE:FUNCTION names{did_you_mean(item.metric, known)}"
        )
    if item.metric.startswith(BOX_MATCH):
        _read_box_match(item)
    larger = decides or item.metric in LARGER_IS_BETTER
    if item.at_least != larger:
        right = ">=" if larger else "<="
        raise BadInputError(f"{where}: {item.metric} is bounded with {right}")
    if item.limit > 1.0 and (decides or item.metric == "cosine"):
        raise BadInputError(f"{where}: {'a share' if decides else 'a cosine'} is at most 1")
    least = 0.0 if decides else -1.0 if item.metric == "cosine" else -math.inf
    if item.limit <= least:
        raise BadInputError(f"{where}: every plan meets it, {item.metric} is {least:g} or more")
    if not larger and item.limit < 0.0:
        raise BadInputError(f"{where}: an error is never negative")


def load_metrics(
    metrics: Sequence[str | Callable[..., float]],
) -> tuple[dict[str, UserMetric], dict[str, UserMetric]]:
    """The user's metrics by name: for one input, and for all inputs at once (``@all``)."""
    singles: dict[str, UserMetric] = {}
    of_all: dict[str, UserMetric] = {}
    lock = Lock()  # plans may be judged on several threads
    for metric in metrics:
        sees_all = isinstance(metric, str) and metric.endswith(ALL)
        found = UserMetric(metric.removesuffix(ALL) if isinstance(metric, str) else metric, lock)
        if found.name in singles or found.name in of_all:
            raise BadInputError(f"--metric {found.name}: two metrics have this name; rename one")
        (of_all if sees_all else singles)[found.name] = found
    return singles, of_all
