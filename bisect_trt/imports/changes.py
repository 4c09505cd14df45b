"""What statements change, for those that a reader cannot follow."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Defined = ast.FunctionDef | ast.AsyncFunctionDef

ALTERS = frozenset(
    [
        "append",
        "appendleft",
        "add",
        "extend",
        "extendleft",
        "insert",
        "remove",
        "discard",
        "pop",
        "popitem",
        "clear",
        "sort",
        "reverse",
        "update",
        "setdefault",
        "intersection_update",
        "difference_update",
        "symmetric_difference_update",
        "__setitem__",
        "__delitem__",
    ]
)
"""The methods that change a list, a set or a dictionary."""


@dataclass(frozen=True)
class Changes:
    """What a part of a script changes.

    ``stored`` are the variables that it assigns, ``outside`` those of the whole file.
    ``altered`` are the variables whose lists it changes. ``returns`` says that it may return.
    """

    stored: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    altered: frozenset[str] = frozenset()
    returns: bool = False


class ChangeFinder:
    """Finds what parts of a script change; ``functions`` are the script's, by name."""

    def __init__(self, functions: Mapping[str, Sequence[Defined]]) -> None:
        self._functions = functions
        self._inside: dict[Defined, Changes] = {}
        self._known: dict[ast.AST, Changes] = {}

    def of(self, node: ast.AST) -> Changes:
        """What ``node`` changes, with the functions that it calls."""
        if not self._known:
            self._read_functions()
        if node not in self._known:
            self._known[node] = self._of(node)
        return self._known[node]

    def _read_functions(self) -> None:
        """Reads every function, and again those that call one of which more became known."""
        waiting = {node for same in self._functions.values() for node in same}
        callers: dict[str, set[Defined]] = defaultdict(set)
        for node in waiting:
            for part in ast.walk(node):
                if isinstance(part, ast.Call):
                    callers[called_name(part)].add(node)
        while waiting:
            node = waiting.pop()
            found = self._of(node)
            if found != self._inside.get(node, Changes()):
                self._inside[node] = found
                waiting |= callers[node.name]

    def _of(self, node: ast.AST) -> Changes:
        stored, outside, altered, returns = set[str](), set[str](), set[str](), False
        for part in _executed(node):
            match part:
                case ast.Name(name, ast.Store()):
                    stored.add(name)
                case ast.Global(names) | ast.Nonlocal(names):
                    outside.update(names)
                case ast.Subscript(inner, _, ast.Store() | ast.Del()):
                    altered.add(_root(inner))
                case ast.AugAssign(ast.Name(name)):
                    altered.add(name)
                case ast.Return(value):
                    returns |= value is not None and not _is_none(value)
                case ast.Call():
                    inside = self._of_call(part)
                    outside |= inside.outside
                    altered |= inside.altered
        altered.discard("")
        return Changes(frozenset(stored), frozenset(outside), frozenset(altered), returns)

    def _of_call(self, call: ast.Call) -> Changes:
        """What a call changes: what its method belongs to, and what a function here changes."""
        name = called_name(call)
        outside, altered = set[str](), set[str]()
        if isinstance(call.func, ast.Attribute) and name in ALTERS:
            altered.add(_root(call.func.value))
        if isinstance(call.func, ast.Name) and name not in self._functions:
            altered.add(name)  # it may stand for a method of a list
        for function in self._functions.get(name, ()):
            inside = self._inside.get(function, Changes())
            own = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
            own |= inside.stored - inside.outside
            outside |= inside.outside
            altered |= inside.altered - own
            if inside.altered & own:
                altered |= {_root(one) for one in call.args}
                altered |= {_root(one.value) for one in call.keywords}
        return Changes(outside=frozenset(outside), altered=frozenset(altered))


def called_name(call: ast.Call) -> str:
    """The name of the function or method that is called; empty if it has none."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def source_of(node: ast.AST) -> str:
    """The text of ``node`` for messages."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return "what is nested too deeply"


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of ``node`` without the bodies of functions and classes defined in it."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        yield part
        if part is node or not isinstance(part, Defined | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(part)


def _root(node: ast.expr) -> str:
    """The variable that ``node`` begins with; empty if there is none."""
    while True:
        match node:
            case ast.Name(name):
                return name
            case ast.Attribute(inner) | ast.Subscript(inner) | ast.Starred(inner):
                node = inner
            case ast.Call(inner):
                node = inner
            case _:
                return ""


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
