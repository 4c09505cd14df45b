"""Reads the lists of converters: AutoCast's, onnxconverter-common's and ONNX Runtime's."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.imports.calls import CallReader, DefaultOperator, GivenCall
from bisect_trt.imports.changes import called_name, source_of
from bisect_trt.imports.entries import By, Entry, Form, Listing, What, nothing_in, precision_of
from bisect_trt.imports.script import parsed_script
from bisect_trt.imports.values import Unknown

AUTOCAST_KEYS: Mapping[str, tuple[By, Precision]] = {
    "nodes_to_exclude": (By.NODE_REGEX, Precision.FP32),
    "op_types_to_exclude": (By.OPERATOR, Precision.FP32),
    "nodes_to_include": (By.NODE_REGEX, Precision.FP16),
    "op_types_to_include": (By.OPERATOR, Precision.FP16),
}
"""AutoCast's lists; those of what it includes count before those of what it excludes."""

BLOCK_KEYS: Mapping[str, tuple[By, Precision]] = {
    "op_block_list": (By.OPERATOR, Precision.FP32),
    "node_block_list": (By.NODE, Precision.FP32),
}
"""The lists of onnxconverter-common and of ONNX Runtime's optimizer of transformers."""

_INPUTS = "force_fp16_inputs"
_TYPE = "low_precision_type"
_CONVERTS = re.compile(r"convert_(?:float_to_float16|model_to_float16|to_mixed_precision|to_f16)$")
_RULES = (
    "AutoCast keeps more layers by its rules (data_max, init_max); give its model instead to "
    "carry those over"
)


def lists_in(data: Any) -> Form | None:
    """The form of a JSON document with such lists; None if it has none."""
    if not isinstance(data, dict):
        return None
    if not AUTOCAST_KEYS.keys().isdisjoint(data):
        return Form.AUTOCAST
    return Form.BLOCK_LIST if not {*BLOCK_KEYS, _INPUTS}.isdisjoint(data) else None


def calls_in(tree: ast.AST) -> set[Form]:
    """The forms of the converters that a Python file calls."""
    return {form for form, _ in _calls(tree)}


def has_autocast(text: str) -> bool:
    """Whether ``text`` has AutoCast's options."""
    return re.search(r"--(?:nodes|op_types)_to_(?:exclude|include)\b", text) is not None


def has_block_list(text: str) -> bool:
    """Whether ``text`` has options with the other tools' lists."""
    return re.search(r"--(?:op|node)_block_list\b", text) is not None


def read_json_lists(data: Mapping[str, Any], form: Form, where: str) -> Listing:
    """The entries of a JSON document.

    Raises:
        BadInputError: a list is none of names, or the type is neither FP16 nor BF16.
    """
    keys = AUTOCAST_KEYS if form is Form.AUTOCAST else BLOCK_KEYS
    entries = []
    for key in (key for key in keys if key in data):
        names = data[key]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BadInputError(f"{where}: {key} must be a list of names")
        entries += [_entry(keys, key, name, 0) for name in names]
    entries += _of_inputs(data.get(_INPUTS), 0)
    base = _low(data.get(_TYPE, "fp16"))
    if base is None:
        raise BadInputError(f"{where}: {_TYPE} must be fp16 or bf16")
    return _listing(form, entries, base)


