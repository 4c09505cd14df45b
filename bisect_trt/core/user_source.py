"""What a function of the user's depends on, as one digest: its code, the constants and helpers that
it names, and the files of every module of the user's that it reaches by imports.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import inspect
import pickle
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of what ``function`` computes with, as far as Python can tell.

    Installed packages count by their name and version alone, and what is computed at run time (a
    module imported by a string, a file that is read) is not seen: see
    :mod:`bisect_trt.core.file_reads` for the files.
    """
    found = hashlib.sha256()
    for part in _parts(function, {}):
        found.update(f"{len(part)} ".encode() + part)
    files = _reached(_module_of(function))
    for path in sorted(files):
        found.update(path.name.encode(errors="replace") + _content(path))
    return found.hexdigest()


def _parts(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """The code of a callable and the values it holds, as bytes; ``seen`` holds on to what was
    looked at, so that no two have one identity.
    """
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, functools.partial):
        for part in (value.func, value.args, value.keywords):
            yield from _parts(part, seen)
        return
    unwrapped = inspect.unwrap(value) if callable(value) else value
    plain = getattr(unwrapped, "__func__", unwrapped)
    code = getattr(plain, "__code__", None)
    if isinstance(code, CodeType):
        yield from _code(code)
        yield from _parts((plain.__defaults__, plain.__kwdefaults__), seen)
        for cell in plain.__closure__ or ():
            yield from _parts(cell.cell_contents, seen)
        names = _names(code)
        for name in sorted(names.intersection(plain.__globals__)):
            yield name.encode()
            yield from _parts(plain.__globals__[name], seen)
    elif isinstance(value, ModuleType):
        version = getattr(value, "__version__", "")
        yield f"{value.__name__} {version}".encode()
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _parts(entry, seen)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield repr(key).encode(errors="replace")
            yield from _parts(entry, seen)
    elif isinstance(value, (set, frozenset)):
        yield _plain(value)
    elif not callable(value):
        try:
            yield pickle.dumps(value, protocol=4)
        except Exception:  # whatever its reduction raises: the type is all that can be told
            yield type(value).__qualname__.encode()
    else:
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}".encode()
        called = inspect.getattr_static(type(value), "__call__", None)
        if not inspect.isclass(value) and inspect.isfunction(called):
            yield from _parts(called, seen)
            yield from _parts(vars(value), seen)


def _code(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield " ".join(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield _plain(constant)


def _plain(value: Any) -> bytes:
    """A constant's text; that of a set in one order, which Python draws anew in each process."""
    if isinstance(value, (set, frozenset)):
        value = sorted(map(repr, value))
    return repr(value).encode(errors="replace")


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _module_of(function: Callable[..., Any]) -> ModuleType | None:
    plain = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    name = getattr(plain, "__module__", None) or type(plain).__module__
    return sys.modules.get(name)


def _reached(module: ModuleType | None) -> set[Path]:
    """The files of the user's that ``module`` is made of, imports followed."""
    found: set[Path] = set()
    start = _file_of(module)
    waiting = [(start, module.__name__)] if module is not None and start is not None else []
    while waiting:
        path, name = waiting.pop()
        if path in found:
            continue
        found.add(path)
        try:
            tree = ast.parse(_content(path))
        except (SyntaxError, ValueError):
            continue
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for imported in _imports(tree, package):
            origin = _origin(imported)
            if origin is not None and _is_users(origin):
                waiting.append((origin, imported))
    return found


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """The full names of what is imported anywhere in ``tree``, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _origin(name: str) -> Path | None:
    """The file of module ``name``, found without importing it."""
    if name in sys.modules:
        return _file_of(sys.modules[name])
    where: Any = None
    spec = None
    for part in _prefixes(name):
        try:
            spec = importlib.machinery.PathFinder.find_spec(part, where)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        where = spec.submodule_search_locations
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _file_of(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    path = Path(name) if name and str(name).endswith(".py") else None
    return path.resolve() if path is not None and path.is_file() and _is_users(path) else None


@functools.cache
def _not_users() -> tuple[Path, ...]:
    """Where Python's own modules and installed packages lie; this package counts by its version."""
    names = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    ours = Path(__file__).resolve().parents[1]
    return (ours, *{Path(n).resolve() for n in names if n and Path(n).name != "bin"})


def _is_users(path: Path) -> bool:
    full = path.resolve()
    return not any(full.is_relative_to(folder) for folder in _not_users())


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
