"""The user's own code (metrics, input sources): loads it, calls it, and hashes its sources."""

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
    """SHA-256 of the user's files that ``function`` comes from, and of the values that it uses.

    ``loaded_as`` is its ``module:function`` where it was loaded by name: then the files are enough.
    """
    # Files that the code reads and installed packages are not hashed: --fresh is for those.
    module_name, _, name = loaded_as.rpartition(":")
    digest = hashlib.sha256(name.encode(errors="replace"))
    start = _file_of(_imported_as(module_name) if loaded_as else _module_of(function))
    for path in sorted(_own_files(start)) if start is not None else ():
        digest.update(path.name.encode(errors="replace") + path.read_bytes())
    if start is None or not loaded_as:
        digest.update(_by_value(function))
    return digest.hexdigest()


def _own_files(start: Path) -> set[Path]:
    """``start`` and the user's files that it imports, directly or not."""
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
    """The files that ``node`` of ``path`` may import."""
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
    """Pickles functions and classes by their code and values, to be hashed only."""

    def __init__(self) -> None:
        self.written = io.BytesIO()
        super().__init__(self.written, protocol=5)

    def reducer_override(self, value: Any) -> Any:
        """How ``value`` is pickled."""
        # All parts are given as a state, which may refer to ``value`` itself.
        if isinstance(value, CodeType):
            # The order of a set differs from process to process.
            constants = [
                sorted(c, key=repr) if isinstance(c, frozenset) else c for c in value.co_consts
            ]
            return list, (), (value.co_code, value.co_names, constants)
        if isinstance(value, ModuleType):
            is_imported = value.__name__ in sys.modules
            version = getattr(value, "__version__", "")
            attributes = {} if is_imported else _attributes(value)
            return list, (), (value.__name__, version, attributes)
        if isinstance(value, FunctionType) and _is_own(value):
            used = {n: value.__globals__.get(n) for n in sorted(_names(value.__code__))}
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            own = (value.__defaults__, value.__kwdefaults__, vars(value))
            return list, (), (value.__code__, used, cells, own)
        if isinstance(value, type) and _is_own(value):
            return list, (), (value.__qualname__, value.__bases__, _attributes(value))
        if isinstance(value, (staticmethod, classmethod)):
            return list, (), (value.__func__,)
        return NotImplemented


def _by_value(function: Callable[..., Any]) -> bytes:
    """The code and values of ``function`` as bytes; random where they cannot be pickled."""
    pickler = _ByValue()
    try:
        pickler.dump(function)
    except Exception:  # locks, open files: whatever the user's objects hold
        return uuid.uuid4().bytes
    return pickler.written.getvalue()


def _attributes(holder: type | ModuleType) -> dict[str, Any]:
    """The attributes of a class or module without those that Python adds to each."""
    added = ("__dict__", "__weakref__", "__doc__", "__builtins__")
    return {n: v for n, v in vars(holder).items() if n not in added}


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _is_own(value: Any) -> bool:
    """Whether a function or class is the user's, or cannot be imported by its name."""
    if "<" in value.__qualname__:  # <lambda>, <locals>
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
    """The Python file of an imported module of the user's, or None."""
    name = getattr(sys.modules.get(module), "__file__", None) or ""
    path = Path(name)
    return path if path.suffix == ".py" and path.is_file() and is_users(path) else None


@functools.cache
def _not_users() -> tuple[Path, ...]:
    """The folders of Python's modules, of installed packages and of this package."""
    paths = sysconfig.get_paths()
    names = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    names += [*site.getsitepackages(), site.getusersitepackages()]
    package = Path(__file__).resolve().parents[2]
    return (package, *{Path(n).resolve() for n in names if n})


def is_users(path: Path) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor this package's."""
    full = path.resolve()
    return not any(full.is_relative_to(folder) for folder in _not_users())


# Standard output belongs to the process, so one thread at a time may redirect it.
_STDOUT_LOCK = RLock()


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Runs the user's code with the current folder importable and its output on standard error.

    Raises:
        BadInputError: the code raised.
        MachineError: there was not enough memory for it.
    """
    here = os.getcwd()
    with _STDOUT_LOCK, contextlib.redirect_stdout(sys.stderr):
        sys.path.insert(0, here)
        try:
            yield
        except BadInputError:
            raise
        except SystemExit as error:
            raise BadInputError(f"{what}: it called exit({error.code})") from error
        except Exception as error:  # the user's code may raise anything
            if is_out_of_memory(error):
                raise MachineError(f"{what}: out of memory") from error
            reason = f"{type(error).__name__}: {one_line(error)}{_place(error)}"
            raise BadInputError(f"{what}: {reason}") from error
        finally:
            with contextlib.suppress(ValueError):  # the code may have changed sys.path
                sys.path.remove(here)
            with contextlib.suppress(OSError):  # or the current folder
                os.chdir(here)


def _place(error: Exception) -> str:
    """The innermost line of the user's code in the traceback of ``error``."""
    places = [(Path(f.filename), f.lineno) for f in extract_tb(error.__traceback__)]
    own = [(path.name, line) for path, line in places if path.is_file() and is_users(path)]
    return f" ({own[-1][0]}, line {own[-1][1]})" if own else ""


def load_function(text: str, flag: str) -> Callable[..., Any]:
    """The function named by ``module:function`` or ``file.py:function``.

    Raises:
        BadInputError: names ``flag`` and why it cannot be imported.
    """
    function = load_object(text, flag)
    if not callable(function):
        raise BadInputError(f"{flag} {text!r}: {text.rpartition(':')[2]} is not a function")
    checked: Callable[..., Any] = function
    return checked


def load_object(text: str, flag: str) -> Any:
    """The object named by ``module:name`` or ``file.py:name``.

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


def _imported_as(name: str) -> str:
    """The name in ``sys.modules`` of a module or file."""
    # A file must not replace a module of the same name.
    return f"_bisect_trt_user_{Path(name).stem}" if name.endswith(".py") else name


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    imported_as = _imported_as(name)
    spec = importlib.util.spec_from_file_location(imported_as, name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[imported_as] = module  # pickle and dataclasses look it up there
    spec.loader.exec_module(module)
    return module
