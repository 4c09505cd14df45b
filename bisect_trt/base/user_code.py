"""Code of the user's (metrics, input sources): loading it, and what its answers depend on."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pickle
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from traceback import extract_tb
from types import CodeType, ModuleType
from typing import Any

from bisect_trt.base.errors import BadInputError, MachineError, is_out_of_memory, one_line

_OF_EVERY_CLASS = frozenset({"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__"})


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of what ``function`` computes with, as far as Python can tell.

    Installed packages count by their name and version alone, and what is computed at run time (a
    module imported by a string, a file that is read) is not seen: see
    :mod:`bisect_trt.base.user_code` for the files.
    """
    found = hashlib.sha256()
    for part in _parts(function, {}):
        found.update(f"{len(part)} ".encode() + part)
    files = _reached(_module_of(function))
    for path in sorted(files):
        found.update(path.name.encode(errors="replace") + _content(path))
    return found.hexdigest()


def _parts(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """The code of a callable and the values it holds, as bytes that no other value gives.

    ``seen`` numbers what was looked at, so that it ends where values hold each other, and holds on
    to it, so that no two have one identity.
    """
    if id(value) in seen:
        yield f"again {seen[id(value)][0]}".encode()
        return
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes)):
        yield f"{type(value).__name__} {value!r}".encode(errors="replace")
        return
    seen[id(value)] = (len(seen), value)
    yield type(value).__qualname__.encode()
    if isinstance(value, functools.partial):
        yield from _all_parts((value.func, value.args, value.keywords), seen)
    elif isinstance(value, ModuleType):
        yield f"{value.__name__} {getattr(value, '__version__', '')}".encode()
    elif isinstance(value, (tuple, list)):
        yield from _all_parts(value, seen)
    elif isinstance(value, dict):
        yield from _all_parts([entry for pair in value.items() for entry in pair], seen)
    elif isinstance(value, (set, frozenset)):
        yield _plain(value)
    elif inspect.ismethod(value):  # it shows its function's code, and is bound to an object
        yield from _all_parts((value.__func__, value.__self__), seen)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _parts(value.__func__, seen)
    elif isinstance(getattr(value, "__code__", None), CodeType):
        yield from _function_parts(value, seen)
    elif inspect.isclass(value) or inspect.isroutine(value):
        where = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        yield ".".join(map(str, where)).encode()
        if inspect.isclass(value) and _is_written_here(value):
            own = {n: v for n, v in vars(value).items() if n not in _OF_EVERY_CLASS}
            yield from _all_parts((own, value.__bases__), seen)
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):  # NumPy's, which core knows not
        yield f"{value.dtype} {value.shape}".encode()
        objects = getattr(value.dtype, "hasobject", False)
        yield hashlib.sha256(repr(value).encode() if objects else value.tobytes()).digest()
    else:
        yield from _all_parts(
            (type(value), getattr(value, "__dict__", None) or _shown(value)), seen
        )


def _shown(value: Any) -> bytes | str:
    """What an object without attributes holds: its pickle (a tensor's values lie in C), or else its
    text but for an address.
    """
    try:
        return hashlib.sha256(pickle.dumps(value, protocol=4)).digest()
    except Exception:  # whatever its own code raises
        text = repr(value)
        return "" if " at 0x" in text else text


