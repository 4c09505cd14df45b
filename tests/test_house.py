"""The house keeps its rules: a folder imports only folders below it, in one direction."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(__file__).resolve().parents[1] / "bisect_trt"
FOLDERS = (
    "base",
    "search",
    "settings",
    "metrics",
    "model",
    "repair",
    "inputs",
    "imports",
    "runners",
    "evaluate",
    "steps",
    "reduction",
    "report",
)
"""From the ground up: each imports only itself and what is before it."""

DOORS = {
    "__init__",
    "__main__",
    "api",
    "cli",
    "commands",
    "graph",
    "pipeline",
    "settings",
    "usage",
    "version",
}
"""The modules in the package's root."""

NOT_IN = {
    "metrics": {"onnx", "onnxruntime"},
    "model": {"onnxruntime"},
    "evaluate": {"onnx", "onnxruntime"},
    "search": {"onnx", "onnxruntime", "pandas"},
}
STANDARD_LIBRARY_ONLY = {"base"}
BELOW_SEARCH = {"base"}
"""The search knows names and outcomes only."""

FILES = sorted(PACKAGE.rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Every module that ``path`` imports when it runs, in full; types alone are not followed."""
    for node in _executed(parsed(path)):
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


def folder_of(module: str) -> str:
    """The folder of ``bisect_trt.folder.module``; the name of a module in the root."""
    return [*module.split("."), ""][1]


def upward(path: Path) -> Iterator[str]:
    """What a module imports that stands above it, or that its folder must not know."""
    where = path.relative_to(PACKAGE)
    folder = where.parts[0].removesuffix(".py")
    if folder in DOORS - {"settings"}:
        return
    below = BELOW_SEARCH if folder == "search" else set(FOLDERS[: FOLDERS.index(folder)])
    for module in imports(path):
        top = module.partition(".")[0]
        if top == "bisect_trt":
            if folder_of(module) not in below | {folder, "version"}:
                yield f"{where} imports {module}"
        elif top in NOT_IN.get(folder, ()) or (
            folder in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names
        ):
            yield f"{where} imports {module}"


def test_a_folder_imports_only_folders_below_it() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} <= DOORS
    assert [found for path in FILES for found in upward(path)] == []


def test_no_module_imports_itself_around_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for path in FILES:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        top = [node for node in parsed(path).body if isinstance(node, ast.ImportFrom)]
        edges[name] = {node.module for node in top if node.module} - {name}
    while free := {name for name, needs in edges.items() if not needs & edges.keys()}:
        edges = {name: needs for name, needs in edges.items() if name not in free}
    assert sorted(edges) == []


def test_worker_processes_know_no_models() -> None:
    for name in ("process", "ray_actors"):
        ours = {m for m in imports(PACKAGE / "runners" / f"{name}.py") if "bisect_trt" in m}
        strange = {m for m in ours if folder_of(m) != "base" and m.count(".") != 2}
        assert not strange, f"{name}.py imports {strange}"


def test_onnx_runtime_s_private_parts_have_one_place() -> None:
    touched = {
        path.name
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in ("_sess", "_ortvalue")
    }
    assert touched == {"values.py"}


PRIVATE_USES = 4
"""How often tests may reach into the package's private names."""


def _private_uses(path: Path) -> Iterator[str]:
    """Names with an underscore that a test imports, reads or replaces."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if own else [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bisect_trt"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
        else:
            continue
        for name in names:
            if re.match(r"_[^_]", name) and not name.endswith("_") and name != "_replace":
                yield f"{path.relative_to(TESTS)}: {name}"


def test_tests_go_through_public_names() -> None:
    found = [use for path in sorted(TESTS.rglob("*.py")) for use in _private_uses(path)]
    assert len(found) <= PRIVATE_USES, found


def _patched_constants(path: Path) -> Iterator[str]:
    """The calls of setattr by which a test replaces a name in capitals."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            names = [ast.unparse(argument) for argument in node.args[:2]]
            if any(re.search(r"\b[A-Z][A-Z_]{3,}'$", name) for name in names):
                yield f"{path.relative_to(TESTS)}: {ast.unparse(node)}"


def test_limits_are_given_and_not_patched() -> None:
    assert [use for path in sorted(TESTS.rglob("*.py")) for use in _patched_constants(path)] == []


PROTOCOLS = frozenset(
    node.name
    for path in FILES
    for made in ast.walk(parsed(path))
    if isinstance(made, ast.ClassDef) and "Protocol" in map(ast.unparse, made.bases)
    for node in made.body
    if isinstance(node, ast.FunctionDef)
)
"""Methods that a protocol describes, for all who have them."""


def test_public_functions_say_what_they_do() -> None:
    silent = [
        f"{path.relative_to(PACKAGE)}: {where}"
        for path in FILES
        if path.name != "cli.py"  # click's help texts are what its docstrings are
        for where, function, derived in _public_functions(parsed(path))
        if ast.get_docstring(function) is None
        and not (derived or where.rpartition(".")[2] in PROTOCOLS)
    ]
    assert silent == []


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