def read_option_lists(text: str, form: Form, where: str) -> Listing:
    """The entries of a command line, or of a file with one.

    Raises:
        BadInputError: there is no such option in it.
    """
    keys = AUTOCAST_KEYS if form is Form.AUTOCAST else BLOCK_KEYS
    entries: list[Entry] = []
    current, base = "", Precision.FP16
    for number, line in _lines(text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = line.split()
        for word in words:
            flag, equals, value = word.partition("=")
            if word.startswith("-"):
                current = flag.lstrip("-")
                words_of = [value] if equals else []
            else:
                words_of = [word]
            if current in keys:
                entries += [_entry(keys, current, one, number) for one in words_of if one]
            elif current in (_TYPE, "t"):
                base = next((_low(one) or base for one in words_of), base)
    if not entries:
        raise nothing_in(where, form, " or ".join(f"--{key}" for key in keys))
    return _listing(form, entries, base)


def _low(value: Any) -> Precision | None:
    """The precision that AutoCast reduces to; None if ``value`` is no such one."""
    found = precision_of(value)[0] if isinstance(value, str) else None
    return None if found is Precision.FP32 else found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of ``text`` with their numbers; continued ones are joined."""
    joined, began = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        if not joined:
            began = number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            joined += line[:-1] + " "
            continue
        yield began, joined + line
        joined = ""
    if joined:
        yield began, joined


def read_call_lists(text: str, form: Form, where: str, operators: Collection[str]) -> Listing:
    """The entries of the calls in a Python file, for a model with ``operators``.

    Raises:
        BadInputError: it is no Python, calls no such converter, or has too many tests.
    """
    tree = parsed_script(text)
    calls = [] if tree is None else [node for its, node in _calls(tree) if its is form]
    if tree is None or not calls:
        raise nothing_in(where, form, "call of a converter")
    reader = CallReader(tree, text, calls)
    reader.read(where)
    entries: list[Entry] = []
    notes = list(reader.notes())
    base = Precision.FP16
    for call in reader.calls():
        entries += _of_call(call, form, operators)
        if form is Form.AUTOCAST and _TYPE in call.values:
            low = _low(call.values[_TYPE])
            base = low or base
            if low is None:
                notes.append(f"line {call.node.lineno}: {_TYPE} is not known; --precision says it")
    for node, reason in reader.unread():
        shown = source_of(node)[:120]
        by = By.OPERATOR
        entries.append(Entry(by, shown, None, What.EXCLUDED, node.lineno, refused=reason))
    entries.sort(key=lambda entry: entry.line)
    return _listing(form, list(dict.fromkeys(entries)), base, notes)


def _calls(tree: ast.AST) -> Iterator[tuple[Form, ast.Call]]:
    """The calls of converters, each with its form."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = called_name(node)
        given = {k.arg for k in node.keywords}
        if not AUTOCAST_KEYS.keys().isdisjoint(given) and "quant" not in name:
            yield Form.AUTOCAST, node
        elif not {*BLOCK_KEYS, _INPUTS}.isdisjoint(given) or _CONVERTS.match(name):
            yield Form.BLOCK_LIST, node


def _of_call(call: GivenCall, form: Form, operators: Collection[str]) -> Iterator[Entry]:
    """The entries of one call of a converter."""
    keys = AUTOCAST_KEYS if form is Form.AUTOCAST else BLOCK_KEYS
    for key in (key for key in keys if call.values.get(key) is not None):
        yield from _of_value(keys, key, call, operators)
    if form is Form.BLOCK_LIST and call.values.get("op_block_list") is None:
        said = "without op_block_list the tool keeps it by its default"
        for name in call.defaults:
            if name in operators:
                line = call.node.lineno
                yield Entry(By.OPERATOR, name, Precision.FP32, What.EXCLUDED, line, said=said)
    yield from _of_inputs(call.values.get(_INPUTS), call.line_of(_INPUTS))


def _of_value(
    keys: Mapping[str, tuple[By, Precision]],
    key: str,
    call: GivenCall,
    operators: Collection[str],
) -> Iterator[Entry]:
    """The entries of an argument; one refused entry where it cannot be read."""
    value, line = call.values[key], call.line_of(key)
    names: Iterable[Any] = sorted(value, key=str) if isinstance(value, set | frozenset) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        shown, reason = f"{key}={call.source_of(key)}"[:120], "is no list of literals"
        yield Entry(keys[key][0], shown, None, What.EXCLUDED, line, refused=reason)
        return
    for name in names:
        if not isinstance(name, DefaultOperator) or name in operators:
            yield _entry(keys, key, str(name), line)


def _of_inputs(value: Any, line: int) -> Iterator[Entry]:
    """Refused entries for inputs that a tool converts though their operator takes FP32."""
    names: Sequence[Any] = list(value) if isinstance(value, dict) else ()
    if isinstance(value, Unknown):
        names = [_INPUTS]
    for name in names:
        reason = f"{_INPUTS} says inputs of an operator; a plan says layers"
        yield Entry(By.OPERATOR, str(name), None, What.EXCLUDED, line, refused=reason)


def _entry(keys: Mapping[str, tuple[By, Precision]], key: str, name: str, line: int) -> Entry:
    by, precision = keys[key]
    return Entry(by, name, precision, What.EXCLUDED, line)


def _listing(
    form: Form,
    entries: Sequence[Entry],
    base: Precision = Precision.FP16,
    notes: Sequence[str] = (),
) -> Listing:
    """The listing; what a tool includes counts before what it excludes."""
    first = [entry for entry in entries if entry.precision is not Precision.FP16]
    last = [replace(e, precision=base) for e in entries if e.precision is Precision.FP16]
    rules = (_RULES,) if form is Form.AUTOCAST else ()
    return Listing(form, [*first, *last], base, (*rules, *notes), sequential=True)


def read_json(text: str) -> Any:
    """The JSON document ``text``; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
