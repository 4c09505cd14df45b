"""The user's own code (metrics, input sources): loading it, calling it, and knowing it again."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import site
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock
from traceback import extract_tb
from types import CodeType, FunctionType, ModuleType
from typing import Any

from bisect_trt.base.errors import BadInputError, MachineError, is_out_of_memory, one_line


def source_digest(function: Callable[..., Any], loaded_as: str = "") -> str:
    """SHA-256 of the user's files that ``function`` is made of, and of the values that it holds.

    What the code reads, and installed packages, are not seen: ``--fresh`` is for those.
    ``loaded_as`` is the text that it was loaded by, if any: its files then say everything.
    """
    module_name, _, name = loaded_as.rpartition(":")
    found = hashlib.sha256(name.encode(errors="replace"))
    start = _file_of(_known_as(module_name) if loaded_as else _module_of(function))
    for path in sorted(_own_files(start)) if start is not None else ():
        found.update(path.name.encode(errors="replace") + path.read_bytes())
    if start is None or not loaded_as:
        found.update(_by_value(function))
    return found.hexdigest()


def _own_files(start: Path) -> set[Path]:
    """``start`` and the user's files that it imports, also inside functions, imports followed."""
    found, waiting = set[Path](), [start]
    while waiting:
        path = waiting.pop().resolve()
        if path in found or not is_users(path):
            continue
        found.add(path)
        with contextlib.suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(path.read_bytes())):
                waiting += _imported_files(path, node)
    return found


def _imported_files(path: Path, node: ast.AST) -> Iterator[Path]:
    """The files that an import statement of ``path`` may name."""
    folders = [path.parent, *map(Path, sys.path)]
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
        if node.level:
            folders = [path.parents[node.level - 1]]
    else:
        return
    for folder in folders:
        for name in names:
            place = folder
            for part in name.split("."):
                place = place / part
                yield from filter(Path.is_file, (place.with_suffix(".py"), place / "__init__.py"))


class _ByValue(pickle.Pickler):
    """Pickles functions and classes by what they are made of; nobody reads it back."""

    def __init__(self) -> None:
        self.written = io.BytesIO()
        super().__init__(self.written, protocol=5)

    def reducer_override(self, value: Any) -> Any:
        """How ``value`` is pickled; a state may refer to ``value`` itself."""
        if isinstance(value, CodeType):
            # Python orders a set anew in each process.
            constants = [
                sorted(c, key=repr) if isinstance(c, frozenset) else c for c in value.co_consts
            ]
            return list, (), (value.co_code, value.co_names, constants)
        if isinstance(value, ModuleType):
            known = value.__name__ in sys.modules
            version = getattr(value, "__version__", "")
            return list, (), (value.__name__, version, {} if known else _attributes(value))
        if isinstance(value, FunctionType) and _is_own(value):
            used = {n: value.__globals__.get(n) for n in sorted(_names(value.__code__))}
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            held = (value.__defaults__, value.__kwdefaults__, vars(value))
            return list, (), (value.__code__, used, cells, held)
        if isinstance(value, type) and _is_own(value):
            return list, (), (value.__qualname__, value.__bases__, _attributes(value))
        if isinstance(value, (staticmethod, classmethod)):
            return list, (), (value.__func__,)
        return NotImplemented


def _by_value(function: Callable[..., Any]) -> bytes:
    """What ``function`` is made of; never the same twice where that cannot be told."""
    pickler = _ByValue()
    try:
        pickler.dump(function)
    except Exception:  # locks, open files: whatever the user's objects hold
        return uuid.uuid4().bytes
    return pickler.written.getvalue()


def _ordered(constant: Any) -> Any:
    """A set as a list: Python orders its members anew in each process."""
    return sorted(constant, key=repr) if isinstance(constant, frozenset) else constant


def _attributes(holder: type | ModuleType) -> dict[str, Any]:
    """What a class or module holds, but for what Python puts into each."""
    of_every_one = ("__dict__", "__weakref__", "__doc__", "__builtins__")
    return {n: v for n, v in vars(holder).items() if n not in of_every_one}


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _is_own(value: Any) -> bool:
    """Whether a function or class is the user's, or one that no name leads to."""
    if "<" in value.__qualname__:
        return True
    module = sys.modules.get(value.__module__)
    path = getattr(module, "__file__", None)
    if path is None:
        return module is None or module.__name__ == "__main__"
    return is_users(Path(path))


