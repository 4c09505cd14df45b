"""Maps the entries of a list to the nodes of a model: mapped, widened or refused, none dropped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.imports.entries import By, Entry, Form, Listing, What
from bisect_trt.imports.matching import matched
from bisect_trt.model.graph import Graph
from bisect_trt.model.trt_names import Resolved, TrtNames, Wildcards

_PLAIN = re.compile(r"([\w/: -]*)(?:\.\*)?")
"""An expression that only says how a name begins."""

_NO_FLOAT = "is never reduced, so it is FP32 in every plan"


def entries(number: int) -> str:
    """``1 entry``, ``3 entries``."""
    return f"{number:,} {'entry' if number == 1 else 'entries'}"


class Status(StrEnum):
    """What became of an entry."""

    MAPPED = "mapped"
    WIDENED = "widened"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class MappedEntry:
    """An entry, what became of it, and the layers that it sets.

    ``said`` is why it is more than the entry says, or why it is refused.
    """

    entry: Entry
    status: Status
    layers: tuple[str, ...] = ()
    said: str = ""

    def as_json(self) -> dict[str, Any]:
        """The row for machines."""
        precision = self.entry.precision
        return {
            "entry": self.entry.text,
            "by": self.entry.by.value,
            "what": self.entry.what.value,
            "precision": None if precision is None else precision.value,
            "line": self.entry.line or None,
            "status": self.status.value,
            "layers": list(self.layers),
            "said": self.said,
        }


@dataclass(frozen=True)
class ImportedList:
    """A list as a plan for the layers of a model, with a row for each entry."""

    form: Form
    where: str
    plan: PrecisionPlan
    rows: tuple[MappedEntry, ...]
    notes: tuple[str, ...] = ()

    def with_note(self, note: str) -> ImportedList:
        """The same list with one more note."""
        return replace(self, notes=(*self.notes, note))

    def rows_of(self, status: Status) -> tuple[MappedEntry, ...]:
        """The rows with ``status``, in the list's order."""
        return tuple(row for row in self.rows if row.status is status)

    @property
    def sentence(self) -> str:
        """How many entries were mapped, widened and refused, and how many layers are in FP32."""
        count = Counter(row.status for row in self.rows)
        parts = ", ".join(f"{count[status]:,} {status.value}" for status in Status)
        kept = counted(len(self.plan.pinned), "layer")
        return f"{entries(len(self.rows))}: {parts}; {kept} in FP32"

    def as_json(self) -> dict[str, Any]:
        """The answer for machines."""
        count = Counter(row.status for row in self.rows)
        return {
            "form": self.form.value,
            "from": self.where,
            "base": self.plan.base.value,
            "pinned": sorted(self.plan.pinned),
            **{status.value: count[status] for status in Status},
            "entries": [row.as_json() for row in self.rows],
            "notes": list(self.notes),
        }


def map_listing(
    listing: Listing, names: TrtNames, graph: Graph, where: str, base: Precision | None = None
) -> ImportedList:
    """The plan that ``listing`` says for the layers of ``graph``.

    Args:
        listing: what was read.
        names: TensorRT's names for the nodes of the graph.
        graph: the model.
        where: the list's name in messages.
        base: the precision of the other layers; the list's own if None.
    """
    chosen = listing.base if base is None else base
    finder = _Finder(names, graph, listing.entries)
    layers = frozenset(layer.name for layer in graph.layers_at(chosen))
    # Precision decides; where only the type of outputs is said, that does.
    said_of: dict[What, dict[str, Precision]] = {What.PRECISION: {}, What.OUTPUT: {}}
    changed = dict[str, None]()
    rows = []
    for entry in listing.entries:
        row = _row(entry, finder.find(entry), layers, chosen)
        rows.append(row)
        if entry.precision is None:
            continue
        found = said_of[What.OUTPUT if entry.what is What.OUTPUT else What.PRECISION]
        for layer in row.layers:
            if found.get(layer, entry.precision) is not entry.precision and entry.by is By.NAME:
                changed[layer] = None
            found[layer] = entry.precision
    final = {**said_of[What.OUTPUT], **said_of[What.PRECISION]}
    pinned = frozenset(layer for layer, precision in final.items() if precision is Precision.FP32)
    outputs_only = pinned.difference(said_of[What.PRECISION])
    reduced = frozenset(
        layer
        for layer, precision in said_of[What.OUTPUT].items()
        if precision is Precision.FP32 and layer not in pinned
    )
    rows = [_with_outputs_said(row, outputs_only, reduced, chosen) for row in rows]
    return ImportedList(
        listing.form,
        where,
        PrecisionPlan(chosen, pinned),
        tuple(rows),
        (*listing.notes, *_notes(listing, tuple(changed), names)),
    )


def _notes(listing: Listing, changed: Sequence[str], names: TrtNames) -> Iterator[str]:
    """What is said of the mapping as a whole."""
    if changed and not listing.sequential:
        layers = counted(len(changed), "layer")
        yield f"{layers} named with two precisions: {some_of(changed)}; the last one counts"
    if names.network is None and any(
        entry.by in (By.NAME, By.WILDCARD, By.LAYERS) for entry in listing.entries
    ):
        yield (
            "layers are found by the parser's rule for names; with tensorrt-rtx-cu13 installed "
            "its parser is asked"
        )


