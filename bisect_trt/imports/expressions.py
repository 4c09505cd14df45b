"""Reads the expressions of a build script: literals, and tests on layers. Nothing is run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bisect_trt.imports.changes import ALTERS
from bisect_trt.imports.entries import expression
from bisect_trt.imports.values import (
    Function,
    LayerValue,
    Member,
    Method,
    Module,
    NetworkValue,
    NotUnderstoodError,
    Place,
    TensorValue,
    TooManyTestsError,
    Unknown,
    attribute_of,
)
from bisect_trt.model.trt_names import NetworkLayer

MOST_STEPS = 1_500_000
"""How many parts of expressions are read before a script is given up: some ten seconds."""

MOST_ITEMS = 1_000_000
"""How many items a list that a script makes may have."""

_NETWORKS = frozenset(("network", "net", "network_definition", "trt_network", "inetwork"))
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}
_TEXT = frozenset(
    [
        "lower",
        "upper",
        "casefold",
        "strip",
        "lstrip",
        "rstrip",
        "startswith",
        "endswith",
        "split",
        "rsplit",
        "find",
        "rfind",
        "count",
        "partition",
        "rpartition",
        "removeprefix",
        "removesuffix",
        "isdigit",
        "splitlines",
    ]
)
_CONTAINERS = frozenset(
    [
        "append",
        "add",
        "extend",
        "update",
        "union",
        "intersection",
        "difference",
        "get",
        "items",
        "keys",
        "values",
        "copy",
        "issubset",
        "issuperset",
        "isdisjoint",
        "index",
        "count",
        "symmetric_difference",
    ]
)
_BUILTINS: Mapping[str, Callable[..., Any]] = {
    "any": any,
    "all": all,
    "set": set,
    "frozenset": frozenset,
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "sorted": sorted,
    "zip": lambda *lists: list(zip(*lists, strict=False)),
    "reversed": lambda items: list(reversed(items)),
    "int": int,
    "min": min,
    "max": max,
    "bool": bool,
    "abs": abs,
}
_EXPRESSIONS = ("match", "search", "fullmatch", "findall")
_REFUSED_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    re.error,
)


class Expressions:
    """Reads expressions about the layers ``subjects``; subclasses call functions.

    ``by_number`` says that the script counted layers.
    """

    def __init__(self, subjects: Sequence[NetworkLayer], *, counts: bool) -> None:
        self._subjects = subjects
        self._counts = counts
        self._steps = 0
        self._lost: dict[int, tuple[Any, Unknown]] = {}
        self.by_number = False
        self.scopes: list[dict[str, Any]] = [{}]

    def call(self, function: Function, arguments: Sequence[Any], node: ast.Call) -> Any:
        """What a function of the script gives."""
        raise NotImplementedError

    def act(self, layer: LayerValue, name: str, arguments: Sequence[Any], line: int) -> None:
        """Does what a method says that changes a layer."""
        raise NotImplementedError

    def depends(self, node: ast.expr, value: Any) -> bool:
        """Whether a layer decides the unknown ``value`` of ``node``."""
        raise NotImplementedError

    def assume(self, node: ast.expr) -> None:
        """Notes that a test that no layer decides is taken as true."""
        raise NotImplementedError

    def skip(self, node: ast.AST, *, of_layer: bool = False) -> None:
        """Makes unknown what ``node`` changes, as it is not followed; a layer may decide it."""
        raise NotImplementedError

    def lose(self, value: Any, *, of_layer: bool = False) -> None:
        """Makes a list, set or dictionary unknown, by whatever name; a change was not followed."""
        if isinstance(value, Method):
            value = value.receiver
        if isinstance(value, list | set | dict):
            self._lost[id(value)] = value, Unknown(of_layer)

    def known(self, value: Any) -> Any:
        """``value``; :class:`Unknown` if it was lost."""
        lost = self._lost.get(id(value))
        return value if lost is None else lost[1]

    def value(self, node: ast.expr) -> Any:
        """What ``node`` gives; :class:`Unknown` where only running it would show.

        Raises:
            NotUnderstoodError: it is about layers and cannot be read.
            TooManyTestsError: the script takes too long to read.
        """
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise TooManyTestsError(node.lineno)
        reader = getattr(self, f"read_{type(node).__name__.lower()}", None)
        if reader is None:
            self.skip(node)
            return Unknown(self._mentions_layer(node))
        try:
            return self.known(reader(node))
        except (RecursionError, MemoryError) as error:
            raise NotUnderstoodError(node.lineno, "is nested too deeply") from error
        except _REFUSED_ERRORS as error:
            raise NotUnderstoodError(node.lineno, f"cannot be read ({error})"[:120]) from error

    def truth(self, value: Any) -> bool | None:
        """Whether ``value`` is true; None if it is not known."""
        return None if isinstance(value, Unknown) else bool(value)

    def items(self, value: Any, line: int) -> Iterable[Any] | None:
        """What a loop over ``value`` gives; None if it is not known."""
        if isinstance(value, NetworkValue):
            return (LayerValue(i, layer) for i, layer in enumerate(self._subjects))
        if isinstance(value, list | tuple | set | frozenset | dict | range | str):
            return value
        return None

    def layer_at(self, place: Any, line: int) -> Any:
        """The layer at a place of the network."""
        if isinstance(place, Unknown) or not isinstance(place, int):
            return Unknown(of_layer=True)
        if not isinstance(place, Place):
            self._count(line)
        index = place + len(self._subjects) if place < 0 else int(place)
        if not 0 <= index < len(self._subjects):
            return Unknown(of_layer=True)
        return LayerValue(index, self._subjects[index])

    def _count(self, line: int) -> None:
        """Notes that layers are numbered, which only the parser's network allows."""
        if not self._counts:
            raise NotUnderstoodError(
                line, "counts layers, which needs TensorRT's parser; install tensorrt-rtx-cu13"
            )
        self.by_number = True

    def _mentions_layer(self, node: ast.AST) -> bool:
        """Whether a name in ``node`` stands for a layer or its tensor."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and self._is_of_layer(self.lookup(part.id)):
                return True
        return False

    def _is_of_layer(self, value: Any) -> bool:
        return isinstance(value, LayerValue | TensorValue) or value == Unknown(of_layer=True)

    def lookup(self, name: str) -> Any:
        """The value of the variable ``name``."""
        for scope in reversed(self.scopes):
            if name in scope:
                value = scope[name]
                return NetworkValue() if value == Unknown() and name in _NETWORKS else value
        if name in _NETWORKS:
            return NetworkValue()
        return Module("tensorrt") if name in ("trt", "tensorrt") else Unknown()

    # One reader for each kind of expression; what has none is not known.

    def read_constant(self, node: ast.Constant) -> Any:
        """A literal."""
        return node.value

    def read_name(self, node: ast.Name) -> Any:
        """A variable."""
        return self.lookup(node.id)

    def read_attribute(self, node: ast.Attribute) -> Any:
        """An attribute; an unknown object with layers is a network."""
        value = self.value(node.value)
        if value == Unknown() and node.attr in ("num_layers", "get_layer"):
            value = NetworkValue()
        if isinstance(value, NetworkValue) and node.attr == "num_layers":
            return Place(len(self._subjects))
        return attribute_of(value, node.attr, node.lineno)

    def read_subscript(self, node: ast.Subscript) -> Any:
        """An item or a slice."""
        value = self.value(node.value)
        if isinstance(node.slice, ast.Slice):
            ends = [
                None if end is None else self.value(end)
                for end in (node.slice.lower, node.slice.upper, node.slice.step)
            ]
            known = isinstance(value, str | list | tuple)
            return value[slice(*ends)] if known else Unknown(self._is_of_layer(value))
        place = self.value(node.slice)
        if isinstance(value, NetworkValue):
            return self.layer_at(place, node.lineno)
        if isinstance(value, str | list | tuple | dict) and not isinstance(place, Unknown):
            return value[place]
        return Unknown(self._is_of_layer(value) or self._is_of_layer(place))

    def _list(self, nodes: Sequence[ast.expr]) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                inner = self.items(self.value(node.value), node.lineno)
                found += [Unknown()] if inner is None else map(self.known, inner)
            else:
                found.append(self.value(node))
        return found

    def read_list(self, node: ast.List) -> Any:
        """A list."""
        return self._list(node.elts)

    def read_tuple(self, node: ast.Tuple) -> Any:
        """A tuple."""
        return tuple(self._list(node.elts))

    def read_set(self, node: ast.Set) -> Any:
        """A set."""
        return set(self._list(node.elts))

    def read_dict(self, node: ast.Dict) -> Any:
        """A dictionary."""
        if any(key is None for key in node.keys):
            return Unknown()
        keys = self._list([key for key in node.keys if key is not None])
        return dict(zip(keys, self._list(node.values), strict=True))

    def read_joinedstr(self, node: ast.JoinedStr) -> Any:
        """A formatted string of known values without formats."""
        parts: list[str] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value)
                if part.format_spec is not None or not isinstance(value, str | int):
                    return Unknown(self._is_of_layer(value))
                parts.append(str(int(value)) if isinstance(value, Place) else str(value))
            elif isinstance(part, ast.Constant):
                parts.append(str(part.value))
        if sum(map(len, parts)) > MOST_ITEMS:
            raise NotUnderstoodError(node.lineno, "makes too long a text")
        return "".join(parts)

    def read_unaryop(self, node: ast.UnaryOp) -> Any:
        """``not x`` and ``-x``."""
        value = self.value(node.operand)
        if isinstance(value, Unknown):
            return value
        return not value if isinstance(node.op, ast.Not) else -value

    def read_binop(self, node: ast.BinOp) -> Any:
        """Sums of texts, lists and numbers, and operations on sets."""
        left, right = self.value(node.left), self.value(node.right)
        for value in (left, right):
            if isinstance(value, Unknown | Member | Module | LayerValue | Method):
                return Unknown(self._is_of_layer(left) or self._is_of_layer(right))
        size = sum(_size(value) for value in (left, right))
        if isinstance(node.op, ast.Mult):
            size = _size(left) * _size(right)
        # Python's % also formats texts, to any length.
        known = not (isinstance(node.op, ast.Mod) and isinstance(left, str | bytes))
        found = _BINARY.get(type(node.op))
        if found is None or not known or size > MOST_ITEMS:
            return Unknown(self._mentions_layer(node))
        return found(left, right)

    def read_boolop(self, node: ast.BoolOp) -> Any:
        """``and`` and ``or``; an unknown part does not matter where another one decides."""
        decides, value = isinstance(node.op, ast.Or), None
        unknown: list[tuple[ast.expr, Any]] = []
        for part in node.values:
            value = self.value(part)
            if unknown:
                self.skip(part)  # it may not have been read
            if isinstance(value, Unknown):
                unknown.append((part, value))
            elif bool(value) is decides:
                return value
        if not unknown:
            return value
        of_layer = any(self.depends(part, its) for part, its in unknown)
        if decides or of_layer or len(unknown) == len(node.values):
            return Unknown(of_layer)
        for part, _ in unknown:
            self.assume(part)
        return True

    def read_ifexp(self, node: ast.IfExp) -> Any:
        """``a if test else b``."""
        test = self.value(node.test)
        if isinstance(test, Unknown):
            self.skip(node.body)
            self.skip(node.orelse)
            return test
        return self.value(node.body if test else node.orelse)

    def read_compare(self, node: ast.Compare) -> Any:
        """A comparison."""
        left = self.value(node.left)
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node)
            parts = (left, right, *(right if isinstance(right, list | tuple | set) else ()))
            unknown = [part for part in parts[:2] if isinstance(part, Unknown)]
            if unknown:
                return Unknown(any(part.of_layer for part in unknown))
            if any(isinstance(part, Place) for part in parts[:2]):
                self._count(node.lineno)
            if isinstance(op, ast.In | ast.NotIn) and Unknown() in parts[2:]:
                return Unknown(self._is_of_layer(left) or self._mentions_layer(node.left))
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _comprehended(self, node: Any, element: ast.expr) -> Iterator[Any]:
        """The elements of a comprehension."""

        def visit(level: int) -> Iterator[Any]:
            if level == len(node.generators):
                yield self.value(element)
                return
            generator = node.generators[level]
            items = self.items(self.value(generator.iter), node.lineno)
            if items is None:
                raise _UnknownItemsError
            for item in items:
                self.bind(generator.target, item)
                tests = [self.value(test) for test in generator.ifs]
                if any(isinstance(test, Unknown) for test in tests):
                    raise _UnknownItemsError
                if all(tests):
                    yield from visit(level + 1)

        self.scopes.append({})
        try:
            yield from visit(0)
        finally:
            self.scopes.pop()

    def _collected(self, node: Any, made: Callable[[Iterable[Any]], Any]) -> Any:
        try:
            return made(list(self._comprehended(node, node.elt)))
        except _UnknownItemsError:
            self.skip(node)
            return Unknown(self._mentions_layer(node))

    def read_listcomp(self, node: ast.ListComp) -> Any:
        """A list comprehension."""
        return self._collected(node, list)

    def read_generatorexp(self, node: ast.GeneratorExp) -> Any:
        """A generator, read as a list."""
        return self._collected(node, list)

    def read_setcomp(self, node: ast.SetComp) -> Any:
        """A set comprehension."""
        return self._collected(node, set)

    def read_lambda(self, node: ast.Lambda) -> Any:
        """A function without a name."""
        return Function(node)

    def bind(self, target: ast.expr, value: Any) -> None:
        """Gives ``value`` to the variables of ``target``."""
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            known = isinstance(value, list | tuple) and len(value) == len(target.elts)
            for place, part in enumerate(target.elts):
                self.bind(part, value[place] if known else Unknown(self._is_of_layer(value)))
        elif isinstance(target, ast.Starred):
            self.bind(target.value, Unknown())

    def read_call(self, node: ast.Call) -> Any:
        """A call of a known function or method."""
        arguments = self._list(node.args)
        of_layer = any(self._is_of_layer(one) for one in arguments)
        if isinstance(node.func, ast.Name) and isinstance(self.lookup(node.func.id), Unknown):
            for keyword in node.keywords:
                self.skip(keyword.value)
            return self._builtin(node.func.id, arguments, node)
        function = self.value(node.func)
        if isinstance(function, Function):
            return self.call(function, arguments, node)
        for keyword in node.keywords:
            self.skip(keyword.value)
        if isinstance(function, Method):
            return self._method(function, arguments, node)
        return Unknown(of_layer or function == Unknown(of_layer=True))

    def _builtin(self, name: str, arguments: list[Any], node: ast.Call) -> Any:
        """A call of one of Python's own functions."""
        unknown = [one for one in arguments if isinstance(one, Unknown)]
        if name in ("getattr", "hasattr") and not unknown and isinstance(arguments[1], str):
            found = attribute_of(arguments[0], arguments[1], node.lineno)
            return not isinstance(found, Unknown) if name == "hasattr" else found
        if name == "print":
            return None
        if name == "len" and isinstance(arguments[0], NetworkValue):
            return Place(len(self._subjects))
        if unknown or node.keywords:
            return Unknown(any(one.of_layer for one in unknown))
        if name == "range":
            return self._range(arguments, node.lineno)
        if name == "enumerate":
            items = self.items(arguments[0], node.lineno)
            is_network = isinstance(arguments[0], NetworkValue)
            number: Callable[[int], int] = Place if is_network else int
            return Unknown() if items is None else [(number(i), x) for i, x in enumerate(items)]
        if name == "len":
            return len(arguments[0])
        if name == "str":
            value = arguments[0]
            if isinstance(value, Member):
                return ".".join(value.path)
            return str(value) if isinstance(value, str | int) else Unknown(of_layer=True)
        if name in _BUILTINS:
            plain = [self._as_list(one) for one in arguments]
            if name in ("any", "all") and any(isinstance(x, Unknown) for x in plain[0]):
                return self._any_known(name, plain[0])
            return _BUILTINS[name](*plain)
        if any(isinstance(one, LayerValue) for one in arguments):
            raise NotUnderstoodError(node.lineno, f"calls {name}(), which is not in this file")
        return Unknown(any(self._is_of_layer(one) for one in arguments))

    def _as_list(self, value: Any) -> Any:
        return list(self.items(value, 0) or ()) if isinstance(value, NetworkValue) else value

    def _any_known(self, name: str, values: Sequence[Any]) -> Any:
        """``any`` or ``all`` of values some of which are not known."""
        decides = name == "any"
        if any(not isinstance(x, Unknown) and bool(x) is decides for x in values):
            return decides
        return Unknown(any(isinstance(x, Unknown) and x.of_layer for x in values))

    def _range(self, arguments: Sequence[int], line: int) -> Any:
        """The numbers of a range; over the whole network they are no numbers of the script's."""
        numbers = range(*arguments)
        if len(numbers) > MOST_ITEMS:
            raise NotUnderstoodError(line, "makes too large a list")
        whole = isinstance(arguments[-1], Place) and (len(arguments) == 1 or arguments[0] == 0)
        return [Place(i) for i in numbers] if whole else numbers

    def _method(self, method: Method, arguments: list[Any], node: ast.Call) -> Any:
        """A call of a method of a known value."""
        receiver, name = method.receiver, method.name
        unknown = [one for one in arguments if isinstance(one, Unknown)]
        if isinstance(receiver, NetworkValue):
            return self.layer_at(arguments[0], node.lineno) if name == "get_layer" else Unknown()
        if isinstance(receiver, LayerValue):
            if name == "get_output":
                index = arguments[0]
                known = isinstance(index, int) and 0 <= index < len(receiver.layer.outputs)
                return TensorValue(receiver, index) if known else Unknown(of_layer=True)
            self.act(receiver, name, arguments, node.lineno)
            return None
        of_layer = any(one.of_layer for one in unknown)
        if name in ALTERS and (unknown or node.keywords or name not in _CONTAINERS):
            self.lose(receiver, of_layer=of_layer)
        if unknown:
            return Unknown(of_layer)
        if node.keywords:
            return Unknown(of_layer=True)
        if receiver == Module("re"):
            if name == "compile":
                expression(arguments[0])  # refused where it may take for ever
                return re.compile(*arguments)
            if name not in _EXPRESSIONS:
                return Unknown()
            expression(arguments[0])  # refused where it may take for ever
            return getattr(re, name)(*arguments)
        if isinstance(receiver, re.Pattern):
            known = name in _EXPRESSIONS
            return getattr(receiver, name)(arguments[0]) if known else Unknown(of_layer=True)
        if isinstance(receiver, re.Match):
            known = name in ("group", "groups", "start", "end")
            return getattr(receiver, name)(*arguments) if known else Unknown(of_layer=True)
        if isinstance(receiver, str) and name == "join":
            return receiver.join(arguments[0])
        allowed = _TEXT if isinstance(receiver, str) else _CONTAINERS
        if name not in allowed:
            return Unknown()
        if sum(map(_size, (receiver, *arguments))) > MOST_ITEMS:
            raise NotUnderstoodError(node.lineno, "makes too large a list")
        found = getattr(receiver, name)(*arguments)
        return list(found) if name in ("items", "keys", "values") else found


def _size(value: Any) -> int:
    """How many items or characters ``value`` has; a number's own size."""
    if isinstance(value, str | bytes | list | tuple | set | frozenset | dict):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


class _UnknownItemsError(Exception):
    """What a comprehension goes over is not known."""
