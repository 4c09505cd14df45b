"""Reads a Python script that sets the precision of layers, by its syntax; it is never run.

It is a build script's loop over the network, or polygraphy's script for it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.imports.changes import ChangeFinder, Defined, called_name, source_of
from bisect_trt.imports.entries import By, Entry, Form, Listing, What, nothing_in, precision_of
from bisect_trt.imports.expressions import Expressions
from bisect_trt.imports.values import (
    Function,
    LayerValue,
    Member,
    Module,
    NetworkValue,
    NotUnderstoodError,
    TooManyTestsError,
    Unknown,
    subjects,
)
from bisect_trt.model.graph import Graph
from bisect_trt.model.trt_names import Network, NetworkLayer

_OURS = "written by bisect-trt"
_MOST_CALLS = 20
_READS_ONLY = frozenset(
    ("print", "pprint", "debug", "info", "warning", "error", "log", "write", "writelines", "dump")
)
"""Functions that only show or write what they get."""

_BY_NUMBER = "layers are counted; other versions of TensorRT number differently"


def parsed_script(text: str) -> ast.Module | None:
    """The syntax tree of a script; None if ``text`` is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the reader's own escapes
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def sets_layers(tree: ast.AST) -> bool:
    """Whether something in ``tree`` sets the precision of a layer."""
    return any(_is_action(node) for node in ast.walk(tree))


def _is_action(node: ast.AST) -> bool:
    """Whether ``node`` itself sets the precision of a layer."""
    if isinstance(node, ast.Attribute):
        stores = isinstance(node.ctx, ast.Store) and node.attr == "precision"
        return stores or node.attr in ("set_output_type", "reset_precision")
    return False


def read_script(text: str, where: str, graph: Graph, network: Network | None) -> Listing:
    """The entries of a script: for each line that sets layers, the layers that it sets.

    Args:
        text: the script.
        where: its name in messages.
        graph: the model.
        network: what TensorRT's parser made of the model; without it the usual names are taken.

    Raises:
        BadInputError: it is no Python, sets no layer, or has too many tests.
    """
    tree = parsed_script(text)
    if tree is None:
        raise BadInputError(f"{where}: no Python; --form script reads nothing else")
    if _OURS in (ast.get_docstring(tree) or ""):
        return _of_own(tree, where)
    if not sets_layers(tree):
        raise nothing_in(where, Form.SCRIPT, "layer.precision or set_output_type")
    reader = Follower(tree, text, subjects(graph, network), counts=network is not None)
    reader.read(where)
    notes = [*reader.notes(), *_of_flags(text)]
    entries = list(reader.entries())
    return Listing(Form.SCRIPT, entries, _base_of(text), tuple(notes), sequential=True)


def _of_own(tree: ast.Module, where: str) -> Listing:
    """The entries of the script that ``bisect-trt export`` writes."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and source_of(node.targets[0]) == "PINNED":
            names = ast.literal_eval(node.value) if not isinstance(node.value, ast.Call) else ()
            entries = [
                Entry(By.NAME, name, Precision.FP32, line=node.lineno) for name in sorted(names)
            ]
            base = Precision.BF16 if "--bf16" in (ast.get_docstring(tree) or "") else Precision.FP16
            return Listing(Form.SCRIPT, entries, base)
    raise nothing_in(where, Form.SCRIPT, "PINNED")


def _flags(text: str) -> set[str]:
    return set(re.findall(r"BuilderFlag\.(\w+)", text))


def _base_of(text: str) -> Precision:
    """What the other layers run in, by the builder's flags."""
    flags = _flags(text)
    return Precision.BF16 if "BF16" in flags and "FP16" not in flags else Precision.FP16


def _of_flags(text: str) -> Iterator[str]:
    flags = _flags(text)
    if {"BF16", "FP16"} <= flags:
        yield "the script allows FP16 and BF16; FP16 is taken (--precision says otherwise)"
    if flags and not flags & {"OBEY_PRECISION_CONSTRAINTS", "STRICT_TYPES"}:
        yield "without OBEY_PRECISION_CONSTRAINTS TensorRT may have ignored the list"
    for flag in sorted(flags & {"INT8", "FP8"}):
        yield f"{flag} is not carried over; a plan has FP16 or BF16"


@dataclass
class _Action:
    """A line that sets layers: what it sets them to, and which."""

    what: What
    precision: Precision | None
    refused: str = ""
    said: str = ""
    layers: dict[int, None] = field(default_factory=dict)


