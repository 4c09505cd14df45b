"""Functions that the user wrote and names on the command line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock
from traceback import extract_tb
from types import ModuleType
from typing import Any

from bisect_trt.core.errors import BadInputError, MachineError, is_out_of_memory, one_line
from bisect_trt.core.user.file_reads import watched_reads
from bisect_trt.core.user.user_source import is_users

read_by_imports: dict[str, str] = {}
"""What the user's modules read while they were imported, whoever asked for them first."""

_ALONE = RLock()
"""Where a print goes is the process's, not a thread's: one piece of the user's code at a time."""


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """The user's code inside: it may import from the current folder; what it prints goes to
    standard error, since standard output is the answer's; whatever it raises, exiting included, is
    told as its own.

    Args:
        what: the option and the name that a message begins with.

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
