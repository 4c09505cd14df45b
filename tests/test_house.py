"""The house keeps its rules: a room imports only rooms above it, and private parts stay private."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "bisect_trt"
ROOMS = (
    "core",
    "numerics",
    "graph",
    "runners",
    "probe",
    "search",
    "stations",
    "report",
    "commands",
)
DOORS = {"__init__", "__main__", "api", "cli", "pieces", "pipeline", "version"}
FORBIDDEN = {
    "core": None,  # nothing but the standard library
    "numerics": {"onnx", "onnxruntime"},
    "graph": {"onnxruntime"},
    "probe": {"onnx", "onnxruntime"},
    "search": {"onnx", "onnxruntime", "pandas"},
}
ALLOWED_ABOVE = {"search": {"core"}}
"""The search knows names and verdicts only: of the rooms above it, it may enter the first."""

INNER = {
    "core": ("disk", "machine", "user"),
    "numerics": ("errors", "requirements", "draws"),
    "graph": ("tensors", "files", "model", "passes", "inspection"),
    "runners": (
        "base",
        "workers",
        "ort",
        "device_check",
        "onnxruntime_cuda",
        "emulator",
        "tensorrt",
        "doctor",
    ),
    "runners/emulator": (
        "constants",
        "rtx",
        "by_node",
        "switched",
        "runner",
        "rtx_runner",
        "whole_model",
        "server",
        "fleet",
    ),
    "stations": (
        "asked",
        "case",
        "bench",
        "draws",
        "baselines",
        "engine",
        "cause",
        "plans",
        "verdict",
        "answer",
        "pieces",
        "cost",
    ),
    "report": (
        "record",
        "words",
        "figures",
        "page",
        "result",
        "summary",
        "files",
        "runs",
        "pieces",
        "terminal",
    ),
}
"""What stands within a room, from the ground up: each imports only what is before it. A module that
is not named lies under all of them.
"""

MOST_FILES = 20
"""A folder with more modules holds more than one concern."""

FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that ``path`` imports when it runs, in full; types alone are not followed."""
    for node in _executed(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        test = node.test if isinstance(node, ast.If) else None
        if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _executed(node)


def room_of(module: str) -> str:
    """The room of ``bisect_trt.room.module``; a door's own name."""
    return [*module.split("."), ""][1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_above_it(path: Path) -> None:
    where = path.relative_to(PACKAGE)
    if len(where.parts) == 1:
        assert path.stem in DOORS, f"{where}: nothing but the doors stands in the package's root"
        return
    room = where.parts[0]
    above = ALLOWED_ABOVE.get(room, set(ROOMS[: ROOMS.index(room)])) | {room, "version"}
    if room == "commands":  # the command line is made of them
        above |= {"pieces", "pipeline"}
    for module in imports(path):
        top = module.partition(".")[0]
        if top == "bisect_trt":
            assert room_of(module) in above, f"{where} imports {module}"
        elif room in FORBIDDEN:
            outside = FORBIDDEN[room]
            assert top not in (outside or ()), f"{where} imports {module}"
            assert outside is not None or top in sys.stdlib_module_names, (
                f"{where} imports {module}"
            )


def _inner(parts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each room with inner ones that a module stands in, and its place there."""
    for depth in range(1, len(parts)):
        room, within = "/".join(parts[:depth]), parts[depth]
        if room in INNER:
            yield room, INNER[room].index(within) if within in INNER[room] else -1


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_within_a_room_imports_go_one_way_too(path: Path) -> None:
    where = path.relative_to(PACKAGE).with_suffix("")
    places = dict(_inner(where.parts)) if path.name != "__init__.py" else {}  # it hands names on
    for module in imports(path):
        if module.startswith("bisect_trt."):
            for room, place in _inner(module.split(".")[1:]):
                assert place <= places.get(room, place), f"{where} imports {module}"


def test_folders_hold_one_concern() -> None:
    held = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {str(f.relative_to(PACKAGE)): n for f, n in held.items() if n > MOST_FILES} == {}
    named = {PACKAGE / room / within for room, inner in INNER.items() for within in inner}
    assert [n for n in named if not n.is_dir() and not n.with_suffix(".py").is_file()] == []
    rooms = {f for f in held if f != PACKAGE and f.parent.relative_to(PACKAGE).as_posix() in INNER}
    assert rooms <= named, f"no place in INNER: {rooms - named}"


def test_workers_know_no_models() -> None:
    for path in (PACKAGE / "runners" / "workers").glob("*.py"):
        ours = {m for m in imports(path) if m.startswith("bisect_trt.")}
        strange = {m for m in ours if room_of(m) != "core" and ".workers" not in m}
        assert not strange, f"{path.name} imports {strange}"


def test_onnx_runtime_s_private_parts_have_one_place() -> None:
    touched = {
        path.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("_sess", "_ortvalue")
    }
    assert touched == {"values.py"}


def test_modules_are_named_for_what_they_hold() -> None:
    things = {"rounding", "finding"}
    doing = {path.stem for path in FILES if path.stem.endswith("ing")}
    assert doing <= things


PROTOCOLS = frozenset(
    node.name
    for path in FILES
    for made in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(made, ast.ClassDef) and "Protocol" in map(ast.unparse, made.bases)
    for node in made.body
    if isinstance(node, ast.FunctionDef)
)
"""Methods that a protocol describes, for all who have them."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_functions_say_what_they_do(path: Path) -> None:
    if path.parent.name == "commands":  # click's help texts are what its docstrings are
        return
    for where, function, derived in _public_functions(ast.parse(path.read_text(encoding="utf-8"))):
        said = ast.get_docstring(function)
        if said is None:
            method = where.rpartition(".")[2]
            assert derived or method in PROTOCOLS, f"{path.name}: {where} says nothing"


def _public_functions(
    tree: ast.Module | ast.ClassDef, within: str = ""
) -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """With whether it belongs to a class that has another's methods to override."""
    derived = isinstance(tree, ast.ClassDef) and bool(tree.bases)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield within + node.name, node, derived
