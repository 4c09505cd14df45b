"""Requirements as people write them, and the user's own metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from bisect_trt.base.errors import BadInputError
from bisect_trt.metrics.decisions import BOX_MATCH, EQUAL, BoxMatch, is_decision, read_box_match
from bisect_trt.metrics.requirements import (
    METRICS,
    WORST,
    CollectiveMetric,
    Requirement,
    Requirements,
    TaskMetric,
    is_aggregate,
)
from bisect_trt.metrics.user_metric import UserMetric

DEFAULT_REQUIREMENTS = ("snr_db>=40",)
"""The error of each float output, or of each of its scales, is 1 % of its RMS at most."""

SAME = f"{EQUAL}>=1"
"""What integers and truth values are held to where nothing else is asked of them."""

_AT_LEAST = ("cosine", "snr_db", "psnr_db")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_OUTPUT, _AGGREGATE = r"(?:(?P<output>.+):)?", r"(?:@(?P<aggregate>[\w.]+))?"
_CONDITION = re.compile(
    rf"^{_OUTPUT}(?P<metric>[A-Za-z_]\w*){_AGGREGATE}\s*(?P<op><=|>=)\s*(?P<value>{_NUMBER})$"
)
_PART = rf"(?P<{{0}}>[ar]tol)\s*=\s*(?P<{{0}}_value>{_NUMBER})"
_TOLERANCE = re.compile(
    rf"^{_OUTPUT}{_PART.format('first')}(?:\s*,\s*{_PART.format('second')})?{_AGGREGATE}$"
)
_BOXES = re.compile(rf"^{BOX_MATCH}\((?P<arguments>.+)\){_AGGREGATE}\s*>=\s*(?P<value>{_NUMBER})$")
ALL = "@all"


def parse_requirements(
    texts: Sequence[str],
    outputs: Sequence[str],
    metrics: Mapping[str, TaskMetric] | None = None,
    collective: Mapping[str, CollectiveMetric] | None = None,
    whole: Collection[str] = (),
) -> Requirements:
    """Read conditions such as ``max_abs<=1e-2``, ``logits:cosine@mean>=0.999``,
    ``boxes[:,4:]:max_abs<=0.05`` or ``atol=1e-3,rtol=1e-2@p99``.

    Raises:
        BadInputError: an unknown form, metric, aggregate or output, or a limit that nothing can
            meet.
    """
    singles, of_all = dict(metrics or {}), dict(collective or {})
    own = (*singles, *of_all)
    if any(not isinstance(text, str) for text in texts):
        raise BadInputError(
            "--requirement: a function is no condition; pass it as a metric, and a condition on it"
        )
    floats = [name for name in outputs if name not in whole]
    usual = DEFAULT_REQUIREMENTS if floats or not outputs else ()
    items = tuple(_parse(text.strip(), outputs, own) for text in (texts or usual))
    unscaled = next((item for item in items if item.by_scale and outputs and not floats), None)
    if unscaled is not None:
        raise BadInputError(
            f"--requirement {unscaled.text!r}: is of float outputs, and the model has none; ask "
            f"for {outputs[0]}:{SAME}"
        )
    usual_ones = not texts or any(i.by_scale for i in items)
    if usual_ones and all(i.by_scale for i in items if i.output is None):
        seen = {item.output for item in items}
        items += tuple(_read(f"{n}:{SAME}", own) for n in outputs if n in whole and n not in seen)
    for item in items:
        if item.metric.startswith(BOX_MATCH):
            singles[item.metric] = _box_match(item, outputs)
    unused = sorted(set(own) - {item.metric for item in items})
    if unused:
        raise BadInputError(
            f"--metric {unused[0]}: no --requirement uses it; add one such as {unused[0]}<=0.1"
        )
    for item in items:
        if item.metric in of_all and item.aggregate != WORST:
            raise BadInputError(
                f"--requirement {item.text!r}: {item.metric} sees all inputs at once; leave out "
                f"@{item.aggregate}"
            )
    return Requirements(items, singles, of_all)


def _box_match(item: Requirement, outputs: Sequence[str]) -> BoxMatch:
    match = read_box_match(item.text, item.metric[len(BOX_MATCH) + 1 : -1])
    absent = next((name for name in match.outputs if name not in outputs), None)
    if absent is not None:
        raise BadInputError(
            f"--requirement {item.text!r}: the model has no output {absent!r}; it has "
            f"{', '.join(outputs)}"
        )
    return match


def check_requirements(texts: Sequence[str], metrics: Sequence[str]) -> None:
    """Refuse conditions that no model could be asked.

    Raises:
        BadInputError: names the condition.
    """
    own = [metric.removesuffix(ALL).rpartition(":")[2] for metric in metrics]
    for text in texts:
        _read(text.strip(), own)


def _parse(text: str, outputs: Sequence[str], own: Sequence[str]) -> Requirement:
    item = _read(text, own)
    if item.output is not None and item.output not in outputs:
        item = _sliced(item)
    if item.output is not None and item.output not in outputs:
        raise BadInputError(
            f"--requirement {text!r}: the model has no output {item.output!r}; it has "
            f"{', '.join(outputs)}"
        )
    return item


_SLICE = re.compile(r"^(?P<output>.+)\[(?P<part>[-\d:, ]+)\]$")
_ENTRY = re.compile(r"^(-?\d+)?(?:(:)(-?\d+)?(?::(-?\d+)?)?)?$")


def _sliced(item: Requirement) -> Requirement:
    """``item`` with the slice that its output's name ends with, if there is one.

    Raises:
        BadInputError: it is no slice.
    """
    found = _SLICE.match(item.output or "")
    if found is None:
        return item
    part: list[tuple[int | None, int | None, int | None]] = []
    for text in found["part"].split(","):
        entry = _ENTRY.match(text.strip())
        if entry is None or not text.strip() or entry[4] == "0":
            raise BadInputError(
                f"--requirement {item.text!r}: {text.strip()!r} is no index or slice; write one an "
                "axis, such as [:,4:] or [0,:,2]"
            )
        first, colon, end, step = entry.groups()
        if colon:
            begin, stop, stride = (int(n) if n else None for n in (first, end, step))
            part.append((begin, stop, stride))
        else:  # the axis stays, of size 1
            part.append((int(first), int(first) + 1 or None, None))
    return replace(item, output=found["output"], part=tuple(part))


def _read(text: str, own: Sequence[str]) -> Requirement:
    tolerance = _TOLERANCE.match(text)
    condition = _CONDITION.match(text)
    boxes = _BOXES.match(text)
    if boxes is not None:
        read_box_match(text, boxes["arguments"])  # refused here, whatever the model is
        match = f"{BOX_MATCH}({boxes['arguments']})"
        aggregate = boxes["aggregate"] or WORST
        item = Requirement(text, match, float(boxes["value"]), True, aggregate=aggregate)
        _check_metric(item, own)
    elif tolerance is not None:
        item = _tolerance(text, tolerance)
    elif condition is not None:
        item = Requirement(
            text,
            condition["metric"],
            float(condition["value"]),
            at_least=condition["op"] == ">=",
            output=condition["output"],
            aggregate=condition["aggregate"] or WORST,
            own=condition["metric"] in own,
        )
        _check_metric(item, own)
    else:
        metric = text.rpartition(":")[2].partition("@")[0]
        named = metric in (*METRICS, *own) or is_decision(metric)
        if named and not set(metric) & set("<>="):
            raise BadInputError(
                f"--requirement {text!r}: has no bound; quote it, for the shell takes < and > for "
                f"itself: --requirement '{text}>=0.99'"
            )
        raise BadInputError(
            f"--requirement {text!r}: not understood; write METRIC<=VALUE, OUTPUT:METRIC>=VALUE, "
            "METRIC@mean<=VALUE, atol=A,rtol=R (atol=A,rtol=R@p95) or "
            f"{BOX_MATCH}(BOXES,SCORES)>=VALUE"
        )
    if not (math.isfinite(item.limit) and math.isfinite(item.relative)):
        raise BadInputError(f"--requirement {text!r}: its number is too large for any; mend it")
    if not is_aggregate(item.aggregate):
        raise BadInputError(
            f"--requirement {text!r}: unknown aggregate @{item.aggregate}; write @worst, @mean, "
            "@median or a percentile such as @p95"
            + "; a metric of all inputs is marked where it is named, --metric MODULE:FUNCTION@all"
            * (item.aggregate == "all")
        )
    return item


def _tolerance(text: str, found: re.Match[str]) -> Requirement:
    parts = {found["first"]: float(found["first_value"])}
    if found["second"] == found["first"]:
        raise BadInputError(f"--requirement {text!r}: {found['first']} is there twice")
    if found["second"] is not None:
        parts[found["second"]] = float(found["second_value"])
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
    decides = is_decision(item.metric)
    if item.metric in own:
        return
    if item.metric not in METRICS and not decides:
        known = (*METRICS, "top1", "top5", "argmax", EQUAL, "mask_iou", BOX_MATCH, *own)
        raise BadInputError(
            f"--requirement {item.text!r}: unknown metric {item.metric!r}; known are "
            f"{', '.join(known)}, and those that --metric MODULE:FUNCTION names"
        )
    larger = decides or item.metric in _AT_LEAST
    if item.at_least != larger:
        right = ">=" if larger else "<="
        raise BadInputError(f"--requirement {item.text!r}: {item.metric} is bounded with {right}")
    if item.limit > 1.0 and (decides or item.metric == "cosine"):
        what = "a share" if decides else "a cosine"
        raise BadInputError(f"--requirement {item.text!r}: {what} is at most 1")
    least = 0.0 if decides else -1.0 if item.metric == "cosine" else -math.inf
    if item.limit <= least:
        raise BadInputError(
            f"--requirement {item.text!r}: every plan meets it, {item.metric} is {least:g} or more"
        )
    if not larger and item.limit < 0.0:
        raise BadInputError(f"--requirement {item.text!r}: an error is never negative")


def load_metrics(
    metrics: Sequence[str | Callable[..., float]],
) -> tuple[dict[str, UserMetric], dict[str, UserMetric]]:
    """The user's metrics for one input, and those for all inputs at once (``@all``), by name: that
    of the function.

    Raises:
        BadInputError: names what cannot be imported, or is no function.
    """
    singles: dict[str, UserMetric] = {}
    of_all: dict[str, UserMetric] = {}
    for metric in metrics:
        told_all = isinstance(metric, str) and metric.endswith(ALL)
        found = UserMetric(metric.removesuffix(ALL) if isinstance(metric, str) else metric)
        if found.name in singles or found.name in of_all:
            raise BadInputError(f"--metric {found.name}: two metrics have this name; rename one")
        (of_all if told_all else singles)[found.name] = found
    return singles, of_all