class JumpError(Exception):
    """A ``break``, ``continue`` or ``return``."""

    def __init__(self, kind: str, value: Any = None) -> None:
        super().__init__(kind)
        self.kind = kind
        self.value = value


class Follower(Expressions):
    """Follows the statements of a script for every layer of the network."""

    purpose = "sets layers"

    def __init__(
        self, tree: ast.Module, text: str, layers: Sequence[NetworkLayer], *, counts: bool
    ) -> None:
        super().__init__(layers, counts=counts)
        self._tree = tree
        self._lines = text.splitlines()
        self._class_of: dict[Defined, ast.ClassDef] = {
            part: node
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for part in node.body
            if isinstance(part, Defined)
        }
        self._functions: dict[str, list[Defined]] = defaultdict(list)
        for node in ast.walk(tree):
            if isinstance(node, Defined):
                self._functions[node.name].append(node)
        self._changes = ChangeFinder(self._functions)
        self._sets: dict[int, bool] = {}
        self._actions: dict[tuple[int, What, Precision | None], _Action] = {}
        self._refused: dict[int, str] = {}
        self._assumed: dict[int, str] = {}
        self._inside: list[Defined | ast.Lambda] = []
        self._entered: set[Defined | ast.Lambda] = set()
        self._may_return: list[bool] = [False]
        self._derived: list[frozenset[str]] = []
        self._last: dict[tuple[What, int], _Action] = {}

    def is_action(self, node: ast.AST) -> bool:
        """Whether ``node`` itself does what the script is read for."""
        return _is_action(node)

    def read(self, where: str) -> None:
        """Follows the module, then each function that sets layers and that nothing here calls.

        Raises:
            BadInputError: the script ``where`` has too many tests.
        """
        try:
            self._read()
        except TooManyTestsError as error:
            raise BadInputError(
                f"{where}: line {error.line}: too many tests to read; "
                "write the layers' names as a list"
            ) from error

    def _read(self) -> None:
        functions = [node for same in self._functions.values() for node in same]
        for node in functions:
            if node not in self._class_of:
                self.scopes[0][node.name] = Function(node)
        self._try(self._tree.body)
        called = {called_name(node) for node in ast.walk(self._tree) if isinstance(node, ast.Call)}
        for node in functions:
            if node.name not in called and self.acts(node.body):
                self._try_call(node)

    def _try(self, body: Sequence[ast.stmt]) -> None:
        try:
            self.run(body)
        except JumpError:
            return
        except NotUnderstoodError as error:
            self._refuse(error.line, error.reason)

    def _try_call(self, node: Defined) -> None:
        try:
            self._enter(node, [], {})
        except NotUnderstoodError as error:
            self._refuse(error.line, error.reason)

    def _refuse(self, line: int, reason: str) -> None:
        self._refused.setdefault(line, reason)

    def entries(self) -> Iterator[Entry]:
        """An entry for each line that sets layers or was not understood, in the file's order."""
        refused = dict(self._refused)
        reached = {line for line, _, _ in self._actions}
        nodes = list(ast.walk(self._tree))
        # A line inside a statement that is refused has its reason there.
        covered = {
            line
            for node in nodes
            if isinstance(node, ast.stmt) and node.lineno in self._refused
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for node in nodes:
            line = getattr(node, "lineno", 0)
            if self.is_action(node) and line not in reached | covered:
                refused[line] = self._why_not_reached(line)
        found = [
            Entry(
                By.LAYERS,
                self._shown(line),
                action.precision,
                what,
                line,
                tuple(action.layers),
                action.refused,
                action.said,
            )
            for (line, what, _), action in self._actions.items()
        ]
        found += [
            Entry(By.LAYERS, self._shown(line), None, line=line, refused=reason)
            for line, reason in refused.items()
        ]
        yield from sorted(found, key=lambda entry: entry.line)

    def _why_not_reached(self, line: int) -> str:
        """Why a line did nothing: its function was not followed, or no layer came to it."""
        around = [
            node
            for same in self._functions.values()
            for node in same
            if node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        inner = max(around, key=lambda node: node.lineno, default=None)
        if inner is not None and inner not in self._entered:
            return f"no call of {inner.name}() could be followed"
        return "no layer of this model comes to this line"

    def notes(self) -> Iterator[str]:
        """What was taken for granted."""
        for line, test in sorted(self._assumed.items()):
            yield f"line {line}: taken as it {self.purpose}: {test[:60]}"

    def _shown(self, line: int) -> str:
        return self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""

    # Statements.

    def acts(self, nodes: Sequence[ast.AST]) -> bool:
        """Whether something in ``nodes``, or in a function that they call, sets a layer."""
        return any(self._sets_inside(node) for node in nodes)

    def _sets_inside(self, node: ast.AST) -> bool:
        if id(node) not in self._sets:
            self._sets[id(node)] = any(
                self.is_action(part)
                or (isinstance(part, ast.Call) and called_name(part) in self._acting)
                for part in ast.walk(node)
            )
        return self._sets[id(node)]

    @cached_property
    def _acting(self) -> frozenset[str]:
        """The names of the functions that set a layer, or call one that does."""
        callers: dict[str, set[str]] = defaultdict(set)
        waiting, found = set[str](), set[str]()
        for name, same in self._functions.items():
            for part in (part for node in same for part in ast.walk(node)):
                if isinstance(part, ast.Call):
                    callers[called_name(part)].add(name)
                if self.is_action(part):
                    waiting.add(name)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting |= callers[name]
        return frozenset(found)

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Follows statements; after one that is not understood the rest is left out.

        Raises:
            NotUnderstoodError: one of them is about layers and cannot be followed.
        """
        for place, statement in enumerate(body):
            follow = getattr(self, f"follow_{type(statement).__name__.lower()}", None)
            try:
                if follow is not None:
                    self._follow(follow, statement)
                    continue
            except NotUnderstoodError:
                for left_out in body[place:]:
                    self.skip(left_out)
                raise
            if self.acts([statement]):
                self._refuse(statement.lineno, "is a statement that is not read")
            self.skip(statement)

    def _follow(self, follow: Callable[[Any], None], statement: ast.stmt) -> None:
        """Follows a statement; one that no layer needs may be left out."""
        try:
            try:
                follow(statement)
            except RecursionError as error:
                raise NotUnderstoodError(statement.lineno, "is nested too deeply") from error
        except NotUnderstoodError:
            if self._derived or self.acts([statement]):
                raise
            self.skip(statement)

    def skip(self, node: ast.AST, *, of_layer: bool = False) -> None:
        """Makes unknown what ``node`` changes, as it is not followed; a layer may decide it."""
        if isinstance(node, Defined | ast.ClassDef):
            return  # it only defines
        of_layer = of_layer or bool(self._derived)
        changes = self._changes.of(node)
        for name in changes.altered:
            self.lose(self.lookup(name), of_layer=of_layer)
        for name in changes.stored:
            self.scopes[-1][name] = Unknown(of_layer)
        for name in changes.outside:
            self.scopes[0][name] = Unknown(of_layer)
        self._may_return[-1] |= changes.returns

    def follow_expr(self, node: ast.Expr) -> None:
        """A call; one of a function that is not in this file may change lists that it gets."""
        found = self.value(node.value)
        if isinstance(node.value, ast.Call) and isinstance(found, Unknown):
            name = called_name(node.value)
            if name not in _READS_ONLY and name not in self._functions:
                for argument in node.value.args:
                    if isinstance(argument, ast.Name):
                        self.lose(self.lookup(argument.id), of_layer=bool(self._derived))

    def follow_assign(self, node: ast.Assign) -> None:
        """An assignment to variables, or to the precision of a layer."""
        value = self.value(node.value)
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                owner = self.value(target.value)
                if target.attr == "precision":
                    self._set(owner, What.PRECISION, value, node.lineno)
            elif isinstance(target, ast.Subscript):
                self._put(target, value)
            else:
                self.bind(target, value)

    def _put(self, target: ast.Subscript, value: Any) -> None:
        """An assignment to an item; only one of a dictionary is followed."""
        owner = self.value(target.value)
        key = Unknown() if isinstance(target.slice, ast.Slice) else self.value(target.slice)
        try:
            if isinstance(owner, dict) and not isinstance(key, Unknown):
                owner[key] = value
                return
        except (TypeError, RecursionError) as error:
            raise NotUnderstoodError(target.lineno, "sets an item that cannot be read") from error
        self.lose(owner, of_layer=self._is_of_layer(key))

    def follow_annassign(self, node: ast.AnnAssign) -> None:
        """An assignment with a type."""
        if node.value is not None:
            self.follow_assign(ast.copy_location(ast.Assign([node.target], node.value), node))

    def follow_augassign(self, node: ast.AugAssign) -> None:
        """``a += b`` of a variable; a list is changed where it is, by all of its names."""
        if not isinstance(node.target, ast.Name):
            self.value(node.value)
            self.lose(self.value(node.target), of_layer=bool(self._derived))
            self.skip(node)
            return
        left = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        whole = ast.copy_location(ast.BinOp(left, node.op, node.value), node)
        before, after = self.value(left), self.value(whole)
        match before, after:
            case (list(), list()):
                before[:] = after
            case (set(), set()) | (dict(), dict()):
                before.clear()
                before.update(after)
            case _:
                self.lose(before, of_layer=self._is_of_layer(after))
                before = after
        self.bind(node.target, before)

    def follow_if(self, node: ast.If) -> None:
        """A test; one that no layer decides is taken as it sets layers."""
        test = self.value(node.test)
        if not isinstance(test, Unknown):
            self.run(node.body if test else node.orelse)
            return
        if not self.depends(node.test, test):
            taken = next((b for b in (node.body, node.orelse) if self.acts(b)), None)
            if taken is None:
                self.skip(node)
                return
            self.assume(node.test)
            self.run(taken)
            return
        jumps = any(
            isinstance(part, ast.Continue | ast.Break | ast.Return)
            for body in (node.body, node.orelse)
            for statement in body
            for part in ast.walk(statement)
        )
        if jumps or self.acts([*node.body, *node.orelse]):
            reason = f"tests what is not known here: {source_of(node.test)}"
            raise NotUnderstoodError(node.lineno, reason[:120])
        self.skip(node, of_layer=True)

    def assume(self, node: ast.expr) -> None:
        """Notes that a test that no layer decides is taken as it sets layers."""
        self._assumed[node.lineno] = source_of(node)

    def depends(self, node: ast.expr, value: Any) -> bool:
        """Whether a layer, or what a loop over layers has computed, decides ``value``."""
        if value == Unknown(of_layer=True):
            return True
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return any(not names.isdisjoint(derived) for derived in self._derived)

    def follow_for(self, node: ast.For) -> None:
        """A loop over layers, numbers or a list."""
        items = self.items(self.value(node.iter), node.lineno)
        if items is None:
            if self.acts(node.body):
                reason = f"goes over what is not known here: {source_of(node.iter)}"
                self._refuse(node.lineno, reason[:120])
            self.skip(node)
            return
        self._derived.append(_stored_in(node))
        try:
            self._loop(node, list(items))
        finally:
            self._derived.pop()
        self.run(node.orelse)

    def _loop(self, node: ast.For, items: Sequence[Any]) -> None:
        for item in items:
            self.bind(node.target, item)
            try:
                self.run(node.body)
            except NotUnderstoodError as error:
                self._refuse(error.line, error.reason)
            except JumpError as jump:
                if jump.kind == "break":
                    return
                if jump.kind != "continue":
                    raise

    def follow_with(self, node: ast.With) -> None:
        """A block."""
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, value)
        self.run(node.body)

    def follow_try(self, node: ast.Try) -> None:
        """A block whose handlers are not followed."""
        self.run([*node.body, *node.orelse, *node.finalbody])

    def follow_raise(self, node: ast.Raise) -> None:
        """An error; what comes after it is not done."""
        raise NotUnderstoodError(node.lineno, "raises an error")

    def follow_assert(self, node: ast.Assert) -> None:
        """An error where the test is known to be false."""
        if self.truth(self.value(node.test)) is False:
            raise NotUnderstoodError(node.lineno, "raises an error")

    def follow_continue(self, node: ast.Continue) -> None:
        """Ends a turn of a loop."""
        raise JumpError("continue")

    def follow_break(self, node: ast.Break) -> None:
        """Ends a loop."""
        raise JumpError("break")

    def follow_return(self, node: ast.Return) -> None:
        """Ends a function."""
        raise JumpError("return", None if node.value is None else self.value(node.value))

    def follow_import(self, node: ast.Import) -> None:
        """Names of modules."""
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.scopes[-1][name] = Module(alias.name)

    def follow_importfrom(self, node: ast.ImportFrom) -> None:
        """Names from the module tensorrt."""
        for alias in node.names:
            is_trt = (node.module or "").partition(".")[0] in ("tensorrt", "tensorrt_rtx")
            value = Member((alias.name,)) if is_trt else Unknown()
            self.scopes[-1][alias.asname or alias.name] = value

    def follow_functiondef(self, node: ast.FunctionDef) -> None:
        """A function, followed where it is called."""
        self.scopes[-1][node.name] = Function(node)

    def follow_classdef(self, node: ast.ClassDef) -> None:
        """A class, whose methods are followed on their own."""

    # Calls and actions.

    def read_call(self, node: ast.Call) -> Any:
        """A call; a method of a class of the script is followed too."""
        if isinstance(node.func, ast.Attribute):
            method = self._method_of(node.func, node)
            if method is not None:
                arguments = self._list(node.args)
                if self._is_bound(node.func, method):
                    arguments.insert(0, Unknown())
                return self.call(Function(method), arguments, node)
        return super().read_call(node)

    def _method_of(self, func: ast.Attribute, node: ast.Call) -> Defined | None:
        """The method of this file that a call of an attribute of something unknown means."""
        same = [one for one in self._functions.get(func.attr, ()) if one in self._class_of]
        if not same or self.value(func.value) != Unknown():
            return None
        own = next(
            (self._class_of[one] for one in reversed(self._inside) if one in self._class_of), None
        )
        if isinstance(func.value, ast.Name) and func.value.id in ("self", "cls"):
            same = [one for one in same if self._class_of[one] is own] or same
        if len(same) > 1:
            if self.acts(same):
                reason = f"calls {func.attr}(), which more than one class here has"
                raise NotUnderstoodError(node.lineno, reason)
            return None
        # A method may call one of the same name of another object.
        return None if same[0] in self._inside else same[0]

    def _is_bound(self, func: ast.Attribute, method: Defined) -> bool:
        """Whether a call gives the method one argument more than it has in brackets."""
        kinds = [source_of(one) for one in method.decorator_list]
        of_class = source_of(func.value) == self._class_of[method].name
        return "classmethod" in kinds or not (of_class or "staticmethod" in kinds)

    def call(self, function: Function, arguments: Sequence[Any], node: ast.Call) -> Any:
        """What a function of the script gives."""
        named = {k.arg: self.value(k.value) for k in node.keywords if k.arg is not None}
        return self._enter(function.node, arguments, named)

    def _enter(
        self, node: Defined | ast.Lambda, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        if len(self._inside) >= _MOST_CALLS:
            raise NotUnderstoodError(node.lineno, "calls itself")
        places = [*node.args.posonlyargs, *node.args.args]
        scope: dict[str, Any] = {one.arg: Unknown() for one in (*places, *node.args.kwonlyargs)}
        defaults = node.args.defaults
        for one, default in zip(places[len(places) - len(defaults) :], defaults, strict=True):
            scope[one.arg] = self.value(default)
        for one, given in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if given is not None:
                scope[one.arg] = self.value(given)
        scope |= {one.arg: value for one, value in zip(places, arguments, strict=False)}
        scope |= named
        for one in places:
            if one.annotation is not None and "INetworkDefinition" in source_of(one.annotation):
                scope[one.arg] = NetworkValue()
        before, self.scopes = self.scopes, [self.scopes[0], scope]
        if self._derived:
            self._derived.append(frozenset(scope) | _stored_in(node))
        self._inside.append(node)
        self._entered.add(node)
        self._may_return.append(False)
        value = None
        try:
            if isinstance(node, ast.Lambda):
                value = self.value(node.body)
            else:
                self.run(node.body)
        except JumpError as jump:
            value = jump.value
        finally:
            self.scopes = before
            self._inside.pop()
            may_return = self._may_return.pop()
            if self._derived:
                self._derived.pop()
        return Unknown(bool(self._derived)) if may_return else value

    def act(self, layer: LayerValue, name: str, arguments: Sequence[Any], line: int) -> None:
        """Does what a method says that changes a layer."""
        if name == "set_output_type":
            self._set(layer, What.OUTPUT, arguments[1], line)
        else:
            what = What.OUTPUT if name == "reset_output_type" else What.PRECISION
            earlier = self._last.pop((what, layer.place), None)
            if earlier is not None:
                del earlier.layers[layer.place]

    def _set(self, owner: Any, what: What, value: Any, line: int) -> None:
        """Notes that a line sets ``what`` of a layer."""
        if not isinstance(owner, LayerValue):
            if owner == Unknown(of_layer=True):
                raise NotUnderstoodError(line, "sets a layer that is not known here")
            return
        precision, reason = None, "sets a type that is not known here"
        if isinstance(value, Member):
            precision, reason = precision_of(value.path[-1])
        key = (line, what, precision)
        action = self._actions.setdefault(key, _Action(what, precision, reason))
        if self.by_number:
            action.said = _BY_NUMBER
        earlier = self._last.get((what, owner.place))
        if earlier is not None and earlier.precision != precision:
            earlier.layers.pop(owner.place, None)  # a later line replaces an earlier one
        action.layers[owner.place] = None
        self._last[what, owner.place] = action


def _stored_in(node: ast.AST) -> frozenset[str]:
    """The variables that something in ``node`` assigns."""
    return frozenset(
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    )
