"""Reads trtexec's ``--layerPrecisions`` and ``--layerOutputTypes``, from a command or a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from bisect_trt.base.plan import Precision
from bisect_trt.imports.entries import By, Entry, Form, Listing, What, nothing_in, precision_of

_NAMES = "layerPrecisions|layerOutputTypes|precisionConstraints"
_OPTION = re.compile(
    rf"'--({_NAMES})=([^']*)'"
    rf'|"--({_NAMES})=([^"]*)"'
    rf"""|--({_NAMES})=((?:'[^']*'|"[^"]*"|\\.|[^\s'"\\])*)""",
    re.DOTALL,
)
_ONE_OPTION = re.compile(r"""--(?:(?! --)[^'"\n\0])*""")
_FLAG = re.compile(r"(?<![\w-])--(fp16|bf16|int8|fp8|best|noTF32)\b")
_QUOTED = re.compile(r"""'([^']*)'|"([^"]*)"|\\(.)""", re.DOTALL)
_WHAT = {"layerPrecisions": What.PRECISION, "layerOutputTypes": What.OUTPUT}
_COMMENTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\[^\n]|(?<![^\s;&|()])#[^\n]*""", re.DOTALL)
"""What a shell reads as one: text in quotes, a character that is kept as it is, a comment."""
_OPTIONS_OF_LAYERS = re.compile(r"--layer(?:Precisions|OutputTypes)=")

_JOINED = "\0\0"
"""Stands for a backslash at a line's end, so that places in the text stay."""


def has_trtexec(text: str) -> bool:
    """Whether ``text`` has an option that says the precision of layers."""
    return _OPTIONS_OF_LAYERS.search(without_comments(text)) is not None


def without_comments(text: str) -> str:
    """``text`` without the comments of a shell script; its lines stay where they are."""
    if _ONE_OPTION.fullmatch(text):  # its quotes are gone already
        return text
    return _COMMENTED.sub(lambda one: "" if one.group().startswith("#") else one.group(), text)


def read_trtexec(text: str, where: str) -> Listing:
    """The entries of a command line, of a file with one, or of a Python file that makes one.

    Raises:
        BadInputError: there is no such option in it.
    """
    strings = _strings_of_python(text) or [(1, text)]
    parts = [(line, without_comments(part)) for line, part in strings]
    options = [found for line, part in parts for found in _options(part, line)]
    if not any(name in _WHAT for name, _, _ in options):
        raise nothing_in(where, Form.TRTEXEC, "--layerPrecisions or --layerOutputTypes")
    entries: dict[tuple[What, str], Entry] = {}
    repeated: list[Entry] = []
    for name, value, line in options:
        for entry in _entries(_WHAT[name], value, line) if name in _WHAT else ():
            key = (entry.what, entry.text)
            if key in entries:
                repeated.append(entries.pop(key))
            entries[key] = entry
    flags = {flag for _, part in parts for flag in _FLAG.findall(part)}
    constraints = [value for name, value, _ in options if name == "precisionConstraints"]
    notes = (*_notes(flags, constraints), *_of_repeated(repeated, entries))
    base = Precision.BF16 if "bf16" in flags and "fp16" not in flags else Precision.FP16
    return Listing(Form.TRTEXEC, sorted(entries.values(), key=_rank), base, notes)


def _rank(entry: Entry) -> tuple[bool, bool]:
    """Whole names count before patterns. Which of two patterns counts is not defined: FP32 here."""
    is_name = entry.by is By.NAME
    return is_name, not is_name and entry.precision is Precision.FP32


def _options(text: str, first_line: int) -> Iterator[tuple[str, str, int]]:
    """The options of precision in ``text``, each with its value and its line."""
    joined = text.replace("\r\n", "\n").replace("\\\n", _JOINED)
    if _ONE_OPTION.fullmatch(joined):  # its quotes are gone already
        joined = f'"{joined}"'
    line, counted = first_line, 0
    for found in _OPTION.finditer(joined):
        passed = joined[counted : found.start()]
        line += passed.count("\n") + passed.count(_JOINED)
        counted = found.start()
        name, value = (part for part in found.groups() if part is not None)
        if found.group(5):
            value = _QUOTED.sub(
                lambda one: one.group(1) or one.group(2) or one.group(3) or "", value
            )
        yield name, value.replace(_JOINED, ""), line


def _entries(what: What, value: str, line: int) -> Iterator[Entry]:
    """The entries of one option, as trtexec splits them: at commas, then at the last colon."""
    for part in value.split(","):
        name, colon, kind = part.rpartition(":")
        name = name.replace("'", "").replace('"', "")
        if not colon or not name:
            if part.strip():
                reason = "has no NAME:TYPE; trtexec splits at commas, so no name can hold one"
                yield Entry(By.NAME, part, None, what, line, refused=reason)
            continue
        kinds = [kind] if what is What.PRECISION else kind.split("+")
        found = [precision_of(one.strip("'\" ")) for one in kinds]
        precision, reason = next((one for one in found if one[0] is None), found[0])
        by = By.WILDCARD if "*" in name else By.NAME
        entry = Entry(by, name, precision, what, line, refused=reason)
        if precision is not None and len({one for one, _ in found}) > 1:
            said = "its outputs have several types; in a plan a layer has one"
            entry = replace(entry, precision=Precision.FP32, said=said)
        yield entry


def _notes(flags: set[str], constraints: list[str]) -> Iterator[str]:
    """What of the other options a user should know."""
    if not constraints or constraints[-1] != "obey":
        yield "without --precisionConstraints=obey TensorRT may have ignored the list"
    for flag in sorted(flags & {"int8", "fp8"}):
        yield f"--{flag} is not carried over; a plan has FP16 or BF16"
    if "noTF32" not in flags:
        yield "without --noTF32 TensorRT ran the FP32 layers in TF32; the plan has them in FP32"


def _of_repeated(repeated: list[Entry], entries: dict[tuple[What, str], Entry]) -> Iterator[str]:
    """What is said of names that are listed several times."""
    if repeated:
        first = repeated[0].text[:80]
        yield f"{len(repeated):,} repeated entries, such as {first!r}; the last of each counts"
    other = [e for e in repeated if e.precision != entries[(e.what, e.text)].precision]
    if other:
        yield f"{len(other):,} of them have another type before, such as {other[0].text[:80]!r}"


def _strings_of_python(text: str) -> list[tuple[int, str]]:
    """The longest strings with options that Python's constants in ``text`` make, with their lines.

    Empty if it is no Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[tuple[int, str]] = []
    open_nodes: list[ast.AST] = [tree]
    while open_nodes:
        node = open_nodes.pop()
        made = _folded(node)
        if made is not None and "--" in made:
            found.append((getattr(node, "lineno", 1), made))
        elif made is None:
            open_nodes += ast.iter_child_nodes(node)
    return sorted(found)


def _folded(node: ast.AST) -> str | None:
    """The text that an expression of constants gives; None for another one."""
    parts: list[str] = []
    open_nodes = [node]
    while open_nodes:  # a sum of many strings is too deep for a recursion
        part = open_nodes.pop()
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
            open_nodes += (part.left, part.right)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            parts.append(part.value)
        else:
            return None
    return "".join(reversed(parts))