def _all_parts(values: Sequence[Any], seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    yield str(len(values)).encode()
    for value in values:
        yield from _parts(value, seen)


def _function_parts(function: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """Code, defaults, what is closed over, the globals it names, and what it wraps."""
    code = function.__code__
    yield from _code(code)
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # nothing was put into it yet
            cells.append(None)
    names = sorted(_names(code))
    values = {n: function.__globals__[n] for n in names if n in function.__globals__}
    # Of a module of the user's what is named beside it: it may have been set from elsewhere.
    modules = [m for m in values.values() if isinstance(m, ModuleType) and _is_own(m)]
    set_there = [{n: vars(m)[n] for n in names if n in vars(m)} for m in modules]
    held = (function.__defaults__, function.__kwdefaults__, cells, values, set_there)
    yield from _all_parts((*held, vars(function)), seen)


def _is_written_here(kind: type) -> bool:
    """Whether a class is the user's: of a file of theirs, or of a notebook, which has none."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ != "builtins" and (module is None or _is_own(module))


def _is_own(module: ModuleType) -> bool:
    """Whether a module is the user's: a file of theirs, or made without one."""
    name = getattr(module, "__file__", None)
    if name is None:
        return module.__name__ not in sys.builtin_module_names
    return is_users(Path(name))


def _code(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield " ".join(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield _plain(constant)


def _plain(value: Any) -> bytes:
    """A constant's text; that of a set in one order, which Python copies anew in each process."""
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
            if origin is not None and is_users(origin):
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
    return path.resolve() if path is not None and path.is_file() and is_users(path) else None


@functools.cache
def _not_users() -> tuple[Path, ...]:
    """Where Python's own modules and installed packages lie; this package counts by its version."""
    paths = sysconfig.get_paths()
    names = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    names += [*site.getsitepackages(), site.getusersitepackages()]
    ours = Path(__file__).resolve().parents[2]
    return (ours, *{Path(n).resolve() for n in names if n})


def is_users(path: Path) -> bool:
    """Whether the file is neither Python's, nor an installed package's, nor one of this package."""
    full = path.resolve()
    return not any(full.is_relative_to(folder) for folder in _not_users())


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


_CODE = (".py", ".pyc", ".so", ".pyd")
_NOT_FILES = ("/proc/", "/sys/", "/dev/")

_watching: dict[int, list[dict[str, str]]] = {}
"""By thread: what was opened by another one is not the watched code's."""

_known: dict[str, tuple[tuple[int, int, int], str]] = {}
_hooked = False


@contextmanager
def watched_reads(found: dict[str, str]) -> Iterator[None]:
    """Add to ``found`` the digest of the content of each file that this thread opens for reading
    inside, by its path; code is left out.
    """
    global _hooked
    if not _hooked:  # a hook can never be taken away again
        sys.addaudithook(_heard)
        _hooked = True
    watches = _watching.setdefault(threading.get_ident(), [])
    watches.append(found)
    try:
        yield
    finally:
        watches.pop()


def content_digest(path: str) -> str:
    """SHA-256 of a file's content; "" where it cannot be read."""
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    except OSError:
        return ""
    return found.hexdigest()


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open":
        return
    watches = _watching.get(threading.get_ident())
    if not watches or not _is_reading(*arguments[:3]):
        return
    path = os.path.abspath(os.fsdecode(arguments[0]))
    if path.endswith(_CODE) or path.startswith(_NOT_FILES) or not Path(path).is_file():
        return
    del _watching[threading.get_ident()]  # what is opened here is heard too
    try:
        digest = _digest_of(path)
    finally:
        _watching[threading.get_ident()] = watches
    for found in watches:
        found[path] = digest


def _digest_of(path: str) -> str:
    """The digest of a file as it is now; of one that seems not to have changed the one known."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    seems = (status.st_mtime_ns, status.st_size, status.st_ino)
    known = _known.get(path)
    if known is None or known[0] != seems:
        known = _known[path] = (seems, content_digest(path))
    return known[1]


def _is_reading(name: Any, mode: Any, flags: Any) -> bool:
    if not isinstance(name, (str, bytes, os.PathLike)):
        return False  # a descriptor, whose file was opened before
    if isinstance(mode, str) and set(mode) & set("wax+"):
        return False
    writing = os.O_WRONLY | os.O_RDWR
    return not (isinstance(flags, int) and mode is None and flags & writing)


read_by_imports: dict[str, str] = {}
"""What the user's modules read while they were imported, whoever asked for them first."""

_ALONE = RLock()
"""Where a print goes is the process's, not a thread's: one piece of the user's code at a time."""


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """The user's code inside: it may import from the current folder; what it prints goes to
    standard error, since standard output is the answer's; whatever it raises, exiting included, is
    told as its own.

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
    """File and line of the user's own that it came from, as far as there is one: the innermost
    outside this package and installed ones.
    """
    places = [(Path(f.filename), f.lineno) for f in extract_tb(error.__traceback__)]
    own = [(path.name, line) for path, line in places if path.is_file() and is_users(path)]
    return f" ({own[-1][0]}, line {own[-1][1]})" if own else ""


def load_function(text: str, flag: str) -> Callable[..., Any]:
    """What ``module:function`` names, looked for in the current folder too, or
    ``file.py:function``.

    Raises:
        BadInputError: names ``flag`` and why it cannot be imported.
    """
    function = load_object(text, flag)
    if not callable(function):
        raise BadInputError(f"{flag} {text!r}: {text.rpartition(':')[2]} is not a function")
    found: Callable[..., Any] = function
    return found


def load_object(text: str, flag: str) -> Any:
    """As :func:`load_function`, whatever it is that the module calls so.

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
    with users_code(f"{flag} {text!r}"), watched_reads(read_by_imports):
        found = getattr(_module(module_name), name, None)
    if found is None:
        raise BadInputError(f"{flag} {text!r}: {module_name} has no function {name!r}")
    return found


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    # A file may be called as a module that others need: it must not take that one's place.
    known_as = f"_bisect_trt_user_{Path(name).stem}"
    spec = importlib.util.spec_from_file_location(known_as, name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[known_as] = module  # pickles and dataclasses look it up there
    spec.loader.exec_module(module)
    return module
