"""Recognises the form of a list by its content, reads it and maps it to a model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from bisect_trt.base.errors import BadInputError, one_line
from bisect_trt.base.plan import Precision
from bisect_trt.imports.block_lists import (
    calls_in,
    has_autocast,
    has_block_list,
    lists_in,
    read_call_lists,
    read_json,
    read_json_lists,
    read_option_lists,
)
from bisect_trt.imports.entries import Form, Listing
from bisect_trt.imports.mapping import ImportedList, Status, entries, map_listing
from bisect_trt.imports.mixed import import_mixed
from bisect_trt.imports.replay import is_iteration, is_replay, read_replay
from bisect_trt.imports.script import parsed_script, read_script, sets_layers
from bisect_trt.imports.trtexec import has_trtexec, read_trtexec, without_comments
from bisect_trt.model.graph import Graph
from bisect_trt.model.trt_names import Network, TrtNames

MOST_BYTES = 64 << 20
"""The largest text that is read as a list."""

_MODELS = (".onnx", ".pb", ".onnxtxt", ".textproto")
_SHOWN = 60

Parser = Callable[[], tuple[Network | None, str]]
"""Asks TensorRT's parser for the network of the model; None and why where it cannot be."""


def import_list(
    source: str,
    graph: Graph,
    of: str,
    *,
    parser: Parser,
    form: Form | None = None,
    base: Precision | None = None,
) -> ImportedList:
    """The plan that a list says for the layers of ``graph``.

    Args:
        source: a file, or options of trtexec or AutoCast as text.
        graph: the model in FP32.
        of: its name in messages.
        parser: called once, where the list needs TensorRT's names.
        form: the form of the list; found by its content if None.
        base: the precision of the layers that the list does not name; the list's own if None.

    Raises:
        BadInputError: the file cannot be read, its form is unknown or ambiguous, or no entry of it
            is a layer of the model.
    """
    path = Path(source)
    is_file = _is_file(path)
    where = str(path) if is_file else "the given options"
    if is_file and (form is Form.MIXED or (form is None and path.suffix in _MODELS)):
        return _checked(import_mixed(path, graph, of), of)
    text = _text_of(path) if is_file else source
    if form is Form.MIXED:
        raise BadInputError(f"{where}: --form mixed needs an ONNX file")
    if form is None:
        form = _form_of(text, where)
    network, reason = None, ""
    if form in (Form.TRTEXEC, Form.SCRIPT, Form.REPLAY, Form.REPLAY_REVERSE):
        network, reason = parser()
    listing = _listing(form, text, where, graph, network)
    names = TrtNames(graph, network)
    found = map_listing(listing, names, graph, where, base)
    return _checked(found, of, reason if network is None else "")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # options are too long for a name
        return False


def _text_of(path: Path) -> str:
    try:
        if os.stat(path).st_size > MOST_BYTES:
            raise BadInputError(f"{path}: larger than {MOST_BYTES >> 20} MiB; give a list")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error, 80)})") from error


def _form_of(text: str, where: str) -> Form:
    """The form of ``text``, by what is in it."""
    data = read_json(text) if text.lstrip()[:1] in ("{", "[") else None
    if data is not None:
        return _form_of_json(data, where)
    found: set[Form] = set()
    tree = parsed_script(text)
    if tree is not None:
        found |= calls_in(tree)
        if sets_layers(tree):
            found.add(Form.SCRIPT)
    if has_trtexec(text):
        found.add(Form.TRTEXEC)
    options = without_comments(text)
    if has_autocast(options):
        found.add(Form.AUTOCAST)
    if has_block_list(options):
        found.add(Form.BLOCK_LIST)
    if len(found) > 1:
        forms = " or ".join(sorted(form.value for form in found))
        raise BadInputError(f"{where}: may be {forms}; say which with --form")
    if not found:
        raise BadInputError(_unknown(text, where))
    return found.pop()


def holds_plan(path: Path) -> bool:
    """Whether the file at ``path`` is a plan.json, whatever its name: JSON, but no other's list.

    Raises:
        BadInputError: it cannot be read.
    """
    if path.suffix in _MODELS:
        return False
    text = _text_of(path)
    if not text.lstrip().startswith("{"):
        return path.suffix.casefold() == ".json"  # a broken one, as which it is refused
    data = read_json(text)
    return not is_iteration(data) and _list_in(data) is None


def _list_in(data: object) -> Form | None:
    return Form.REPLAY if is_replay(data) else lists_in(data)


def _form_of_json(data: object, where: str) -> Form:
    if is_iteration(data):
        raise BadInputError(
            f"{where}: says only the number of an iteration; give polygraphy_debug_replay.json"
        )
    found = _list_in(data)
    if found is None:
        if isinstance(data, dict) and {"base", "pinned"} <= data.keys():
            raise BadInputError(
                f"{where}: is a plan already; give it to --start-from or verify --plan"
            )
        keys = ", ".join(sorted(map(str, data))[:4]) if isinstance(data, dict) else "a list"
        raise BadInputError(f"{where}: JSON with {keys or 'nothing'}, which is no list of layers")
    return found


def _unknown(text: str, where: str) -> str:
    known = "trtexec, a build script, a replay, block lists or a mixed model"
    if where == "the given options":
        shown = text[:_SHOWN] + ("..." if len(text) > _SHOWN else "")
        return f"{shown!r}: neither a file nor options with a list of layers ({known})"
    return f"{where}: no list of layers was found in it; it must be of {known}"


def _listing(form: Form, text: str, where: str, graph: Graph, network: Network | None) -> Listing:
    """The entries of ``text`` in ``form``."""
    if form is Form.TRTEXEC:
        return read_trtexec(text, where)
    if form is Form.SCRIPT:
        return read_script(text, where, graph, network)
    data = read_json(text)
    if form in (Form.REPLAY, Form.REPLAY_REVERSE):
        if not is_replay(data):
            raise BadInputError(f"{where}: no replay of polygraphy debug precision")
        return read_replay(data, where, network, form)
    if isinstance(data, dict):
        return read_json_lists(data, form, where)
    options = without_comments(text)
    has_options = has_autocast(options) if form is Form.AUTOCAST else has_block_list(options)
    if has_options:
        return read_option_lists(options, form, where)
    operators = {node.op_type for node in graph.proto.graph.node}
    return read_call_lists(text, form, where, operators)


def _checked(found: ImportedList, of: str, reason: str = "") -> ImportedList:
    """``found``, unless no entry of it is a layer of the model."""
    if any(row.status is not Status.REFUSED for row in found.rows):
        return found
    if not found.rows and found.form is Form.MIXED:
        return found  # all reduced
    first = found.rows[0] if found.rows else None
    example = f", such as {first.entry.text[:_SHOWN]!r}: {first.said}" if first else ""
    more = f" ({reason})" if reason else ""
    raise BadInputError(
        f"{found.where}: none of its {entries(len(found.rows))} is a layer of {of}{example}{more}"
    )


def plan_json(found: ImportedList, model_sha256: str) -> str:
    """plan.json of an imported list: the plan, the model's SHA-256 and what each entry became."""
    data = json.loads(found.plan.to_json())
    count = {status.value: len(found.rows_of(status)) for status in Status}
    data["model_sha256"] = model_sha256
    data["imported"] = {"form": found.form.value, "from": found.where, **count}
    return json.dumps(data, indent=2, sort_keys=True)