def _module_of(function: Callable[..., Any]) -> str:
    plain = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    return str(getattr(plain, "__module__", None) or type(plain).__module__)


def _file_of(module: str) -> Path | None:
    """The Python file of a module that was imported, if it is the user's."""
    name = getattr(sys.modules.get(module), "__file__", None) or ""
    path = Path(name)
    return path if path.suffix == ".py" and path.is_file() and is_users(path) else None


@functools.cache
def _not_users() -> tuple[Path, ...]:
    """Where Python's own modules and installed packages lie; this package counts by its version."""
    paths = sysconfig.get_paths()
    names = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    names += [*site.getsitepackages(), site.getusersitepackages()]
    ours = Path(__file__).resolve().parents[2]
    return (ours, *{Path(n).resolve() for n in names if n})


def is_users(path: Path) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor this package's."""
    full = path.resolve()
    return not any(full.is_relative_to(folder) for folder in _not_users())


_ALONE = RLock()
"""Standard output is the process's, not a thread's: one call of the user's code at a time."""


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Runs the user's code: it may import from the current folder, and its errors are named as its.

    What it prints goes to standard error, since standard output is the answer's.

    Raises:
        BadInputError: the code raised.
        MachineError: there was not enough memory for it.
    """
    here = os.getcwd()
    with _ALONE, contextlib.redirect_stdout(sys.stderr):
        sys.path.insert(0, here)
        try:
            yield
        except BadInputError:
            raise
        except SystemExit as error:
            raise BadInputError(f"{what}: it called exit({error.code})") from error
        except Exception as error:  # the user's code may raise anything; say whose it was
            if is_out_of_memory(error):
                raise MachineError(f"{what}: out of memory") from error
            said = f"{type(error).__name__}: {one_line(error)}{_place(error)}"
            raise BadInputError(f"{what}: {said}") from error
        finally:
            with contextlib.suppress(ValueError):  # the code may have changed the path itself
                sys.path.remove(here)
            with contextlib.suppress(OSError):  # and have gone elsewhere
                os.chdir(here)


def _place(error: Exception) -> str:
    """The innermost line of the user's own that ``error`` came from, if there is one."""
    places = [(Path(f.filename), f.lineno) for f in extract_tb(error.__traceback__)]
    own = [(path.name, line) for path, line in places if path.is_file() and is_users(path)]
    return f" ({own[-1][0]}, line {own[-1][1]})" if own else ""


def load_function(text: str, flag: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names.

    Raises:
        BadInputError: names ``flag`` and why it cannot be imported.
    """
    function = load_object(text, flag)
    if not callable(function):
        raise BadInputError(f"{flag} {text!r}: {text.rpartition(':')[2]} is not a function")
    found: Callable[..., Any] = function
    return found


def load_object(text: str, flag: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` names.

    Raises:
        BadInputError: names ``flag`` and why it cannot be imported.
    """
    module_name, _, name = text.rpartition(":")
    if not module_name or not name:
        raise BadInputError(f"{flag} {text!r}: write MODULE:FUNCTION")
    if "/" in module_name and not module_name.endswith(".py"):
        raise BadInputError(
            f"{flag} {text!r}: {module_name} is no module's name: write "
            f"{module_name.strip('/').replace('/', '.')}:{name}, from a folder where Python finds "
            f"it, or {module_name}.py:{name}"
        )
    with users_code(f"{flag} {text!r}"):
        found = getattr(_module(module_name), name, None)
    if found is None:
        raise BadInputError(f"{flag} {text!r}: {module_name} has no function {name!r}")
    return found


def _known_as(name: str) -> str:
    """The module's name. A file's must not take the place of a module that is called like it."""
    return f"_bisect_trt_user_{Path(name).stem}" if name.endswith(".py") else name


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    known_as = _known_as(name)
    spec = importlib.util.spec_from_file_location(known_as, name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[known_as] = module  # pickles and dataclasses look it up there
    spec.loader.exec_module(module)
    return module
