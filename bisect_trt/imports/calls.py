"""Reads the calls of converters in a Python file: what each argument is when it is called."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bisect_trt.imports.changes import source_of
from bisect_trt.imports.script import Follower, JumpError
from bisect_trt.imports.values import NotUnderstoodError, Unknown

_DEFAULT_LIST = "DEFAULT_OP_BLOCK_LIST"
_DEFAULTS = (
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
)
"""What both tools keep in FP32 where no list of operators is given; one of them Resize too."""


class DefaultOperator(str):
    """An operator of the tools' own list, which a model need not have."""

    __slots__ = ()


@dataclass(frozen=True)
class GivenCall:
    """A call with the values of its keywords; ``defaults`` are the tool's own operators by then."""

    node: ast.Call
    values: Mapping[str, Any]
    defaults: tuple[str, ...]

    def line_of(self, key: str) -> int:
        """The line of an argument, from 1; the call's if it is in ``**options``."""
        found = self._argument(key)
        return self.node.lineno if found is None else found.lineno

    def source_of(self, key: str) -> str:
        """The text of an argument; dots if it is elsewhere."""
        found = self._argument(key)
        return "..." if found is None else source_of(found)

    def _argument(self, key: str) -> ast.expr | None:
        return next((one.value for one in self.node.keywords if one.arg == key), None)


class CallReader(Follower):
    """Follows a file to some of its ``calls``."""

    purpose = "converts"

    def __init__(self, tree: ast.Module, text: str, calls: Sequence[ast.Call]) -> None:
        super().__init__(tree, text, (), counts=False)
        self._calls = calls
        self._wanted = frozenset(calls)
        self._found: list[GivenCall] = []
        self._unread: dict[ast.Call, str] = {}
        self._defaults: list[str] = [DefaultOperator(name) for name in _DEFAULTS]

    def is_action(self, node: ast.AST) -> bool:
        """Whether ``node`` is one of the calls."""
        return node in self._wanted

    def calls(self) -> Sequence[GivenCall]:
        """The calls in the order in which they are made."""
        return self._found

    def unread(self) -> Iterator[tuple[ast.Call, str]]:
        """The calls that were not made, or not read, and why."""
        made = {call.node for call in self._found}
        for node in self._calls:
            if node in self._unread:
                yield node, self._unread[node]
            elif node not in made:
                yield node, "no line that is followed comes to this call"

    def read_name(self, node: ast.Name) -> Any:
        """A variable, or the tools' own list."""
        return self._defaults if node.id == _DEFAULT_LIST else super().read_name(node)

    def read_attribute(self, node: ast.Attribute) -> Any:
        """An attribute, or the tools' own list."""
        return self._defaults if node.attr == _DEFAULT_LIST else super().read_attribute(node)

    def read_call(self, node: ast.Call) -> Any:
        """A call; the values of its keywords are kept if it is one of those."""
        if node in self._wanted:
            self._keep(node)
        else:
            for keyword in node.keywords:
                if self.acts([keyword.value]):
                    self.value(keyword.value)
        return super().read_call(node)

    def skip(self, node: ast.AST, *, of_layer: bool = False) -> None:
        """Makes unknown what ``node`` changes; the calls in an expression are made once."""
        super().skip(node, of_layer=of_layer)
        if isinstance(node, ast.expr) and self.acts([node]):
            for part in ast.walk(node):
                if isinstance(part, ast.Call) and part in self._wanted:
                    self._keep(part)

    def _keep(self, node: ast.Call) -> None:
        values: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._given(keyword.value)
            if keyword.arg is not None:
                values[keyword.arg] = value
            elif isinstance(value, dict) and Unknown() not in value:
                values |= value
            else:
                self._unread[node] = f"its **{source_of(keyword.value)} is not known"[:120]
        if node in self._unread:
            values.setdefault("op_block_list", ())  # the tool's own list may not count
        defaults = self.known(self._defaults)
        if isinstance(defaults, Unknown):
            values.setdefault("op_block_list", defaults)
            defaults = []
        self._found.append(GivenCall(node, values, tuple(defaults)))

    def _given(self, node: ast.expr) -> Any:
        """What an argument is now; a list may change later."""
        try:
            value = self.value(node)
        except NotUnderstoodError:
            return Unknown()
        if isinstance(value, list | set):
            return type(value)(map(self.known, value))
        return dict(value) if isinstance(value, dict) else value

    def follow_importfrom(self, node: ast.ImportFrom) -> None:
        """Imported names; the tools' own list may get another one."""
        super().follow_importfrom(node)
        for alias in node.names:
            if alias.name == _DEFAULT_LIST:
                self.scopes[-1][alias.asname or alias.name] = self._defaults

    def follow_try(self, node: ast.Try) -> None:
        """A block; the calls of its handlers are made too."""
        super().follow_try(node)
        for handler in node.handlers:
            if self.acts(handler.body):
                self.run(handler.body)
                self.skip(handler)

    def follow_for(self, node: ast.For) -> None:
        """A loop; the calls in one over unknown things are made once."""
        if self.items(self.value(node.iter), node.lineno) is None:
            self._once(node)
        else:
            super().follow_for(node)

    def follow_while(self, node: ast.While) -> None:
        """A loop, whose calls are made once."""
        self._once(node)

    def _once(self, node: ast.For | ast.While) -> None:
        self.skip(node)
        if not self.acts(node.body):
            return
        try:
            self.run(node.body)
        except JumpError as jump:
            if jump.kind == "return":
                raise
        self.skip(node)
