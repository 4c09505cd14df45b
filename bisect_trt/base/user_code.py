"""The user's own code (metrics, input sources): loads it, calls it, and hashes its sources."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from bisect_trt.base.errors import BadInputError, MachineError, is_out_of_memory, one_line


def source_digest(function: Callable[..., Any], loaded_as: str = "") -> str:
    """SHA-256 of the user's files that ``function`` comes from.

    ``loaded_as`` is its ``module:function`` where it was loaded by name. A function without such a
    name, as in a notebook, has a new digest each time.
    """
    # Files that the code reads and installed packages are not hashed: --fresh is for those.
    module_name, _, name = loaded_as.rpartition(":")
    if not loaded_as:
        module_name = getattr(function, "__module__", None) or ""
        name = getattr(function, "__name__", "")
    module = sys.modules.get(_imported_as(module_name))
    start = Path(getattr(module, "__file__", None) or "")
    # Arguments of a partial function and values in closures could not be told apart.
    if not loaded_as and (getattr(module, name, None) is not function or not start.is_file()):
        return uuid.uuid4().hex
    digest = hashlib.sha256(name.encode(errors="replace"))
    files = sorted(_own_files(start)) if start.suffix == ".py" and start.is_file() else ()
    for path in files:
        digest.update(path.name.encode(errors="replace") + path.read_bytes())
    if not files:
        digest.update(module_name.encode(errors="replace"))
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


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Runs the user's code with the current folder importable and its output on standard error.

    One thread at a time may use it, since standard output and ``sys.path`` are the process's.

    Raises:
        BadInputError: the code raised.
        MachineError: there was not enough memory for it.
    """
    here = os.getcwd()
    with contextlib.redirect_stdout(sys.stderr):
        sys.path.insert(0, here)  # a console script's path lacks the current folder
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
        known = ", or --requirement for a known metric" if flag == "--metric" else ""
        raise BadInputError(f"{flag} {text!r}: write MODULE:FUNCTION{known}")
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
