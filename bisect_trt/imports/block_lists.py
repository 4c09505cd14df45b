"""Reads the lists of converters: AutoCast's, onnxconverter-common's and ONNX Runtime's."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.imports.entries import By, Entry, Form, Listing, What, nothing_in
from bisect_trt.imports.script import parsed_script

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

_DEFAULT_LIST = "DEFAULT_OP_BLOCK_LIST"
_INPUTS = "force_fp16_inputs"
_DEFAULTS = (
    *(
        "ArrayFeatureExtractor",
        "Binarizer",
        "CastMap",
        "CategoryMapper",
        "DictVectorizer",
        "FeatureVectorizer",
        "Imputer",
        "LabelEncoder",
        "LinearClassifier",
        "LinearRegressor",
        "Normalizer",
        "OneHotEncoder",
        "RandomUniformLike",
        "SVMClassifier",
        "SVMRegressor",
        "Scaler",
        "TreeEnsembleClassifier",
        "TreeEnsembleRegressor",
        "ZipMap",
        "NonMaxSuppression",
        "TopK",
        "RoiAlign",
        "Range",
        "CumSum",
        "Min",
        "Max",
        "Upsample",
    ),
)
"""What both tools keep in FP32 where no list of operators is given; one of them Resize too."""

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
    return {form for form, _, _ in _calls(tree)}


def has_autocast(text: str) -> bool:
    """Whether ``text`` has AutoCast's options."""
    return re.search(r"--(?:nodes|op_types)_to_(?:exclude|include)\b", text) is not None


def has_block_list(text: str) -> bool:
    """Whether ``text`` has options with the other tools' lists."""
    return re.search(r"--(?:op|node)_block_list\b", text) is not None


def read_json_lists(data: Mapping[str, Any], form: Form, where: str) -> Listing:
    """The entries of a JSON document.

    Raises:
        BadInputError: a list is none of names.
    """
    keys = AUTOCAST_KEYS if form is Form.AUTOCAST else BLOCK_KEYS
    entries = []
    for key in (key for key in keys if key in data):
        names = data[key]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BadInputError(f"{where}: {key} must be a list of names")
        entries += [_entry(keys, key, name, 0) for name in names]
    entries += _of_inputs(data.get(_INPUTS), 0)
    return _listing(form, entries)


def read_option_lists(text: str, form: Form, where: str) -> Listing:
    """The entries of a command line, or of a file with one.

    Raises:
        BadInputError: there is no such option in it.
    """
    keys = AUTOCAST_KEYS if form is Form.AUTOCAST else BLOCK_KEYS
    entries: list[Entry] = []
    current = ""
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
    if not entries:
        raise nothing_in(where, form, " or ".join(f"--{key}" for key in keys))
    low = re.search(r"--(?:low_precision_type|t)[= ]bf16|-t[= ]bf16", text) is not None
    return _listing(form, entries, Precision.BF16 if low else Precision.FP16)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of ``text`` with their numbers; continued ones are joined."""
    joined, began = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        if not joined:
            began = number
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        yield began, joined + line
        joined = ""
    if joined:
        yield began, joined


def read_call_lists(text: str, form: Form, where: str, operators: Collection[str]) -> Listing:
    """The entries of the calls in a Python file, for a model with ``operators``.

    Raises:
        BadInputError: it is no Python, or calls no such converter.
    """
    tree = parsed_script(text)
    calls = [] if tree is None else [found for found in _calls(tree) if found[0] is form]
    if tree is None or not calls:
        raise nothing_in(where, form, "call of a converter")
    keys = AUTOCAST_KEYS if form is Form.AUTOCAST else BLOCK_KEYS
    known = _constants(tree)
    entries: list[Entry] = []
    for _, call, _ in calls:
        given = {k.arg: k.value for k in call.keywords if k.arg is not None}
        for key in (key for key in keys if key in given):
            entries += _of_value(keys, key, given[key], known, operators)
        if form is Form.BLOCK_LIST and "op_block_list" not in given:
            entries += _of_defaults(call.lineno, operators)
        if _INPUTS in given:
            entries += _of_inputs(_literal(given[_INPUTS], known), given[_INPUTS].lineno)
    return _listing(form, entries)


def _calls(tree: ast.AST) -> Iterator[tuple[Form, ast.Call, str]]:
    """The calls of converters, each with its form and name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        given = {k.arg for k in node.keywords}
        if not AUTOCAST_KEYS.keys().isdisjoint(given) and "quant" not in name:
            yield Form.AUTOCAST, node, name
        elif not {*BLOCK_KEYS, _INPUTS}.isdisjoint(given) or _CONVERTS.match(name):
            yield Form.BLOCK_LIST, node, name


def _constants(tree: ast.AST) -> dict[str, ast.expr]:
    """The expressions that variables stand for, where each is assigned once."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _literal(node: ast.expr, known: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """What an expression of literals, variables and sums of lists gives; None for others."""
    if depth > 20:
        return None
    if isinstance(node, ast.Name) and node.id in known:
        return _literal(known[node.id], known, depth + 1)
    if ast.unparse(node).rpartition(".")[2] == _DEFAULT_LIST:
        return list(_DEFAULTS)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "set") and node.args:
        return _literal(node.args[0], known, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.BitOr):
        left, right = (_literal(side, known, depth + 1) for side in (node.left, node.right))
        if left is None or right is None:
            return None
        return [*left, *right]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _of_value(
    keys: Mapping[str, tuple[By, Precision]],
    key: str,
    node: ast.expr,
    known: Mapping[str, ast.expr],
    operators: Collection[str],
) -> Iterator[Entry]:
    """The entries of an argument; one refused entry where it cannot be read."""
    absent = set(_DEFAULTS).difference(operators) if _DEFAULT_LIST in ast.unparse(node) else set()
    value = _literal(node, known)
    if value is None and not (isinstance(node, ast.Constant) and node.value is None):
        shown, reason = f"{key}={ast.unparse(node)}"[:120], "is no list of literals"
        yield Entry(keys[key][0], shown, None, What.EXCLUDED, node.lineno, refused=reason)
        return
    for name in value or ():
        if isinstance(name, str) and name not in absent:
            yield _entry(keys, key, name, node.lineno)


def _of_defaults(line: int, operators: Collection[str]) -> Iterator[Entry]:
    """Entries for the operators that the tools keep in FP32 where no list is given."""
    said = "without op_block_list the tool keeps it by its default"
    for name in _DEFAULTS:
        if name in operators:
            yield Entry(By.OPERATOR, name, Precision.FP32, What.EXCLUDED, line, said=said)


def _of_inputs(value: Any, line: int) -> Iterator[Entry]:
    """Refused entries for inputs that a tool converts though their operator takes FP32."""
    names: Sequence[Any] = list(value) if isinstance(value, dict) else ()
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
) -> Listing:
    """The listing; what a tool includes counts before what it excludes."""
    first = [entry for entry in entries if entry.precision is not Precision.FP16]
    last = [replace(e, precision=base) for e in entries if e.precision is Precision.FP16]
    notes = (_RULES,) if form is Form.AUTOCAST else ()
    return Listing(form, [*first, *last], base, notes, sequential=True)


def read_json(text: str) -> Any:
    """The JSON document ``text``; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