def _with_outputs_said(
    row: MappedEntry, outputs_only: frozenset[str], reduced: frozenset[str], base: Precision
) -> MappedEntry:
    """``row`` with what a plan makes of outputs in FP32.

    It is widened where a layer of ``outputs_only`` is kept whole, and refused where all its layers
    are in ``reduced``, which compute in ``base``.
    """
    if row.entry.precision is not Precision.FP32 or row.entry.what is not What.OUTPUT:
        return row
    if lost := [layer for layer in row.layers if layer in reduced]:
        said = f"computed in {base.value.upper()}; a plan has one type a layer"
        if len(lost) == len(row.layers):
            return MappedEntry(row.entry, Status.REFUSED, said=said)
        said = f"{counted(len(lost), 'layer')} of it {said}"
        return replace(row, status=Status.WIDENED, said=said)
    if row.status is not Status.MAPPED or outputs_only.isdisjoint(row.layers):
        return row
    said = "only its output was FP32; a plan keeps the whole layer"
    return MappedEntry(row.entry, Status.WIDENED, row.layers, said)


def _row(entry: Entry, found: Resolved, layers: frozenset[str], base: Precision) -> MappedEntry:
    """What became of ``entry``, which stands for the nodes ``found``."""
    if entry.precision is None:
        return MappedEntry(entry, Status.REFUSED, said=entry.refused)
    if entry.precision not in (Precision.FP32, base):
        said = f"{entry.precision.value} beside {base.value}; a plan has one reduced precision"
        return MappedEntry(entry, Status.REFUSED, said=said)
    if not found.nodes:
        return MappedEntry(entry, Status.REFUSED, said=found.said)
    kept = tuple(name for name in found.nodes if name in layers)
    said = found.said or entry.said
    if not kept:
        return MappedEntry(entry, Status.MAPPED, said=_NO_FLOAT)
    return MappedEntry(entry, Status.WIDENED if said else Status.MAPPED, kept, said)


class _Finder:
    """Finds the nodes that entries stand for."""

    def __init__(self, names: TrtNames, graph: Graph, given: Sequence[Entry]) -> None:
        self._names, self._graph, self._given = names, graph, given
        self._known: dict[str, Resolved] = {}
        self._by_node: dict[str, list[str]] = {}
        self._by_operator: dict[str, list[str]] = {}
        for node, name in graph.named_nodes():
            if node.op_type != "Constant":
                self._by_node.setdefault(node.name, []).append(name)
            self._by_operator.setdefault(node.op_type, []).append(name)

    @cached_property
    def _prefixes(self) -> Wildcards:
        return Wildcards(self._by_node)

    @cached_property
    def _matched(self) -> Mapping[str, tuple[str, ...] | str]:
        """The names that the expressions match, all asked at once: a process answers."""
        texts = [entry.text for entry in self._given if entry.by is By.NODE_REGEX]
        asked = [text for text in dict.fromkeys(texts) if not _PLAIN.fullmatch(text)]
        return matched(asked, tuple(self._by_node))

    @cached_property
    def _wildcards(self) -> Wildcards:
        return Wildcards(self._names.names())

    def find(self, entry: Entry) -> Resolved:
        """The nodes of ``entry``; none where it cannot be read."""
        if entry.precision is None:
            return Resolved(())
        match entry.by:
            case By.NAME:
                return self._resolve(entry.text)
            case By.WILDCARD:
                more = "; of its * only the first counts" if entry.text.count("*") > 1 else ""
                return self._all(self._wildcards.matches(entry.text), f"matches no layer{more}")
            case By.LAYERS:
                return self._of_layers(entry.layers)
            case By.NODE:
                return self._of_node(entry.text)
            case By.NODE_REGEX:
                return self._of_expression(entry.text)
            case By.OPERATOR:
                nodes = self._by_operator.get(entry.text, ())
                return Resolved(tuple(nodes), "" if nodes else "the model has no such operator")

    def _resolve(self, name: str) -> Resolved:
        if name not in self._known:
            self._known[name] = self._names.resolve(name)
        return self._known[name]

    def _all(self, names: Sequence[str], otherwise: str) -> Resolved:
        """The nodes of all layers called ``names``; helpers among them compute nothing."""
        found = [self._resolve(name) for name in names]
        nodes = dict.fromkeys(node for one in found for node in one.nodes)
        if not nodes:
            reason = f"matches {counted(len(names), 'layer')}, none of which computes anything"
            return Resolved((), reason if names else otherwise)
        wider = [one.said for one in found if one.nodes and one.said]
        return Resolved(tuple(nodes), wider[0] if wider else "")

    def _of_layers(self, places: Sequence[int]) -> Resolved:
        """The nodes of layers of the network; by the parser's rule for names, of nodes."""
        network = self._names.network
        if network is None:
            nodes = tuple(self._graph.names[place] for place in places)
        else:
            found = (self._names.nodes_of_layer(network.layers[place]) for place in places)
            nodes = tuple(dict.fromkeys(name for names in found for name in names))
        many = counted(len(places), "layer")
        return Resolved(nodes, "" if nodes else f"{many}, none of which computes anything")

    def _of_node(self, name: str) -> Resolved:
        nodes = tuple(self._by_node.get(name, ())) if name else ()
        if not nodes:
            found = self._resolve(name)  # also a layer's name
            said = "a layer's name, not a node's" if found.nodes else "no node has this name"
            return Resolved(found.nodes, "" if found.nodes == (name,) else said)
        return Resolved(nodes, f"{len(nodes)} nodes have this name" if len(nodes) > 1 else "")

    def _of_expression(self, text: str) -> Resolved:
        """The nodes that a regular expression matches from the start of their name."""
        if (plain := _PLAIN.fullmatch(text)) is not None:
            names = self._prefixes.matches(f"{plain.group(1)}*")
        else:
            found = self._matched[text]
            if isinstance(found, str):
                return Resolved((), found)
            names = found
        nodes = tuple(node for name in names for node in self._by_node[name])
        return Resolved(nodes, "" if nodes else "matches no node")
